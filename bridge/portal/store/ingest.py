"""Stores records and updates VMs and events in one transaction.

Each transaction first locks the rows of the affected VMs, then the rows of the affected names, and then the rows of the
affected events, sorted by key. Because all transactions use this order, they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, select, tuple_

from bridge.events.event import ScheduledEvent, normal_name
from bridge.events.record import Transition, TransitionRecord
from bridge.portal.audit import Entry
from bridge.portal.fleet import View, event_key, version_of, view_after
from bridge.portal.schema import (
    decisions,
    event_variants,
    event_vms,
    events,
    inventory,
    names,
    properties,
    records,
    vms,
)
from bridge.portal.settings import LimitSettings
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import insert_missing, rows_in, upsert
from bridge.portal.store.fold import Change, apply_changes, event_of_variant, views_of_vms
from bridge.portal.vm_state import VmState, groups_of, places_of, position_of, reported_at, vm_after, vm_key
from bridge.text import one_line, without_nul

INVENTORY = "inventory"
"""The row of `properties` with the hash of the loaded inventory."""
_OUTCOMES = frozenset({Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})
_REFUSED = frozenset({Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})
#: The estimated size of the database rows for a record, without its text.
ROW_BYTES = 1_024
_MOST_HASHES = 100
_THIN = "-thin"
_vm_of = msgspec.json.Decoder(VmState).decode


class ReceivedRecord(msgspec.Struct, frozen=True):
    """A record and its original text."""

    record: TransitionRecord
    body: str


class _Vm(msgspec.Struct, kw_only=True):
    state: VmState | None = None
    name_key: str | None = None
    owns_name: bool = False
    groups: tuple[str, ...] = ()
    heard_at: str = ""
    open_events: int = 0
    stored_bytes: int = 0
    is_relisted: bool = False
    """Whether the list of active events changed."""
    must_settle: bool = False
    """Whether the name or the groups changed, so that the events of the VM must be counted again."""


def add_records(
    connection: Connection,
    received: Sequence[ReceivedRecord],
    received_at: str,
    limits: LimitSettings = LimitSettings(),  # noqa: B008  # frozen
) -> None:
    """Store *received*, and update the VMs and the events.

    A record that is already stored can still update the state, because an agent that has lost its local state sends the
    same record again in a newer stream.
    """
    known = lock_vms(connection, sorted({vm_key(each.record) for each in received}))
    new = _stored(connection, received, received_at, known, limits)
    for each in received:
        vm = known[vm_key(each.record)]
        if each.record.transition is not Transition.TEST:
            before = vm.state
            vm.state = vm_after(before, each.record, received_at=received_at)
            listed = before is not None and (before.listed_at, before.active_event_ids)
            vm.is_relisted |= listed != (vm.state.listed_at, vm.state.active_event_ids)
            vm.heard_at = received_at
    outcomes = [record for record in new if record.transition in _OUTCOMES]
    of_outcomes = {event_key(each.event, each.vm) for each in outcomes if each.event is not None}
    _update(connection, known, received, at=received_at, limits=limits, also_locked=of_outcomes)
    for record in outcomes:
        _mark_refusal(connection, record)
    add_entries(connection, [_outcome(record) for record in outcomes], at=received_at)


def settle_again(connection: Connection, keys: Sequence[str]) -> None:
    """Update the names and groups of the VMs with the sorted *keys*, and their open events."""
    _update(connection, lock_vms(connection, keys), ())


def _update(
    connection: Connection,
    known: Mapping[str, _Vm],
    received: Sequence[ReceivedRecord],
    *,
    at: str = "",
    limits: LimitSettings = LimitSettings(),  # noqa: B008  # frozen
    also_locked: Collection[str] = (),
) -> None:
    _settle(connection, known)
    views = _views(connection, received, known)
    changes = _changes(connection, received, known, views, at, limits)
    upsert(connection, vms, [_vm_row(key, vm, vm.state) for key, vm in known.items() if vm.state is not None])
    again = {view.event_key for view in views.values() if view.current.is_open and known[view.vm_key].must_settle}
    apply_changes(connection, changes, recount=again, also_locked=also_locked)


def lock_vms(connection: Connection, keys: Sequence[str]) -> dict[str, _Vm]:
    """Lock the rows of the sorted *keys*, create missing rows, and return the VMs."""
    insert_missing(connection, vms, [{"vm_key": key} for key in keys])
    found = {key: _Vm() for key in keys}
    query = select(vms).order_by(vms.c.vm_key).with_for_update()
    for row in rows_in(connection, query, vms.c.vm_key, keys):
        if row.body is not None:
            found[row.vm_key] = _Vm(
                state=_vm_of(row.body),
                name_key=row.name_key,
                owns_name=row.name_key is not None and not row.is_conflict,
                groups=tuple(filter(None, row.groups.split("\n"))),
                heard_at=row.heard_at,
                open_events=row.open_events,
                stored_bytes=row.stored_bytes,
            )
    return found


def _stored(
    connection: Connection,
    received: Sequence[ReceivedRecord],
    received_at: str,
    known: Mapping[str, _Vm],
    limits: LimitSettings,
) -> list[TransitionRecord]:
    """Store new records, and return all new records.

    The function does not store heartbeats. If a VM has reached its limit, the function does not store the VM's other
    records either.
    """
    by_id = {each.record.id: each for each in received}
    stored = {row.record_id for row in rows_in(connection, select(records.c.record_id), records.c.record_id, by_id)}
    new = [each for key, each in by_id.items() if key not in stored]
    rows = []
    for each in new:
        vm = known[vm_key(each.record)]
        if each.record.transition is Transition.HEARTBEAT or vm.stored_bytes >= limits.vm_bytes:
            continue
        vm.stored_bytes += len(each.body) + ROW_BYTES
        rows.append(_row(each, received_at))
    insert_missing(connection, records, rows)
    return [each.record for each in new]


def _row(each: ReceivedRecord, received_at: str) -> dict[str, Any]:
    record = each.record
    return {
        "record_id": record.id,
        "vm_key": vm_key(record),
        "sequence": record.sequence,
        "event_key": None if record.event is None else event_key(record.event, record.vm),
        "transition": record.transition.value,
        "observed_at": record.observed_at,
        "received_at": received_at,
        "body": each.body,
    }


def _settle(connection: Connection, known: Mapping[str, _Vm]) -> None:
    """Bind names to VMs, and determine the groups of each VM."""
    states = {key: vm.state for key, vm in known.items() if vm.state is not None}
    has_inventory = connection.execute(select(properties.c.value).where(properties.c.name == INVENTORY)).first()
    listed, taken = _inventory_of(connection, states) if has_inventory else ({}, {})
    claims: dict[str, str] = {}
    for key, reported in states.items():
        vm = known[key]
        before = vm.name_key, vm.groups
        name, groups = listed.get(key, (reported.name, () if has_inventory else groups_of(reported)))
        vm.state = states[key] = msgspec.structs.replace(reported, name=name)
        vm.groups = tuple(without_nul(each) for each in (*groups, *places_of(reported)))
        vm.name_key = vm.name_key or vm.state.name_key
        if vm.name_key is not None and vm.name_key != before[0]:
            claims[vm.name_key] = min(key, claims.get(vm.name_key, key))
        vm.must_settle = before != (vm.name_key, vm.groups)
    rows = [{"name_key": name, "vm_key": key} for name, key in sorted(claims.items())]
    insert_missing(connection, names, rows)
    wanted = [vm.name_key for vm in known.values() if vm.name_key is not None]
    owners = {row.name_key: row.vm_key for row in rows_in(connection, select(names), names.c.name_key, wanted)}
    for key, state in states.items():
        vm = known[key]
        owner = key if key in listed else taken.get(normal_name(state.name or ""))
        owns = (owner or owners.get(vm.name_key or "")) == key
        vm.must_settle |= owns != vm.owns_name
        vm.owns_name = owns


def _inventory_of(
    connection: Connection, states: Mapping[str, VmState]
) -> tuple[dict[str, tuple[str, tuple[str, ...]]], dict[str, str]]:
    """Return the name and groups of each VM, and the VM that owns each reported name."""
    query = select(inventory)
    listed = {
        row.vm_key: (row.name, tuple(filter(None, row.groups.split("\n"))))
        for row in rows_in(connection, query, inventory.c.vm_key, states)
    }
    reported = [normal_name(state.name) for state in states.values() if state.name]
    return listed, {row.name: row.vm_key for row in rows_in(connection, query, inventory.c.name, reported)}


def _views(
    connection: Connection, received: Sequence[ReceivedRecord], known: Mapping[str, _Vm]
) -> dict[tuple[str, str], View]:
    """Return the stored views that the records can change."""
    pairs = [
        (event_key(each.record.event, each.record.vm), vm_key(each.record))
        for each in received
        if each.record.event is not None and each.record.transition.is_by_azure
    ]
    table = event_vms.c
    found = views_of_vms(connection, tuple_(table.event_key, table.vm_key), pairs)
    of_all = [key for key, vm in known.items() if vm.is_relisted or vm.must_settle]
    found += views_of_vms(connection, table.vm_key, of_all, table.is_open.is_(True))
    for key, vm in known.items():
        if vm.is_relisted and vm.state is not None:
            ids = map(without_nul, vm.state.active_event_ids)
            found += views_of_vms(connection, table.event_id, ids, table.vm_key == key)
    return {(view.event_key, view.vm_key): view for view in found}


def _changes(  # noqa: PLR0917  # one call
    connection: Connection,
    received: Sequence[ReceivedRecord],
    known: Mapping[str, _Vm],
    before: Mapping[tuple[str, str], View],
    received_at: str,
    limits: LimitSettings,
) -> list[Change]:
    after = dict(before)
    reported: dict[tuple[str, str], ScheduledEvent] = {}
    for each in received:
        record = each.record
        state = known[vm_key(record)].state
        if record.event is None or state is None or not record.transition.is_by_azure:
            continue
        key = event_key(record.event, record.vm), state.vm_key
        position = position_of(record, state.streams.get(record.stream_id, received_at))
        view = view_after(after.get(key), record, record.event, position, reported_at(record, received_at))
        if view.position == position:
            reported[key] = record.event
        after[key] = view
    new_keys = {event for event, vm in reported if (event, vm) not in before}
    query = select(events.c.event_key)
    others = {row.event_key for row in rows_in(connection, query, events.c.event_key, new_keys)}
    changes = []
    for key, view in sorted(after.items()):
        vm, old = known[key[1]], before.get(key)
        if vm.state is None:
            continue
        event = reported.get(key)
        is_over_limit = old is None and vm.open_events >= limits.open_events
        if is_over_limit and vm.stored_bytes >= limits.vm_bytes and key[0] not in others:
            continue
        is_thin = is_over_limit or (old is not None and old.variant.endswith(_THIN))
        variant = view.variant
        kept = event
        if event is not None and is_thin:
            variant = f"{version_of(event).variant[: -len(_THIN)]}{_THIN}"
            kept = ScheduledEvent(event_id=event.event_id, event_type=event.event_type, event_status=event.event_status)
        listed = msgspec.structs.replace(view, variant=variant, is_listed_as_ended=vm.state.has_ended(view))
        new = _with_name(connection, listed, event, vm)
        if old is None or msgspec.structs.replace(new, is_member=old.is_member) != old:
            vm.open_events += new.current.is_open - (0 if old is None else old.current.is_open)
            if old is None or old.variant != new.variant:
                vm.stored_bytes += ROW_BYTES
            changes.append(Change(old=old, new=new, groups=vm.groups, event=kept))
    return changes


def _with_name(connection: Connection, view: View, event: ScheduledEvent | None, vm: _Vm) -> View:
    """Return *view* with the name that the VM owns."""
    name = None if vm.state is None or vm.state.name is None or not vm.owns_name else normal_name(vm.state.name)
    if event is None and name != view.owned_name:
        of_view = (event_variants.c.event_key == view.event_key) & (event_variants.c.variant == view.variant)
        body = connection.execute(select(event_variants.c.body).where(of_view)).scalar()
        event = None if body is None else event_of_variant(body)
    is_named = view.is_named if event is None else name is not None and name in version_of(event).names
    return msgspec.structs.replace(view, owned_name=name, is_named=is_named)


def _mark_refusal(connection: Connection, record: TransitionRecord) -> None:
    """Store whether an agent refused the newest decision.

    A refusal counts only if it comes from the VM that the decision is for.
    """
    hashes = () if record.approval is None else record.approval.jws_sha256[:_MOST_HASHES]
    is_own = (decisions.c.vm_key == vm_key(record)) & decisions.c.jws_sha256.in_(hashes)
    of_decision = select(decisions.c.event_key).where(is_own)
    is_refused = record.transition in _REFUSED
    connection.execute(events.update().where(events.c.event_key.in_(of_decision)).values(is_refused=is_refused))


def _outcome(record: TransitionRecord) -> Entry:
    approval = record.approval
    return Entry(
        actor=one_line(", ".join(approval.approvers), 256) if approval is not None else "",
        action=f"outcome_{record.transition.value}",
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


def _vm_row(key: str, vm: _Vm, state: VmState) -> dict[str, Any]:
    name = state.name or key
    search = (name, key, state.vm.location or "", state.vm.resource_group or "", *vm.groups)
    return {
        "vm_key": key,
        "name": without_nul(name).casefold(),
        "name_key": vm.name_key,
        "resource_group": without_nul((state.vm.resource_group or "").casefold()),
        "subscription": without_nul((state.vm.subscription_id or "").casefold()),
        "groups": "\n".join(["", *vm.groups, ""]),
        "search": without_nul("\n".join(search)).casefold(),
        "is_conflict": not vm.owns_name and vm.name_key is not None,
        "heard_at": vm.heard_at,
        "confirmed_until": state.confirmed_until(vm.heard_at),
        "open_events": max(0, vm.open_events),
        "stored_bytes": vm.stored_bytes,
        "body": msgspec.json.encode(state).decode(),
    }
