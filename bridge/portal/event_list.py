"""Builds the event list of the portal's first page, and parses the filters of a request.

Each line needs only the event's own row in the database, so the page loads quickly even if an event has many VMs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec.structs import asdict, replace
from sqlalchemy import Connection
from starlette.requests import Request

from bridge.clock import format_time
from bridge.portal.fleet import EventSummary, State
from bridge.portal.requests import choice_of, group_of, text_of
from bridge.portal.store.events import DECISIONS, EventFilter, events_over_since, list_events, summaries_of, vms_of
from bridge.portal.store.open_events import affected_vms, collapsed, count_open, filter_values, list_lines
from bridge.portal.users import Person
from bridge.text import without_nul

#: The states in the main table. Started and ended events have separate tables.
ANNOUNCED = (State.SCHEDULED, State.OTHER)
PAGE = 50
_FEW = 10
_HOUR = timedelta(hours=1)


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The event filters in the URL of the portal's first page.

    An empty filter matches every event.
    """

    q: str = ""
    type: str = ""
    state: str = ""
    decision: str = ""
    soon: str = ""
    region: str = ""
    group: str = ""
    subscription: str = ""
    vm: str = ""
    """A vmId. The list contains only events that this VM reports and no other VM reports."""
    wave: str = ""

    @classmethod
    def of(cls, request: Request) -> ListQuery:
        """Return the filter of *request*. Raise RequestRefused if a value is invalid."""
        found = {name: text_of(request, name) for name in cls.__struct_fields__}
        found["state"] = choice_of(request, "state", [each.value for each in State])
        found["decision"] = choice_of(request, "decision", DECISIONS)
        return cls(**{**found, "group": group_of(request)})

    def filter(self, person: Person) -> EventFilter:
        """Return the filter for the database, within the scope of *person*."""
        region = f"region:{self.region.casefold()}" if self.region else ""
        subscription = f"subscription:{self.subscription.casefold()}" if self.subscription else ""
        return EventFilter(
            text=self.q,
            event_type=self.type or None,
            states=(State(self.state),) if self.state else (),
            decision=self.decision or None,
            is_soon=bool(self.soon),
            groups=tuple(filter(None, (region, subscription, self.group))),
            scope=person.scope,
            sole_vm_key=self.vm or None,
            wave=self.wave or None,
        )

    def address(self, **changes: str) -> str:
        """Return the URL of the first page with this filter and *changes*."""
        query = urlencode(self.values(**changes))
        return f"/?{query}" if query else "/"

    def values(self, **changes: str) -> dict[str, str]:
        """Return the filters that are set, with *changes*."""
        values = {**asdict(self), **changes}
        return {name: value for name, value in values.items() if value}


def read_list(
    connection: Connection, query: ListQuery, person: Person, *, now: datetime, cursor: str | None
) -> dict[str, Any]:
    """Return the values of the first page for its template.

    The page lists announced events, and a few started and recently ended events. If the filter contains a state, the
    page lists only the events in this state.
    """
    at, wanted = format_time(now), query.filter(person)
    announced = replace(wanted, states=wanted.states or ANNOUNCED)
    if query.state and not State(query.state).is_open:
        page = list_events(connection, announced, now=at, limit=PAGE, cursor=cursor)
    else:  # these filters look for single events, which a wave would hide
        has_waves = not (query.q or query.decision or query.soon)
        page = list_lines(connection, announced, now=at, limit=PAGE, cursor=cursor, has_waves=has_waves)
    any_decision = replace(wanted, decision=None, is_soon=False)
    started = list_lines(connection, replace(any_decision, states=(State.STARTED,)), now=at, limit=_FEW)
    is_whole, oldest = not query.state and cursor is None, format_time(now - _HOUR)
    return {
        "page": page,
        "counts": count_open(connection, replace(any_decision, states=ANNOUNCED), now=at),
        "affected": affected_vms(connection, EventFilter(scope=person.scope), now=at),
        "collapsed": collapsed(connection, announced, now=at),
        "started": started.lines if is_whole else [],
        "started_total": started.events,
        "over": events_over_since(connection, any_decision, since=oldest, now=at, limit=_FEW) if is_whole else [],
        "menus": _menus(connection, person),
    }


def read_selection(
    connection: Connection, waves: Iterable[str], keys: Sequence[str], person: Person, *, now: str, limit: int
) -> dict[str, Any]:
    """Return announced events in *waves* or with *keys*, for the template of the form."""
    found: dict[str, EventSummary] = {}
    total = 0
    for wave in waves:
        wanted = EventFilter(wave=without_nul(wave), scope=person.scope)
        page = list_lines(connection, wanted, now=now, limit=limit)
        found |= {each.event.key: each.event for each in page.lines}
        total += page.total - len(page.lines)
    visible = summaries_of(connection, keys, scope=person.scope)
    found |= {key: each for key, each in visible.items() if each.state is State.SCHEDULED}
    shown = list(found.values())[:limit]
    vms = set().union(*vms_of(connection, [each.key for each in shown]).values())
    return {"events": shown, "vms": len(vms), "total": total + len(found)}


def _menus(connection: Connection, person: Person) -> dict[str, list[str]]:
    """Return the values of the filter menus, from the groups of the open events."""
    found = filter_values(connection, ("region:", "subscription:", "resource_group:", "labels."), scope=person.scope)
    return {
        "region": [each.removeprefix("region:") for each in found["region:"]],
        "subscription": [each.removeprefix("subscription:") for each in found["subscription:"]],
        "group": found["resource_group:"] + found["labels."],
    }
