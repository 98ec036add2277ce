"""Provides the agent's clock and functions that format and parse times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import datetime, timezone

import msgspec

#: Security limit: the maximum accepted difference between the clock of a signer and the clock of this VM.
CLOCK_SKEW_SECONDS = 60


def format_time(moment: datetime) -> str:
    """Return *moment* in UTC with milliseconds: ``2026-11-20T11:00:01.123Z``."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: str) -> datetime:
    """Return the timezone-aware UTC datetime for *text*, which `format_time` returned."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def utc_now() -> datetime:
    """Return the wall-clock time as a timezone-aware UTC datetime."""
    return datetime.now(timezone.utc)


class Instant(msgspec.Struct, frozen=True, kw_only=True):
    """A point in time on both the wall clock and the monotonic clock (in seconds)."""

    wall: datetime
    monotonic: float

    def seconds_since(self, earlier: Instant) -> float:
        """Return the longer of the two elapsed times, because a suspension can stop one clock."""
        by_wall = (self.wall - earlier.wall).total_seconds()
        return max(by_wall, self.monotonic - earlier.monotonic, 0.0)


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Provides the time and random numbers to the agent. Tests replace this object."""

    now: Callable[[], datetime] = utc_now
    """Return the wall-clock time as a timezone-aware UTC datetime."""
    monotonic: Callable[[], float] = time.monotonic
    """Return the seconds since a fixed moment. The value never jumps."""
    random: Callable[[], float] = random.random
    """Return a number in [0, 1)."""

    def timestamp(self) -> float:
        """Return the wall-clock time in Unix seconds."""
        return self.now().timestamp()

    def instant(self) -> Instant:
        """Return the current instant on both clocks."""
        return Instant(wall=self.now(), monotonic=self.monotonic())


REAL_CLOCK = Clock()
