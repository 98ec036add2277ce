"""Serves the timeline.

The URL contains the period. The default is the past 24 hours and the next 7 days.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from bridge.clock import format_time, parse_time
from bridge.events.event import ADVISORY_EVENT_TYPES, EVENT_TYPES
from bridge.portal.event_list import ListQuery
from bridge.portal.requests import RequestRefused, whole_number
from bridge.portal.site import Site
from bridge.portal.store.timeline import EventSpan, spans_between
from bridge.portal.timeline import Period, chart
from bridge.portal.users import Person

#: The periods of the zoom links, in hours.
ZOOMS = {6: "6 hours", 24: "1 day", 72: "3 days", 192: "8 days", 720: "30 days"}
_DEFAULT_HOURS, _MOST_HOURS = 192, 24 * 400
_PAST_SHARE = 1 / 8
#: In a period of up to 12 hours, each event has a bar. In a period of up to 10 days, a bar contains the events of an
#: hour, and in a longer period, the events of a day.
_SINGLE_HOURS, _HOURLY_HOURS = 12, 240
_HOUR_CHARACTERS, _DAY_CHARACTERS = len("2026-11-20T11"), len("2026-11-20")
_MOST_BARS = 200
_FROM = "%Y-%m-%dT%H:%MZ"


async def show(site: Site, request: Request, person: Person) -> Response:
    """``GET /timeline``: show the events in the `hours` hours after the time `from`."""
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
        chart=chart(spans, period, now=now),
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
    try:
        return datetime.strptime(text, _FROM).replace(tzinfo=timezone.utc)
    except ValueError:
        raise RequestRefused(400, "from must be a time such as 2026-11-20T11:00Z.") from None
