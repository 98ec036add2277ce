"""Lists events in pages, and reads the records of an event."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, func, or_, select

from bridge.portal.fleet import EventState
from bridge.portal.schema import events, records, vms
from bridge.portal.store.database import escaped_like

_decode = msgspec.json.Decoder(EventState).decode
PAGE = 100


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A selection of events."""

    is_open: bool | None = None
    group: str | None = None
    before: tuple[str, str] | None = None


def list_events(connection: Connection, wanted: EventFilter, *, limit: int = PAGE) -> list[EventState]:
    """Return at most *limit* events, newest first."""
    query = select(events.c.body).where(events.c.body.is_not(None))
    if wanted.is_open is not None:
        query = query.where(events.c.is_open == wanted.is_open)
    if wanted.group is not None:
        query = query.where(events.c.groups.like(f"%\n{escaped_like(wanted.group)}\n%", escape="\\"))
    if wanted.before is not None:
        first, key = wanted.before
        is_same = (events.c.first_observed_at == first) & (events.c.event_key > key)
        query = query.where(or_(events.c.first_observed_at < first, is_same))
    ordered = query.order_by(events.c.first_observed_at.desc(), events.c.event_key).limit(limit)
    return [_decode(body) for body in connection.execute(ordered).scalars()]


def event_of(connection: Connection, key: str) -> EventState | None:
    """Return the event with that key, or None if no record reports it."""
    body = connection.execute(select(events.c.body).where(events.c.event_key == key)).scalar_one_or_none()
    return None if body is None else _decode(body)


def place_in_list(event: EventState) -> tuple[str, str]:
    """Return the position of *event* in the list."""
    return event.first_observed_at, event.key


def records_of(connection: Connection, key: str, *, limit: int = 1_000) -> list[str]:
    """Return the original text of the event's newest *limit* records, oldest first."""
    query = select(records.c.body).where(records.c.event_key == key)
    newest = query.order_by(records.c.observed_at.desc(), records.c.record_id).limit(limit)
    return list(connection.execute(newest).scalars())[::-1]


def records_by_id(connection: Connection, ids: Sequence[str]) -> list[str]:
    """Return the records with *ids* in their original text."""
    query = select(records.c.body).where(records.c.record_id.in_(ids)).order_by(records.c.record_id)
    return list(connection.execute(query).scalars())


def numbers(connection: Connection) -> dict[str, int]:
    """Return the number of VMs that have sent a record, and of open events."""
    is_open = select(func.count()).select_from(events).where(events.c.is_open.is_(True))
    known_vms = select(func.count()).select_from(vms).where(vms.c.body.is_not(None))
    return {
        "vms": int(connection.execute(known_vms).scalar_one()),
        "open_events": int(connection.execute(is_open).scalar_one()),
    }
