"""Reads the events of a period for the timeline.

For a long period, events of the same type that end within the same hour or day share one bar, which limits the number
of bars. For an open event, NotBefore counts as the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, desc, func, select, union_all

from bridge.events.record import Transition
from bridge.portal.fleet import EventSummary
from bridge.portal.schema import events, records
from bridge.portal.sentences import how_many
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
    """The number of VMs. A VM of several events counts several times."""
    announced_at: str
    starts_at: str | None
    """The start, or NotBefore if no VM reported the start. None if the event did not start."""
    ends_at: str
    """The end, or NotBefore for an open event."""

    @property
    def label(self) -> str:
        """Return "Freeze of app-1, app-2 +3", or "48 x Freeze, up to 212 VMs"."""
        name = self.event_type or "Event"
        if self.event is None:
            return f"{self.events} x {name}, up to {how_many(self.vms)}"
        return f"{name} of {self.event.names_text or how_many(0)}"


def spans_between(
    connection: Connection,
    wanted: EventFilter,
    *,
    since: str,
    until: str,
    now: str,
    characters: int | None,
    limit: int,
) -> tuple[list[EventSpan], int]:
    """Return at most *limit* spans from *since* to *until*, in descending order of their end.

    Also return the number of all events in the period.

    Events of one type share a span if the first *characters* characters of their end times are equal: 13 for the same
    hour, and 10 for the same day. With None, each event has its own span.
    """
    columns = [events.c[name] for name in ("event_key", "event_type", "is_open", "first_observed_at", "sort_at")]
    end = func.coalesce(events.c.over_at, events.c.sort_at).label("ends_at")
    # Because of the concatenation, SQLite reads the events that ended later than *since*, instead of all events that
    # were announced before *until*. Most people look at recent events.
    announced = select(*columns, events.c.vm_count, end).where(events.c.first_observed_at.concat("") <= until)
    are_open = announced.where(*open_conditions(wanted, now=now))
    if since > now:
        are_open = are_open.where(events.c.sort_at >= since)
    # Each part has an index. A condition with OR would scan the table.
    found = union_all(announced.where(*conditions(wanted, now=now), events.c.over_at >= since), are_open).subquery()
    part = found.c.event_key if characters is None else func.substr(found.c.ends_at, 1, characters)
    query = select(
        func.min(found.c.event_key).label("key"),
        func.count().label("events"),
        func.sum(found.c.vm_count).label("vms"),
        func.min(found.c.first_observed_at).label("announced_at"),
        func.min(found.c.sort_at).label("starts_at"),
        func.max(found.c.ends_at).label("ends_at"),
        found.c.event_type,
        found.c.is_open,
        func.sum(func.count()).over().label("total"),
    ).group_by(found.c.event_type, found.c.is_open, part)
    rows = list(connection.execute(query.order_by(desc("ends_at"), part).limit(limit)))
    single = [row.key for row in rows if row.events == 1]
    summaries, started = summaries_of(connection, single), _started(connection, single)
    spans = []
    for row in rows:
        starts_at = started.get(row.key, row.starts_at)
        span = EventSpan(
            event=summaries.get(row.key),
            event_type=row.event_type,
            is_open=row.is_open,
            events=row.events,
            vms=int(row.vms or 0),
            announced_at=row.announced_at,
            starts_at=starts_at if row.is_open or starts_at <= row.ends_at else None,
            ends_at=row.ends_at,
        )
        spans.append(span)
    return spans, int(rows[0].total) if rows else 0


def _started(connection: Connection, keys: Sequence[str]) -> dict[str, str]:
    """Return the time of the first report that the event started."""
    query = select(records.c.event_key, func.min(records.c.observed_at).label("at"))
    query = query.where(records.c.event_key.in_(keys), records.c.transition == Transition.STARTED.value)
    return {row.event_key: row.at for row in connection.execute(query.group_by(records.c.event_key))}
