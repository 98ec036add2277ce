"""Computes the coordinates of the bars in the timeline.

Each bar has two parts: the time from the announcement to the start, and the impact from the start to the end. Bars and
their labels share a row where they do not overlap. The table below the picture contains the same data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone

import msgspec

from bridge.clock import parse_time
from bridge.portal.fleet import State
from bridge.portal.store.timeline import EventSpan

WIDTH = 1_400
_ROW = 22
_TOP = 24
_LEAST_BAR = 4.0
_GAP = 12.0
_CHARACTER = 6.6
_MOST_TICKS = 12
_TICK_MINUTES = (10, 30, 60, 180, 360, 720, 1_440, 4_320, 10_080)


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
        fixed = now if self.since <= now <= self.until else self.since + timedelta(hours=self.hours / 2)
        return Period(since=fixed - (fixed - self.since) * (hours / self.hours), hours=hours)

    def x(self, at: datetime) -> float:
        """Return the x-coordinate of the time *at*, or of the end that is closest to *at*."""
        share = (at - self.since) / timedelta(hours=self.hours)
        return round(min(max(share, 0.0), 1.0) * WIDTH, 1)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the x-coordinate and the text of each time on the axis."""
        minutes = next((each for each in _TICK_MINUTES if self.hours * 60 / each <= _MOST_TICKS), _TICK_MINUTES[-1])
        step = minutes * 60
        at = datetime.fromtimestamp(-(-self.since.timestamp() // step) * step, timezone.utc)
        while at < self.until:
            is_midnight = (at.hour, at.minute) == (0, 0)
            yield self.x(at), f"{at.day} {at:%b}" if is_midnight else f"{at:%H:%M}"
            at += timedelta(seconds=step)


class Bar(msgspec.Struct, kw_only=True):
    """The coordinates of one span and its label."""

    span: EventSpan
    x: float
    width: float
    impact_x: float
    impact_width: float
    label_x: float
    anchor: str
    left: float
    """The left end of the bar and its label."""
    right: float
    y: float = _TOP


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """The whole picture."""

    height: int
    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    now: float | None
    width: int = WIDTH


def chart(spans: Sequence[EventSpan], period: Period, *, now: datetime) -> Chart:
    """Return the picture of *spans*."""
    bars = sorted((_bar(span, period, now) for span in spans), key=lambda bar: (bar.left, bar.right))
    ends: list[float] = []
    for bar in bars:
        row = next((number for number, end in enumerate(ends) if end + _GAP <= bar.left), len(ends))
        ends[row : row + 1] = [bar.right]
        bar.y = _TOP + _ROW * row
    return Chart(
        height=_TOP + _ROW * max(1, len(ends)) + 4,
        bars=tuple(bars),
        ticks=tuple(period.ticks()),
        now=period.x(now) if period.since <= now <= period.until else None,
    )


def _bar(span: EventSpan, period: Period, now: datetime) -> Bar:
    end = parse_time(span.ends_at)
    if span.event is not None and span.is_open:
        end += timedelta(seconds=max(0, span.event.event.duration_seconds or 0))
        if span.event.state is State.STARTED:
            end = max(end, now)
    left, right = period.x(parse_time(span.announced_at)), period.x(end)
    right = max(right, min(left + _LEAST_BAR, WIDTH))
    left = min(left, right - _LEAST_BAR)
    impact = right
    if span.starts_at is not None:
        impact = min(max(period.x(parse_time(span.starts_at)), left), right - _LEAST_BAR / 2)
    length = len(span.label) * _CHARACTER
    label_x, anchor = right + 5, "start"
    if label_x + length > WIDTH:
        label_x, anchor = (left - 5, "end") if left - 5 >= length else (left + 5, "start")
    label_left = label_x - length if anchor == "end" else label_x
    return Bar(
        span=span,
        x=left,
        width=round(right - left, 1),
        impact_x=impact,
        impact_width=round(right - impact, 1),
        label_x=round(label_x, 1),
        anchor=anchor,
        left=min(left, label_left),
        right=max(right, label_left + length),
    )
