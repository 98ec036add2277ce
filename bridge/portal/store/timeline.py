"""Reads the events of a period for the timeline.

To limit the number of bars, events of one type share a bar if they end within the same hour or day. For an open event,
NotBefore counts as the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, func, select, union_all

from bridge.events.record import Transition
from bridge.portal.fleet import EventSummary
from bridge.portal.schema import events, records
from bridge.portal.store.events import EventFilter, conditions, summaries_of
from bridge.portal.store.open_events import open_conditions


class EventSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An event, or several events of one type."""

    event: EventSummary | None
    """The event, or None for several events."""
    event_type: str | None
    is_open: bool
    events: int
    vms: int
    announced_at: str
    starts_at: str | None
    """The start, or NotBefore if no VM reported the start. None if the event did not start."""
    ends_at: str
    """The end, or NotBefore for an open event."""


class SpanPage(msgspec.Struct, frozen=True, kw_only=True):
    """The events of a period."""

    spans: tuple[EventSpan, ...]
    total: int
    """The number of events in the period. If the period has too many spans, `spans` does not contain all events."""

    @property
    def shown(self) -> int:
        """Return the number of events in `spans`."""
        return sum(each.events for each in self.spans)


def spans_between(
    connection: Connection,
    wanted: EventFilter,
    *,
    since: str,
    until: str,
    now: str,
    characters: int | None,
    limit: int,
) -> SpanPage:
    """Return the events of the period from *since* to *until*, newest first.

    If *characters* is None, each span contains one event. If *characters* is 13, a span contains all events of one type
    that end in the same hour. If *characters* is 10, a span contains all events of one type that end on the same day.
    """
    columns = [events.c[name] for name in ("event_key", "event_type", "is_open", "first_observed_at", "sort_at")]
    end = func.coalesce(events.c.over_at, events.c.sort_at).label("ends_at")
    announced = select(*columns, events.c.vm_count, end).where(events.c.first_observed_at <= until)
    are_open = announced.where(*open_conditions(wanted, now=now))
    if since > now:
        are_open = are_open.where(events.c.sort_at >= since)
    # Each part has an index. A condition with OR would scan the table.
    found = union_all(announced.where(*conditions(wanted, now=now), events.c.over_at >= since), are_open).subquery()
    part = found.c.event_key if characters is None else func.substr(found.c.ends_at, 1, characters)
    newest = func.max(found.c.ends_at)
    query = select(
        func.min(found.c.event_key).label("key"),
        func.count().label("events"),
        func.sum(found.c.vm_count).label("vms"),
        func.min(found.c.first_observed_at).label("announced_at"),
        func.min(found.c.sort_at).label("starts_at"),
        newest.label("ends_at"),
        found.c.event_type,
        found.c.is_open,
    ).group_by(found.c.event_type, found.c.is_open, part)
    rows = list(connection.execute(query.order_by(newest.desc(), part).limit(limit)))
    total = sum(row.events for row in rows)
    if len(rows) == limit:
        total = int(connection.execute(select(func.count()).select_from(found)).scalar_one())
    single = [row.key for row in rows if row.events == 1]
    summaries, started = summaries_of(connection, single), _started(connection, single)
    spans = []
    for row in rows:
        event = summaries.get(row.key) if row.events == 1 else None
        starts_at = started.get(row.key) or row.starts_at
        if not row.is_open and starts_at > row.ends_at:
            starts_at = None
        values = {**row._asdict(), "vms": int(row.vms or 0), "starts_at": starts_at}
        del values["key"]
        spans.append(EventSpan(event=event, **values))
    return SpanPage(spans=tuple(spans), total=total)


def _started(connection: Connection, keys: Sequence[str]) -> dict[str, str]:
    """Return the time of the first report that the event started."""
    query = select(records.c.event_key, func.min(records.c.observed_at).label("at"))
    query = query.where(records.c.event_key.in_(keys), records.c.transition == Transition.STARTED.value)
    return {row.event_key: row.at for row in connection.execute(query.group_by(records.c.event_key))}
