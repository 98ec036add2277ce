"""Stores records and updates VMs and events in one transaction.

Each transaction locks the rows of the VMs first, then the names, and then the events, each sorted by key. Because the
order is always the same, transactions cannot deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import Connection, func, select, tuple_

from bridge.events.event import ScheduledEvent, normal_name
from bridge.events.record import Transition, TransitionRecord
from bridge.portal.audit import Entry
from bridge.portal.fleet import THIN, View, event_key, key_of_event_id, version_of, view_after
from bridge.portal.grants import group_names
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
from bridge.portal.vm_state import VmState, place_of, places_of, vm_key, vm_of
from bridge.text import one_line, without_nul

INVENTORY = "inventory"
"""The row of `properties` with the hash of the loaded inventory."""
_OUTCOMES = frozenset({Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})
#: The estimated size of the database rows for a record without its text.
_RECORD_BYTES = 2_048
#: The estimated size of the database rows for an event, and of each of its groups, without their texts.
_EVENT_BYTES, _GROUP_BYTES = 4_096, 128
#: The estimated number of copies of an event's text and groups in the database.
_COPIES = 4
#: A VM that reports more open events has an invalid document or is hostile. Their number limits the work of a record.
_MOST_OPEN = 3
#: An agent reports at most five different outcomes of a decision.
_MOST_OUTCOME_CHARACTERS = 500
_MOST_GROUPS, _MOST_GROUP_BYTES = 64, 2_048

#: The keys of the event and of the VM.
_ViewKey: TypeAlias = tuple[str, str]
_Report: TypeAlias = tuple[_ViewKey, TransitionRecord, ScheduledEvent]


class ReceivedRecord(msgspec.Struct, frozen=True):
    """A record and its original text."""

    record: TransitionRecord
    body: str

    @property
    def size(self) -> int:
        """Return the size of the text in bytes."""
        return len(self.body.encode())


def add_records(
    connection: Connection,
    received: Sequence[ReceivedRecord],
    received_at: str,
    limits: LimitSettings = LimitSettings(),  # noqa: B008  # frozen
) -> Mapping[str, int]:
    """Store the records *received*, and update their VMs and events. Ignore test records.

    Return the number of changed events by VM. An open event without a change counts as a tenth of a change.

    A record that is already stored can still update the state, because an agent that has lost its local state sends the
    same record again in a newer stream.
    """
    received = [each for each in received if each.record.transition is not Transition.TEST]
    keys = sorted({vm_key(each.record) for each in received})
    insert_missing(connection, vms, [{"vm_key": key} for key in keys])
    known = lock_vms(connection, keys)
    for each in received:
        known[vm_key(each.record)].update(each.record, received_at=received_at)
    new = _stored(connection, received, received_at, known, limits)
    outcomes = [record for record in new if record.transition in _OUTCOMES]
    of_outcomes = {event_key(each.event, each.vm) for each in outcomes if each.event is not None}
    reported = [each.record for each in received]
    changed = _update(connection, known, reported, limits=limits, also_locked=of_outcomes)
    audited = [_outcome(record) for record in outcomes if _is_first_outcome(connection, record)]
    add_entries(connection, audited, at=received_at)
    return changed


def settle_again(connection: Connection, keys: Sequence[str]) -> None:
    """Update the names, groups, and open events of the VMs in *keys*, which must be sorted."""
    _update(connection, lock_vms(connection, keys), (), limits=LimitSettings())


def _update(
    connection: Connection,
    known: Mapping[str, VmState],
    reported: Iterable[TransitionRecord],
    *,
    limits: LimitSettings,
    also_locked: Collection[str] = (),
) -> Mapping[str, int]:
    settled = _settle(connection, known)
    reports = [
        ((event_key(each.event, each.vm), vm_key(each)), each, each.event)
        for each in reported
        if each.event is not None and each.transition.is_by_azure
    ]
    views = _views(connection, reports, known)
    opened = Counter(view.vm_key for view in views.values() if view.current.is_open)
    for key, vm in known.items():
        vm.open_events = opened[key]
    changes = _changes(connection, reports, known, views, limits)
    upsert(connection, vms, [_vm_row(vm) for vm in known.values()])
    again = [view for view in views.values() if view.current.is_open and view.vm_key in settled]
    recount = {view.event_key for view in again}
    apply_changes(connection, changes, recount=recount, also_locked=also_locked)
    changed = Counter({key: (vm.open_events + len(vm.active_event_ids)) // 10 for key, vm in known.items()})
    changed.update(view.vm_key for view in (*again, *(each.new for each in changes)))
    return changed


def lock_vms(connection: Connection, keys: Sequence[str]) -> dict[str, VmState]:
    """Lock the rows of the sorted *keys*, and return the VMs."""
    known = {}
    query = select(vms).order_by(vms.c.vm_key).with_for_update()
    for row in rows_in(connection, query, vms.c.vm_key, keys):
        known[row.vm_key] = VmState(vm_key=row.vm_key) if row.body is None else vm_of(row.body)
        known[row.vm_key].stored_bytes = row.stored_bytes  # `retention` changes only the column
    return known


def _stored(
    connection: Connection,
    received: Sequence[ReceivedRecord],
    received_at: str,
    known: Mapping[str, VmState],
    limits: LimitSettings,
) -> list[TransitionRecord]:
    """Return the records that are not in the database yet, and store them.

    The function does not store heartbeats, or records of a VM that has reached its limit.
    """
    by_key = {(each.record.id, vm_key(each.record)): each for each in received}
    query = select(records.c.record_id, records.c.vm_key)
    stored = {tuple(row) for row in rows_in(connection, query, records.c.record_id, (key for key, _ in by_key))}
    new = [each for key, each in by_key.items() if key not in stored]
    rows = []
    for each in new:
        vm = known[vm_key(each.record)]
        if each.record.transition is Transition.HEARTBEAT or vm.stored_bytes >= limits.vm_bytes:
            continue
        row = _row(each, received_at)
        vm.stored_bytes += row["stored_bytes"]
        rows.append(row)
    insert_missing(connection, records, rows)
    return [each.record for each in new]


def _row(each: ReceivedRecord, received_at: str) -> dict[str, Any]:
    record = each.record
    return {
        "record_id": record.id,
        "vm_key": vm_key(record),
        "sequence": record.sequence,
        "stored_bytes": each.size + _RECORD_BYTES,
        "event_key": None if record.event is None else event_key(record.event, record.vm),
        "transition": record.transition.value,
        "observed_at": record.observed_at,
        "received_at": received_at,
        "body": each.body,
    }


def _settle(connection: Connection, known: Mapping[str, VmState]) -> set[str]:
    """Assign names to VMs, and determine the groups of each VM. Return the VMs that changed."""
    before = {key: (vm.name_key, vm.groups, vm.is_conflict) for key, vm in known.items()}
    has_inventory = connection.execute(select(properties.c.value).where(properties.c.name == INVENTORY)).first()
    listed: dict[str, Any] = {}
    taken: dict[str, str] = {}
    if has_inventory:
        listed = {row.vm_key: row for row in rows_in(connection, select(inventory), inventory.c.vm_key, known)}
        reported = [normal_name(vm.name) for vm in known.values() if vm.name]
        rows = rows_in(connection, select(inventory), inventory.c.name, reported)
        taken = {row.name: row.vm_key for row in rows}
    claims = []
    for key, vm in known.items():
        groups = [] if has_inventory else _short(group_names(vm.vm.resource_group, vm.labels))
        if key in listed:
            vm.name = listed[key].name
            groups = [each for each in listed[key].groups.split("\n") if each]
        vm.groups = tuple(without_nul(each) for each in (*groups, *places_of(vm)) if "\n" not in each)
        if vm.name is not None and vm.name_key is None:
            vm.name_key = without_nul("/".join((*place_of(vm.vm), normal_name(vm.name))))
            claims.append((vm.name_key, key))
    insert_missing(connection, names, [{"name_key": name, "vm_key": key} for name, key in sorted(claims)])
    wanted = [vm.name_key for vm in known.values() if vm.name_key is not None]
    owners = {row.name_key: row.vm_key for row in rows_in(connection, select(names), names.c.name_key, wanted)}
    for key, vm in known.items():
        if vm.name_key is not None:
            owner = taken.get(normal_name(vm.name or "")) or owners.get(vm.name_key)
            vm.is_conflict = key not in listed and owner != key
    return {key for key, vm in known.items() if before[key] != (vm.name_key, vm.groups, vm.is_conflict)}


def _short(groups: Sequence[str]) -> list[str]:
    """Return *groups* up to the limits. Each event contains all groups of its VMs."""
    kept: list[str] = []
    size = 0
    for group in groups:
        new_size = size + len(group.encode())
        if new_size <= _MOST_GROUP_BYTES and len(kept) < _MOST_GROUPS:
            kept.append(group)
            size = new_size
    return kept


def _views(connection: Connection, reports: Sequence[_Report], known: Mapping[str, VmState]) -> dict[_ViewKey, View]:
    """Return the stored views of events that are reported, open, or listed as active."""
    active = {(key_of_event_id(each), key) for key, vm in known.items() for each in vm.active_event_ids}
    key_of_view = tuple_(event_vms.c.event_key, event_vms.c.vm_key)
    found = views_of_vms(connection, key_of_view, [*active, *(key for key, _, _ in reports)])
    found += views_of_vms(connection, event_vms.c.vm_key, known, event_vms.c.is_open.is_(True))
    return {(view.event_key, view.vm_key): view for view in found}


def _changes(
    connection: Connection,
    reports: Sequence[_Report],
    known: Mapping[str, VmState],
    before: Mapping[_ViewKey, View],
    limits: LimitSettings,
) -> list[Change]:
    after = dict(before)
    contents: dict[_ViewKey, ScheduledEvent] = {}
    for key, record, event in sorted(reports, key=itemgetter(0)):  # by event, so that `version_of` finds its cache
        version = version_of(event)
        after[key] = view_after(after.get(key), record, event, version, known[key[1]])
        # The view can show a different record: a newer record, or an earlier record with the same ID.
        if after[key].variant == version.variant:
            contents[key] = event
    changes = []
    for key, view in sorted(after.items()):
        vm, old, content = known[key[1]], before.get(key), contents.get(key)
        was_open = old is not None and old.current.is_open
        is_full = vm.stored_bytes >= limits.vm_bytes
        has_many_open = vm.open_events - was_open >= limits.open_events
        has_most_open = vm.open_events >= _MOST_OPEN * limits.open_events
        if old is None and ((is_full and has_many_open) or has_most_open):
            is_known = select(events.c.event_key).where(events.c.event_key == key[0])
            if connection.execute(is_known).first() is None:  # only this VM reports the event
                continue
        new = _with_name(connection, view, vm)
        is_listed_as_ended = vm.listed_at > view.position and view.event_id not in vm.active_event_ids
        new = msgspec.structs.replace(new, is_listed_as_ended=is_listed_as_ended)
        is_stored = old is not None and old.variant == new.variant
        if content is not None and (is_full or has_many_open) and not is_stored:  # store the state without the details
            new = msgspec.structs.replace(new, variant=f"{new.variant[: -len(THIN)]}{THIN}")
            content = ScheduledEvent(
                event_id=content.event_id, event_type=content.event_type, event_status=content.event_status
            )
        if content is not None:
            text = msgspec.json.encode((content, vm.groups))
            size = _EVENT_BYTES + _GROUP_BYTES * len(vm.groups) + _COPIES * len(text)
            new = msgspec.structs.replace(new, stored_bytes=size)
        if new != old:
            vm.open_events += new.current.is_open - was_open
            vm.stored_bytes += new.stored_bytes - (0 if old is None else old.stored_bytes)
            changes.append(Change(old=old, new=new, groups=vm.groups, event=content))
    return changes


def _with_name(connection: Connection, view: View, vm: VmState) -> View:
    """Return *view* with the name that the VM owns now."""
    name = vm.owned_name
    if name == view.owned_name:
        return view
    of_view = (event_variants.c.event_key == view.event_key) & (event_variants.c.variant == view.variant)
    body = connection.execute(select(event_variants.c.body).where(of_view)).scalar()
    is_named = view.is_named if body is None else name in version_of(event_of_variant(body)).names
    return msgspec.structs.replace(view, owned_name=name, is_named=is_named)


def _is_first_outcome(connection: Connection, record: TransitionRecord) -> bool:
    """Store whether the agent refused a decision. Return whether this outcome is new.

    The outcome counts only if the record comes from the VM for which the decision was signed.
    """
    hashes = () if record.approval is None else record.approval.jws_sha256
    is_own = (decisions.c.vm_key == vm_key(record)) & decisions.c.jws_sha256.in_(hashes)
    of_decision = select(decisions.c.event_key).where(is_own)
    is_refused = record.transition is not Transition.APPROVED
    connection.execute(events.update().where(events.c.event_key.in_(of_decision)).values(is_refused=is_refused))
    outcome = f"{record.transition.value}:{one_line(record.approval.result, 64) if record.approval else ''}\n"
    is_new = ~decisions.c.outcomes.contains(outcome, autoescape=True)
    has_few = func.length(decisions.c.outcomes) < _MOST_OUTCOME_CHARACTERS
    outcomes = decisions.c.outcomes + outcome
    return connection.execute(decisions.update().where(is_own, is_new, has_few).values(outcomes=outcomes)).rowcount > 0


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


def _vm_row(vm: VmState) -> dict[str, Any]:
    name = vm.name or vm.vm_key
    search = (name, vm.vm_key, vm.vm.location or "", vm.vm.resource_group or "", *vm.groups)
    return {
        "vm_key": vm.vm_key,
        "name": without_nul(name).casefold(),
        "name_key": vm.name_key,
        "resource_group": without_nul((vm.vm.resource_group or "").casefold()),
        "subscription": without_nul((vm.vm.subscription_id or "").casefold()),
        "groups": "\n".join(["", *vm.groups, ""]),
        "search": without_nul("\n".join(search)).casefold(),
        "is_conflict": vm.is_conflict,
        "heard_at": vm.heard_at,
        "confirmed_until": vm.confirmed_until,
        "stored_bytes": vm.stored_bytes,
        "body": msgspec.json.encode(vm).decode(),
    }
