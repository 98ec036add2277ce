"""Times, durations and sizes in the words of a person who was just woken. Pure: whoever calls knows what time it is."""

from __future__ import annotations

from datetime import datetime, timezone

from bridge.text import duration

_MINUTE, _HOUR = 60, 3_600
_KIB = 1_024


def countdown(seconds: float) -> str:
    """Return "in 12 min 30 s", "4 min ago" or "now"; *seconds* are those until then."""
    if abs(seconds) < 1:
        return "now"
    return f"in {duration(seconds)}" if seconds > 0 else ago(-seconds)


def ago(seconds: float) -> str:
    """Return "4 min ago": of what is past, seconds beside minutes help nobody."""
    if _MINUTE <= seconds < _HOUR:
        return f"{int(seconds // _MINUTE)} min ago"
    return f"{seconds:.1f} s ago" if 0 <= seconds < 1 else f"{duration(seconds)} ago"


def utc(moment: datetime) -> str:
    """Return "2026-11-20 11:00:03Z"."""
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}Z"


def size(count: int) -> str:
    """Return *count* bytes as "620 KiB" or "1.2 MiB"."""
    if count < _KIB * _KIB:
        return f"{count / _KIB:.0f} KiB"
    return f"{count / _KIB / _KIB:.1f} MiB"


def counted(number: int, noun: str) -> str:
    """Return "1 record", "2 records"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
