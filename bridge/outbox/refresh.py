"""What a sink was told last of each event that is active: for sinks that are told it again.

An event is active while the last document has it and it is not over there. What is told again is the last delivered
record of its life (`scheduled`, `started`, `updated`): an approval's outcome says nothing of where the event stands.
Nothing is told again while something newer of the event is pending for the sink, nor of an event whose end it knows.
Functions over a connection, that only read: a record told again is no new delivery.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from bridge.events.diff import is_over
from bridge.events.event import decode_document
from bridge.events.record import Transition, TransitionRecord, decode_record
from bridge.outbox import meta
from bridge.outbox.database import SQL
from bridge.outbox.deliveries import PendingDelivery

_LIFE = frozenset({Transition.SCHEDULED, Transition.STARTED, Transition.UPDATED})


def active_events(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Return the keys of the events that are in the last document and not over, in its order."""
    text = meta.get(connection, "document")
    events = () if text is None else decode_document(text).events
    return tuple(dict.fromkeys(event.key for event in events if not is_over(event)))


def told_events(connection: sqlite3.Connection, sink: str) -> dict[str, float]:
    """Return by key when *sink* got the last record of each active event it was told of, in seconds since 1970."""
    found = {}
    for key in active_events(connection):
        newest = connection.execute(SQL["told_of_event"], (sink, key)).fetchone()
        if newest is not None:
            found[key] = float(newest[1])
    return found


def last_told(connection: sqlite3.Connection, sink: str, event_key: str) -> PendingDelivery | None:
    """Return what *sink* was told last of the event, None when it is not to be told that again.

    Whether it has ended since `told_events` its newest record says: to decode a large document for each would be dear.
    """
    newest = connection.execute(SQL["newest_of_life"], (event_key,)).fetchone()
    if newest is None or Transition(newest[1]).is_ending:
        return None
    if connection.execute(SQL["has_newer"], {"sink": sink, "event_key": event_key}).fetchone():
        return None
    for sequence, _, body in connection.execute(SQL["told_of_event"], (sink, event_key)):
        try:
            record = decode_record(body)
        except msgspec.MsgspecError:  # it was delivered all the same, by a version that reads it
            continue
        if record.transition.is_ending:
            return None
        if record.transition in _LIFE:
            return _as_pending(sequence, record, body)
    return None


def _as_pending(sequence: int, record: TransitionRecord, body: str) -> PendingDelivery:
    event = record.event
    return PendingDelivery(
        sequence=sequence,
        event_key=record.event_key,
        urgent=record.is_urgent,
        attempts=0,
        not_before=None if event is None or event.not_before is None else event.not_before.timestamp(),
        body=body,
    )


def told_sequences(connection: sqlite3.Connection, event_keys: Iterable[str]) -> set[int]:
    """Return the records of *event_keys* that a sink may have to be told, again or for the first time."""
    found: set[int] = set()
    for key in event_keys:
        found.update(sequence for _, sequence in connection.execute(SQL["last_told_sequences"], (key,)))
        found.update(sequence for sequence, _, _ in connection.execute(SQL["newest_of_life"], (key,)))
    return found
