"""Takes records in: each once, and what follows from them for events and VMs, in one transaction.

Several processes may do so at once. A VM's row is locked first, then those of the events that may change, both in the
order of their keys: so what is read here has everything that was committed before, and nobody waits for each other in a
circle. What is kept is `bridge.portal.fleet`'s lattice; the rows of `events` and `vms` are made from it anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, select

from bridge.events.record import Transition, TransitionRecord
from bridge.portal.audit import NewEntry
from bridge.portal.fleet import EventState, Fleet, StreamEnd, View, event_key, state_of, vm_key
from bridge.portal.schema import event_vms, events, records, streams, vms
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import in_parts, insert, upsert
from bridge.text import one_line

_OUTCOMES = frozenset({Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})
_end_of = msgspec.json.Decoder(StreamEnd).decode
_view_of = msgspec.json.Decoder(View).decode


class ReceivedRecord(msgspec.Struct, frozen=True):
    """A record, and the text that it came as."""

    record: TransitionRecord
    body: str


def add_records(connection: Connection, received: Sequence[ReceivedRecord], received_at: str) -> tuple[str, ...]:
    """Store *received* and return the keys of the events that changed; what came before changes nothing."""
    keys = sorted({vm_key(each.record) for each in received})
    _lock_vms(connection, keys)
    new = _stored(connection, received, received_at)
    if not new:
        return ()
    fleet = Fleet(*_lattice_of_vms(connection, keys, new))
    ends, views = dict(fleet.ends), dict(fleet.views)
    newest = fleet.newest_streams()
    for record in new:
        fleet.add(record)
    _save(connection, fleet, ends, views)
    moved = [key for key, stream in fleet.newest_streams().items() if newest.get(key) != stream]
    changed = {key[0] for key, view in fleet.views.items() if views.get(key) != view}
    changed |= _events_of_vms(connection, [key for key in moved if key in newest])
    _derive_events(connection, sorted(changed))
    outcomes = [_outcome(record) for record in new if record.transition in _OUTCOMES]
    add_entries(connection, outcomes, at=received_at)
    return tuple(sorted(changed))


def _lock_vms(connection: Connection, keys: Sequence[str]) -> None:
    connection.execute(insert(connection, vms).on_conflict_do_nothing(), [{"vm_key": key} for key in keys])
    for part in in_parts(keys):
        connection.execute(select(vms.c.vm_key).where(vms.c.vm_key.in_(part)).order_by(vms.c.vm_key).with_for_update())


def _stored(connection: Connection, received: Sequence[ReceivedRecord], received_at: str) -> list[TransitionRecord]:
    """Store those of *received* that are new, and return them. A sign of life is not kept: there are too many."""
    by_id = {each.record.id: each for each in received}
    known: set[str] = set()
    for part in in_parts(list(by_id)):
        known |= set(connection.execute(select(records.c.record_id).where(records.c.record_id.in_(part))).scalars())
    new = [each for key, each in by_id.items() if key not in known]
    rows = [_row(each, received_at) for each in new if each.record.transition is not Transition.HEARTBEAT]
    if rows:
        connection.execute(insert(connection, records).on_conflict_do_nothing(), rows)
    return [each.record for each in new]


def _row(each: ReceivedRecord, received_at: str) -> dict[str, Any]:
    record = each.record
    return {
        "record_id": record.id,
        "vm_key": vm_key(record),
        "stream_id": record.stream_id,
        "sequence": record.sequence,
        "event_key": None if record.event is None else event_key(record.event, record.vm),
        "transition": record.transition.value,
        "observed_at": record.observed_at,
        "received_at": received_at,
        "body": each.body,
    }


def _lattice_of_vms(
    connection: Connection, keys: Sequence[str], new: Iterable[TransitionRecord]
) -> tuple[list[StreamEnd], list[View]]:
    """Return the ends of all streams of the VMs *keys*, and their views of the events of *new*."""
    of_events = sorted({event_key(record.event, record.vm) for record in new if record.event is not None})
    ends = [end for part in in_parts(keys) for end in _ends(connection, streams.c.vm_key.in_(part))]
    views = [
        view
        for part in in_parts(keys)
        for some in in_parts(of_events)
        for view in _views(connection, event_vms.c.vm_key.in_(part) & event_vms.c.event_key.in_(some))
    ]
    return ends, views


def _save(connection: Connection, fleet: Fleet, ends: dict[Any, StreamEnd], views: dict[Any, View]) -> None:
    """Write what of *fleet* differs from *ends* and *views*."""
    changed_ends = [end for key, end in fleet.ends.items() if ends.get(key) != end]
    upsert(connection, streams, [_with_body(end, "vm_key", "stream_id") for end in changed_ends])
    changed_views = [view for key, view in fleet.views.items() if views.get(key) != view]
    upsert(connection, event_vms, [_with_body(view, "event_key", "vm_key", "stream_id") for view in changed_views])
    touched = {end.vm_key for end in changed_ends}
    rows = [
        {
            "vm_key": key,
            "name": _plain(end.vm.name),
            "stream_id": end.stream_id,
            "observed_at": end.observed_at,
            "body": _text(end),
        }
        for key, end in fleet.vms().items()
        if key in touched
    ]
    upsert(connection, vms, rows)


def _events_of_vms(connection: Connection, keys: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for part in in_parts(keys):
        query = select(event_vms.c.event_key).where(event_vms.c.vm_key.in_(part)).distinct()
        found |= set(connection.execute(query).scalars())
    return found


def _derive_events(connection: Connection, keys: Sequence[str]) -> None:
    if not keys:
        return
    connection.execute(insert(connection, events).on_conflict_do_nothing(), [{"event_key": key} for key in keys])
    for part in in_parts(keys):
        locked = select(events.c.event_key).where(events.c.event_key.in_(part)).order_by(events.c.event_key)
        connection.execute(locked.with_for_update())
        by_event: dict[str, list[View]] = {}
        for view in _views(connection, event_vms.c.event_key.in_(part)):
            by_event.setdefault(view.event_key, []).append(view)
        their_vms = sorted({view.vm_key for of_event in by_event.values() for view in of_event})
        newest = Fleet(
            end for some in in_parts(their_vms) for end in _ends(connection, streams.c.vm_key.in_(some))
        ).newest_streams()
        upsert(connection, events, [_event_row(state_of(each, newest)) for each in by_event.values()])


def _event_row(state: EventState) -> dict[str, Any]:
    return {
        "event_key": state.key,
        "state": state.state.value,
        "is_open": state.is_open,
        "first_observed_at": state.first_observed_at,
        "groups": _plain("\n".join(["", *state.groups, ""])),
        "body": _text(state),
    }


def _outcome(record: TransitionRecord) -> NewEntry:
    """Return the entry for what became of an approval, as the VM's agent tells it."""
    approval = record.approval
    return NewEntry(
        actor=one_line(", ".join(approval.approvers), 256) if approval is not None else "",
        action=record.transition.value,
        subject="" if record.event is None else event_key(record.event, record.vm),
        details={
            "record_id": record.id,
            "observed_at": record.observed_at,
            "vm_id": record.vm.vm_id,
            "vm": record.vm.name,
            "event_id": None if record.event is None else record.event.event_id,
            "approval": msgspec.to_builtins(approval),
        },
    )


def _ends(connection: Connection, where: ColumnElement[bool]) -> list[StreamEnd]:
    return [_end_of(body) for body in connection.execute(select(streams.c.body).where(where)).scalars()]


def _views(connection: Connection, where: ColumnElement[bool]) -> list[View]:
    return [_view_of(body) for body in connection.execute(select(event_vms.c.body).where(where)).scalars()]


def _with_body(value: StreamEnd | View, *key: str) -> dict[str, Any]:
    return {**{name: getattr(value, name) for name in key}, "body": _text(value)}


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _plain(text: str | None) -> str | None:
    """Return *text* as PostgreSQL can hold it."""
    return None if text is None else text.replace("\0", "\ufffd")
