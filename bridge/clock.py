"""Times: the clock that the agent reads, one instant on both clocks, and how a time is written down."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import datetime, timezone

import msgspec

#: How far the clock of whoever signs a decision may differ from this VM's. A security bound: it is defined only here.
CLOCK_SKEW_SECONDS = 60


def format_time(moment: datetime) -> str:
    """Return *moment* in UTC with milliseconds: ``2026-11-20T11:00:01.123Z``."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: str) -> datetime:
    """Return the aware UTC datetime that `format_time` wrote."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def utc_now() -> datetime:
    """Return the time of the wall clock, aware."""
    return datetime.now(timezone.utc)


class Instant(msgspec.Struct, frozen=True, kw_only=True):
    """One instant on both clocks; *monotonic* is in seconds."""

    wall: datetime
    monotonic: float

    def seconds_since(self, earlier: Instant) -> float:
        """Return the time since *earlier*, by whichever clock says longer: a suspended VM stops one of them."""
        by_wall = (self.wall - earlier.wall).total_seconds()
        return max(by_wall, self.monotonic - earlier.monotonic, 0.0)


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in the agent that is not the same twice: the wall clock, the monotonic clock, and chance.

    It is one value and one argument, so that a test which steps through a day replaces one thing.
    """

    now: Callable[[], datetime] = utc_now
    """Return the time of the wall clock, aware, in UTC."""
    monotonic: Callable[[], float] = time.monotonic
    """Return seconds since some fixed moment; they never jump."""
    random: Callable[[], float] = random.random
    """Return a number in [0, 1)."""

    def timestamp(self) -> float:
        """Return the time of the wall clock in Unix seconds."""
        return self.now().timestamp()

    def instant(self) -> Instant:
        """Return this instant on both clocks."""
        return Instant(wall=self.now(), monotonic=self.monotonic())


#: The machine's own clocks.
REAL_CLOCK = Clock()
