"""Stores records and updates VMs and events in one transaction.

Each transaction first locks the rows of the affected VMs and then the rows of the affected events, sorted by key.
Because all transactions use this order, they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, select

from bridge.events.record import Transition, TransitionRecord
from bridge.portal.audit import NewEntry
from bridge.portal.fleet import EventState, Fleet, View, VmState, event_key, state_of, vm_key
from bridge.portal.schema import event_vms, events, records, streams, vms
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import in_parts, insert, upsert
from bridge.text import one_line

_OUTCOMES = frozenset({Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})
_vm_of = msgspec.json.Decoder(VmState).decode
_view_of = msgspec.json.Decoder(View).decode


class ReceivedRecord(msgspec.Struct, frozen=True):
    """A record and its original text."""

    record: TransitionRecord
    body: str


def add_records(connection: Connection, received: Sequence[ReceivedRecord], received_at: str) -> tuple[str, ...]:
    """Store *received* and return the keys of the events that changed.

    A record that is already stored can still update the state, because an agent that has lost its local state sends the
    same record again in a newer stream.
    """
    all_records = [each.record for each in received]
    keys = sorted({vm_key(record) for record in all_records})
    _lock_vms(connection, keys)
    new = _stored(connection, received, received_at)
    fleet = _fleet_of(connection, keys, all_records, received_at)
    vms_before, views_before, ended_before = dict(fleet.vms), dict(fleet.views), fleet.ended_by_list()
    for record in all_records:
        fleet.add(record, received_at=received_at)
    upsert(connection, vms, [_vm_row(vm) for key, vm in fleet.vms.items() if vms_before.get(key) != vm])
    changed_views = {key: view for key, view in fleet.views.items() if views_before.get(key) != view}
    upsert(connection, event_vms, [_view_row(view) for view in changed_views.values()])
    changed = sorted({event for event, _ in changed_views.keys() | (fleet.ended_by_list() ^ ended_before)})
    _derive_events(connection, changed)
    outcomes = [_outcome(record) for record in new if record.transition in _OUTCOMES]
    add_entries(connection, outcomes, at=received_at)
    return tuple(changed)


def _lock_vms(connection: Connection, keys: Sequence[str]) -> None:
    connection.execute(insert(connection, vms).on_conflict_do_nothing(), [{"vm_key": key} for key in keys])
    for part in in_parts(keys):
        connection.execute(select(vms.c.vm_key).where(vms.c.vm_key.in_(part)).order_by(vms.c.vm_key).with_for_update())


def _stored(connection: Connection, received: Sequence[ReceivedRecord], received_at: str) -> list[TransitionRecord]:
    """Store and return new records. Do not store heartbeats."""
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


def _fleet_of(
    connection: Connection, keys: Sequence[str], all_records: Sequence[TransitionRecord], received_at: str
) -> Fleet:
    stream_ids = sorted({(vm_key(record), record.stream_id) for record in all_records})
    rows = [{"vm_key": key, "stream_id": stream, "first_received_at": received_at} for key, stream in stream_ids]
    connection.execute(insert(connection, streams).on_conflict_do_nothing(), rows)
    found = Fleet()
    for part in in_parts(keys):
        known = connection.execute(select(streams).where(streams.c.vm_key.in_(part)))
        found.streams |= {(row.vm_key, row.stream_id): row.first_received_at for row in known}
        found.vms |= _vms(connection, part)
        views = _views(connection, event_vms.c.vm_key.in_(part))
        found.views |= {(view.event_key, view.vm_key): view for view in views}
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
        known: dict[str, VmState] = {}
        for some in in_parts(sorted({view.vm_key for of_event in by_event.values() for view in of_event})):
            known |= _vms(connection, some)
        upsert(connection, events, [_event_row(state_of(each, known)) for each in by_event.values()])


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


def _vms(connection: Connection, keys: Sequence[str]) -> dict[str, VmState]:
    query = select(vms.c.vm_key, vms.c.body).where(vms.c.vm_key.in_(keys), vms.c.body.is_not(None))
    return {row.vm_key: _vm_of(row.body) for row in connection.execute(query)}


def _views(connection: Connection, where: ColumnElement[bool]) -> list[View]:
    return [_view_of(body) for body in connection.execute(select(event_vms.c.body).where(where)).scalars()]


def _vm_row(vm: VmState) -> dict[str, Any]:
    return {"vm_key": vm.vm_key, "name": _plain(vm.vm.name), "observed_at": vm.observed_at, "body": _text(vm)}


def _view_row(view: View) -> dict[str, Any]:
    return {"event_key": view.event_key, "vm_key": view.vm_key, "body": _text(view)}


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _plain(text: str | None) -> str | None:
    """Return *text* without NUL, which PostgreSQL cannot store."""
    return None if text is None else text.replace("\0", "\ufffd")
