"""Times: the wall clock, one instant on both clocks, and how a time is written down."""

from __future__ import annotations

from datetime import datetime, timezone

import msgspec


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
