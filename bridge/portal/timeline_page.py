"""Serves the timeline, and computes the coordinates of its bars.

The URL contains the period. The default is the past 24 hours and the next 7 days. Each bar has two parts: the notice,
from the announcement to the start, and the impact, from the start to the end. Bars and labels that do not overlap can
share a row. The table below the picture contains the same data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bridge.clock import format_time, parse_time
from bridge.events.event import ADVISORY_EVENT_TYPES, EVENT_TYPES
from bridge.portal.event_list import ListQuery
from bridge.portal.fleet import State
from bridge.portal.requests import RequestRefused, whole_number
from bridge.portal.site import Site
from bridge.portal.store.timeline import EventSpan, spans_between
from bridge.portal.users import Person

#: The periods of the zoom links, in hours.
ZOOMS = {6: "6 hours", 24: "1 day", 72: "3 days", 192: "8 days", 720: "30 days"}
_DEFAULT_HOURS, _MOST_HOURS = 192, 24 * 400
_PAST_SHARE = 1 / 8
#: In a period of up to 12 hours, each event has its own bar. In a period of up to 10 days, events of one type share a
#: bar if they end in the same hour. In a longer period, they share a bar if they end on the same day.
_SINGLE_HOURS, _HOURLY_HOURS = 12, 240
_HOUR_CHARACTERS, _DAY_CHARACTERS = len("2026-11-20T11"), len("2026-11-20")
_MOST_BARS = 200
_FROM = "%Y-%m-%dT%H:%MZ"


async def show(site: Site, request: Request, person: Person) -> Response:
    """``GET /timeline``: show the events of a period that starts at `from` and lasts `hours`."""
    now, query = site.clock.now(), request.query_params
    hours = whole_number(query, "hours", _DEFAULT_HOURS, lowest=1, highest=_MOST_HOURS)
    period = Period(since=_since(query.get("from"), now, hours), hours=hours)
    filters = ListQuery.of(request)
    characters = None if hours <= _SINGLE_HOURS else _HOUR_CHARACTERS
    if hours > _HOURLY_HOURS:
        characters = _DAY_CHARACTERS
    spans, total = await site.store.read(
        spans_between,
        filters.filter(person),
        since=format_time(period.since),
        until=format_time(period.until),
        now=format_time(now),
        characters=characters,
        limit=_MOST_BARS,
    )

    def address(shown: Period) -> str:
        values = {"from": shown.since.strftime(_FROM), "hours": shown.hours, **filters.values()}
        return f"/timeline?{urlencode(values)}"

    def link(span: EventSpan) -> str:
        if span.event is not None:
            return f"/events/{span.event.key}"
        middle, closer = parse_time(span.ends_at), 6 if characters == _HOUR_CHARACTERS else 24
        return address(Period(since=middle - timedelta(hours=closer / 2), hours=closer))

    return site.login.page(
        request,
        person,
        "timeline.html",
        bars=bars_of(spans, period, now=now),
        width=WIDTH,
        spans=spans,
        total=total,
        period=period,
        link=link,
        zooms=[(name, address(period.zoomed(each, now=now)), each == hours) for each, name in ZOOMS.items()],
        earlier=address(period.moved(-0.5)),
        later=address(period.moved(0.5)),
        types=[each for each in EVENT_TYPES if each not in ADVISORY_EVENT_TYPES],
        filters=filters,
        is_moved="from" in query,
    )


def _since(text: str | None, now: datetime, hours: int) -> datetime:
    if not text:
        return now - timedelta(hours=hours * _PAST_SHARE)
    if "2000" <= text < "2200":  # the page also calculates times before and after the period
        with contextlib.suppress(ValueError):
            return datetime.strptime(text, _FROM).replace(tzinfo=timezone.utc)
    raise RequestRefused(400, "from must be a time from 2000 to 2199, such as 2026-11-20T11:00Z.")


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
        """Return a period of *hours* that keeps *now* in place, or the middle if *now* is outside."""
        fixed = now if self.since <= now <= self.until else self.since + timedelta(hours=self.hours / 2)
        return Period(since=fixed - (fixed - self.since) * (hours / self.hours), hours=hours)

    def x(self, at: datetime) -> float:
        """Return the x-coordinate of *at*. If *at* is outside the period, use the nearer end."""
        share = (at - self.since) / timedelta(hours=self.hours)
        return round(min(max(share, 0.0), 1.0) * WIDTH, 1)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the x-coordinate and label of each tick. A label that does not fit is empty."""
        minutes = next((each for each in _TICK_MINUTES if self.hours * 60 / each <= _MOST_TICKS), _TICK_MINUTES[-1])
        step = minutes * 60
        at = datetime.fromtimestamp(-(-self.since.timestamp() // step) * step, timezone.utc)
        while at < self.until:
            x, is_midnight = self.x(at), (at.hour, at.minute) == (0, 0)
            label = f"{at.day} {at:%b}" if is_midnight else f"{at:%H:%M}"
            yield x, label if x + (len(label) + 1) * _CHARACTER <= WIDTH else ""
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


def bars_of(spans: Sequence[EventSpan], period: Period, *, now: datetime) -> list[Bar]:
    """Return the bars of *spans*. Bars in the same row do not overlap."""
    bars = sorted((_bar(span, period, now) for span in spans), key=lambda bar: (bar.left, bar.right))
    ends: list[float] = []
    for bar in bars:
        row = next((number for number, end in enumerate(ends) if end + _GAP <= bar.left), len(ends))
        ends[row : row + 1] = [bar.right]
        bar.y = _TOP + _ROW * row
    return bars


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
