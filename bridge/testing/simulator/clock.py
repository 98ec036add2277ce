"""Provides ManualClock, a clock for tests that moves only when the test advances it.

With this clock, a test can simulate the 15 minutes before an event without waiting.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from bridge.clock import Clock


class ManualClock:
    """A clock that changes only when you call `advance`."""

    def __init__(self, now: datetime = datetime(2030, 1, 1, tzinfo=timezone.utc)) -> None:
        self._start = now
        self._seconds = 0.0

    @property
    def clock(self) -> Clock:
        """Return this clock as a `Clock` for the agent.

        The random numbers of this `Clock` are always 0.0.
        """
        return Clock(now=self.now, monotonic=self.monotonic, random=lambda: 0.0)

    def advance(self, seconds: float) -> None:
        """Advance the clock by *seconds*."""
        self._seconds += seconds

    def monotonic(self) -> float:
        """Return the seconds since this clock was created."""
        return self._seconds

    def now(self) -> datetime:
        """Return the current time."""
        return self._start + timedelta(seconds=self._seconds)
