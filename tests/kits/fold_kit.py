"""Adds records to a database of the portal, and reads the events."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fleet_records import NOW

from bridge.clock import format_time
from bridge.events.event import encode
from bridge.events.record import TransitionRecord
from bridge.portal.fleet import EventState
from bridge.portal.schema import events
from bridge.portal.store.database import Store
from bridge.portal.store.events import events_of
from bridge.portal.store.ingest import ReceivedRecord, add_records

#: The records of `fleet_records` arrive at this time.
ARRIVAL = format_time(NOW + timedelta(minutes=30))


def received(records: Any) -> list[ReceivedRecord]:
    """Return *records* with their text."""
    return [ReceivedRecord(record, encode(record).decode()) for record in records]


def add(store: Store, *records: TransitionRecord, at: str = ARRIVAL) -> None:
    """Store *records*, which arrive at the time *at*."""
    store.write(add_records, received(records), at)


def all_events(store: Store, *, now: str = ARRIVAL) -> dict[str, EventState]:
    """Return every event by its key."""
    keys = store.read(lambda connection: list(connection.execute(events.select()).scalars()))
    return store.read(events_of, keys, now=now)


def only_event(store: Store, *records: TransitionRecord, at: str = ARRIVAL) -> EventState:
    """Store *records* of one event, and return the event."""
    add(store, *records, at=at)
    [event] = all_events(store, now=at).values()
    return event
