"""ManualClock: a clock that a test advances.

The simulator takes its clock as an argument, so that a test steps through fifteen minutes of notice without threads and
without waiting.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from bridge.clock import Clock


class ManualClock:
    """A clock that stands still until `advance`."""

    def __init__(self, now: datetime = datetime(2030, 1, 1, tzinfo=timezone.utc)) -> None:
        self._start = now
        self._seconds = 0.0

    @property
    def clock(self) -> Clock:
        """Return this clock in the form that the agent's parts take; its random number is always 0.0."""
        return Clock(now=self.now, monotonic=self.monotonic, random=lambda: 0.0)

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass."""
        self._seconds += seconds

    def monotonic(self) -> float:
        """Return the seconds that have passed."""
        return self._seconds

    def now(self) -> datetime:
        """Return the time of day."""
        return self._start + timedelta(seconds=self._seconds)
