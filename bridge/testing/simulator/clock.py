"""ManualClock is a clock for tests, which changes only when the test advances it.

With this clock, a test of 15 minutes of notice needs no threads and no waiting.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from bridge.clock import Clock


class ManualClock:
    """A clock that changes only with `advance`."""

    def __init__(self, now: datetime = datetime(2030, 1, 1, tzinfo=timezone.utc)) -> None:
        self._start = now
        self._seconds = 0.0

    @property
    def clock(self) -> Clock:
        """Return this clock as a `Clock` for the parts of the agent. Its random numbers are always 0.0."""
        return Clock(now=self.now, monotonic=self.monotonic, random=lambda: 0.0)

    def advance(self, seconds: float) -> None:
        """Advance the clock by *seconds*."""
        self._seconds += seconds

    def monotonic(self) -> float:
        """Return the seconds since the creation of the clock."""
        return self._seconds

    def now(self) -> datetime:
        """Return the current time."""
        return self._start + timedelta(seconds=self._seconds)
