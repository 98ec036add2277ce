"""The timeline: a bar for each event, from when it was told of until it ended, as numbers for an SVG. Pure.

The picture repeats what the table below it says in words, and is hidden from those who cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

import msgspec

from bridge.clock import parse_time
from bridge.portal.fleet import EventState

WIDTH = 1_000
ROW = 22
_TOP = 24
_LEAST_BAR = 4.0
_TICKS = 6


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One event."""

    key: str
    state: str
    label: str
    x: float
    y: float
    width: float
    not_before: float | None


class Tick(msgspec.Struct, frozen=True):
    """A line of the scale."""

    x: float
    text: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """The whole picture."""

    width: int
    height: int
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    now: float


def seconds_of(text: str) -> float:
    """Return the Unix seconds of a time as it is stored."""
    return parse_time(text).timestamp()


def chart(events: Sequence[EventState], *, now: datetime) -> Chart | None:
    """Return the picture of *events*, the first at the top; None when there is none."""
    if not events:
        return None
    starts = [seconds_of(event.first_observed_at) for event in events]
    ends = [now.timestamp() if event.is_open else seconds_of(event.observed_at) for event in events]
    due = [event.event.not_before.timestamp() if event.event.not_before else None for event in events]
    first = min(starts)
    last = max([now.timestamp(), *ends, *(each for each in due if each is not None)])
    span = max(last - first, 60.0)

    def x(seconds: float) -> float:
        return round(min(max((seconds - first) / span, 0.0), 1.0) * WIDTH, 1)

    bars = tuple(
        Bar(
            key=event.key,
            state=event.state.value,
            label=event.event.event_type or "Event",
            x=x(start),
            y=_TOP + ROW * row,
            width=max(_LEAST_BAR, x(end) - x(start)),
            not_before=None if at is None else x(at),
        )
        for row, (event, start, end, at) in enumerate(zip(events, starts, ends, due, strict=True))
    )
    scale = tuple(
        Tick(x(first + span * part / _TICKS), _text(first + span * part / _TICKS, span)) for part in range(_TICKS)
    )
    return Chart(width=WIDTH, height=_TOP + ROW * len(bars) + 4, bars=bars, ticks=scale, now=x(now.timestamp()))


def _text(seconds: float, span: float) -> str:
    at = datetime.fromtimestamp(seconds, timezone.utc)
    return f"{at:%d %b %H:%M}" if span > timedelta(days=1).total_seconds() else f"{at:%H:%M:%S}"
