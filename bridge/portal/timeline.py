"""Computes the coordinates of the event bars in the timeline.

The table below the picture contains the same information as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

import msgspec

from bridge.clock import parse_time
from bridge.portal.fleet import EventState

WIDTH = 1_000
ROW = 22
_TOP = 24
_LEAST_BAR = 4.0
_TICKS = 6
_DAY_SECONDS = 86_400.0


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One event."""

    state: str
    x: float
    y: float
    width: float
    not_before: float | None


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """The whole picture."""

    width: int
    height: int
    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    now: float


def chart(events: Sequence[EventState], *, now: datetime) -> Chart | None:
    """Return the picture of *events*, the first one at the top; None without events."""
    if not events:
        return None
    starts = [parse_time(event.first_observed_at) for event in events]
    ends = [now if event.is_open else parse_time(event.observed_at) for event in events]
    first = min(starts).timestamp()
    last = max([now, *ends, *(event.event.not_before for event in events if event.event.not_before)]).timestamp()
    span = max(last - first, 60.0)

    def x(at: datetime) -> float:
        return round(min(max((at.timestamp() - first) / span, 0.0), 1.0) * WIDTH, 1)

    bars = tuple(
        Bar(
            state=event.state.value,
            x=x(start),
            y=_TOP + ROW * row,
            width=max(_LEAST_BAR, x(end) - x(start)),
            not_before=None if event.event.not_before is None else x(event.event.not_before),
        )
        for row, (event, start, end) in enumerate(zip(events, starts, ends, strict=True))
    )
    label = "%d %b %H:%M" if span > _DAY_SECONDS else "%H:%M:%S"
    times = [datetime.fromtimestamp(first + span * part / _TICKS, timezone.utc) for part in range(_TICKS)]
    ticks = tuple((x(at), at.strftime(label)) for at in times)
    return Chart(width=WIDTH, height=_TOP + ROW * len(bars) + 4, bars=bars, ticks=ticks, now=x(now))
