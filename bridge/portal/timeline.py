"""Computes the coordinates of the bars in the timeline.

Each bar has two parts: the time from the announcement to the start, and the impact from the start to the end. Bars and
their labels share a row where they do not overlap. The table below the picture contains the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone

import msgspec

from bridge.clock import parse_time
from bridge.portal.fleet import State
from bridge.portal.sentences import how_many
from bridge.portal.store.timeline import EventSpan

WIDTH = 1_400
ROW = 22
_TOP = 24
_LEAST_BAR = 4.0
_GAP = 12.0
_CHARACTER = 6.6
_MOST_TICKS = 12
_TICK_MINUTES = (10, 30, 60, 180, 360, 720, 1_440, 4_320, 10_080)
_TYPES = ("Freeze", "Reboot", "Redeploy")


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """The period of the page."""

    since: datetime
    hours: int

    @property
    def until(self) -> datetime:
        """Return the end."""
        return self.since + timedelta(hours=self.hours)

    def moved(self, share: float) -> Period:
        """Return this period, moved by *share* of its length."""
        return Period(since=self.since + timedelta(hours=self.hours * share), hours=self.hours)

    def zoomed(self, hours: int, *, now: datetime) -> Period:
        """Return a period of *hours* in which *now*, or else the middle, stays at its place."""
        middle = self.since + timedelta(hours=self.hours / 2)
        fixed = now if self.since <= now <= self.until else middle
        return Period(since=fixed - (fixed - self.since) * (hours / self.hours), hours=hours)


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinates of one span."""

    span: EventSpan
    color: str
    label: str
    y: float
    x: float
    width: float
    impact_x: float
    impact_width: float
    label_x: float
    anchor: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """The whole picture."""

    width: int
    height: int
    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    now: float | None


def chart(spans: Sequence[EventSpan], period: Period, *, now: datetime) -> Chart:
    """Return the picture of *spans*."""
    seconds = period.hours * 3_600.0

    def x(at: datetime) -> float:
        share = (at - period.since).total_seconds() / seconds
        return round(min(max(share, 0.0), 1.0) * WIDTH, 1)

    bars = sorted((_bar(span, x, now) for span in spans), key=lambda bar: (_extent(bar)[0], _extent(bar)[1]))
    ends: list[float] = []
    placed = []
    for bar in bars:
        left, right = _extent(bar)
        row = next((number for number, end in enumerate(ends) if end + _GAP <= left), len(ends))
        ends[row : row + 1] = [right]
        placed.append(msgspec.structs.replace(bar, y=_TOP + ROW * row))
    return Chart(
        width=WIDTH,
        height=_TOP + ROW * max(1, len(ends)) + 4,
        bars=tuple(placed),
        ticks=tuple((x(at), text) for at, text in _ticks(period)),
        now=x(now) if period.since <= now <= period.until else None,
    )


def label_of(span: EventSpan) -> str:
    """Return "Freeze of app-1, app-2 +3", or "48 x Freeze, 212 VMs"."""
    name = span.event_type or "Event"
    if span.event is None:
        return f"{span.events} x {name}, {span.vms} VM{'' if span.vms == 1 else 's'}"
    return f"{name} of {span.event.names_text or how_many(0)}"


def _bar(span: EventSpan, x: Callable[[datetime], float], now: datetime) -> Bar:
    announced, end = parse_time(span.announced_at), parse_time(span.ends_at)
    start = None if span.starts_at is None else parse_time(span.starts_at)
    if span.is_open:
        expected = span.event.duration_seconds if span.event is not None else None
        end = max(end + timedelta(seconds=max(0, expected or 0)), now if _has_started(span) else end)
    left, right = x(announced), x(end)
    right = max(right, min(left + _LEAST_BAR, WIDTH))
    left = min(left, right - _LEAST_BAR)
    impact = right if start is None else min(max(x(start), left), right - _LEAST_BAR / 2)
    label = label_of(span)
    width = len(label) * _CHARACTER
    label_x, anchor = right + 5, "start"
    if label_x + width > WIDTH:
        label_x, anchor = (left - 5, "end") if left - 5 >= width else (left + 5, "start")
    return Bar(
        span=span,
        color=(span.event_type or "").lower() if span.event_type in _TYPES else "other",
        label=label,
        y=0.0,
        x=left,
        width=round(right - left, 1),
        impact_x=impact,
        impact_width=round(right - impact, 1),
        label_x=round(label_x, 1),
        anchor=anchor,
    )


def _has_started(span: EventSpan) -> bool:
    return span.event is not None and span.event.state is State.STARTED


def _extent(bar: Bar) -> tuple[float, float]:
    width = len(bar.label) * _CHARACTER
    left = bar.label_x - width if bar.anchor == "end" else bar.label_x
    return min(bar.x, left), max(bar.x + bar.width, left + width)


def _ticks(period: Period) -> list[tuple[datetime, str]]:
    minutes = next((each for each in _TICK_MINUTES if period.hours * 60 / each <= _MOST_TICKS), _TICK_MINUTES[-1])
    step = minutes * 60
    at = datetime.fromtimestamp(-(-period.since.timestamp() // step) * step, timezone.utc)
    found = []
    while at < period.until:
        is_midnight = (at.hour, at.minute) == (0, 0)
        found.append((at, f"{at.day} {at:%b}" if is_midnight else f"{at:%H:%M}"))
        at += timedelta(seconds=step)
    return found
