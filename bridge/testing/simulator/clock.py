"""The simulator's clocks: the machine's own, and one that a test moves by hand.

Everything in the simulator asks a clock that is handed in, so that a test steps through fifteen minutes of notice in
no time, without threads and without luck. The running simulator uses the machine's own clocks.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Protocol

from bridge.clock import Clock as AgentClock


class Clock(Protocol):
    """Two clocks: one that never jumps, and one that the agent's own wall clock agrees with."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment."""

    def now(self) -> datetime:
        """Return the time of day, aware, in UTC."""


class RealClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment."""
        return time.monotonic()

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        return datetime.now(timezone.utc)


class ManualClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self, now: datetime = datetime(2030, 1, 1, tzinfo=timezone.utc)) -> None:
        self._start = now
        self._seconds = 0.0

    @property
    def clock(self) -> AgentClock:
        """Return this clock as the agent's parts take one; its chance is always 0.0."""
        return AgentClock(now=self.now, monotonic=self.monotonic, random=lambda: 0.0)

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass."""
        self._seconds += seconds

    def monotonic(self) -> float:
        """Return the seconds that have been let pass."""
        return self._seconds

    def now(self) -> datetime:
        """Return the time of day at which the clock stands."""
        return self._start + timedelta(seconds=self._seconds)
