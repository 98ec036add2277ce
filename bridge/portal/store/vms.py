"""Lists VMs, stores the inventory, and settles which VM owns a name that two VMs claim.

Filters apply in SQL before any counting or truncation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, or_, select, tuple_

from bridge.portal.audit import Entry
from bridge.portal.fleet import EventState
from bridge.portal.inventory import InventoryEntry
from bridge.portal.schema import inventory, names, properties, vms
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import contains_text, in_parts, rows_in, upsert
from bridge.portal.store.ingest import INVENTORY, lock_vms, settle_again
from bridge.portal.vm_state import VmState, place_of, vm_of


class VmFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filters for VMs. A VM must match every filter that is set."""

    text: str = ""
    """Part of the name, the vmId, the region, the resource group, or a label, regardless of case."""
    scope: tuple[str, ...] = ()
    """The VM must be in at least one of these groups. An empty scope means all VMs."""
    silent_since: str | None = None
    """Only the VMs that have sent no record after this time."""
    is_conflict: bool | None = None
    """Only the VMs that claim a name that belongs to another VM."""


def find_vms(connection: Connection, wanted: VmFilter) -> list[tuple[str, str]]:
    """Return the name, in lower case, and the key of each VM that matches *wanted*, sorted."""
    query = select(vms.c.name, vms.c.vm_key).where(*_conditions(wanted))
    return sorted((row.name, row.vm_key) for row in connection.execute(query))


def read_vms(connection: Connection, keys: Sequence[str]) -> dict[str, VmState]:
    """Return the known VMs of *keys*, in the same order."""
    rows = rows_in(connection, select(vms.c.vm_key, vms.c.body), vms.c.vm_key, keys)
    bodies = {row.vm_key: row.body for row in rows}
    return {key: vm_of(bodies[key]) for key in keys if key in bodies}


def vm_names(connection: Connection, keys: Sequence[str]) -> dict[str, str]:
    """Return the name of each known VM of *keys*."""
    return {key: vm.name or key for key, vm in read_vms(connection, keys).items()}


def vms_of_event(connection: Connection, event: EventState) -> list[str]:
    """Return the VMs of the event and of the resource groups of its members."""
    members = [each.vm for each in event.vms if each.is_member] or [each.vm for each in event.vms]
    groups = [place_of(vm) for vm in members if vm.resource_group]
    group = tuple_(vms.c.subscription, vms.c.resource_group)
    query = select(vms.c.vm_key).order_by(vms.c.vm_key)
    neighbors = [row.vm_key for row in rows_in(connection, query, group, groups)]
    return list(dict.fromkeys([*(vm.vm_key for vm in event.vms), *neighbors]))


def bind_name(connection: Connection, vm_key: str, *, by: str, at: str) -> bool:
    """Make *vm_key* the owner of the name that it claims.

    Return False if the name does not belong to another VM.
    """
    row = connection.execute(select(vms.c.name_key, vms.c.is_conflict).where(vms.c.vm_key == vm_key)).first()
    if row is None or not row.is_conflict:
        return False
    owner = connection.execute(select(names.c.vm_key).where(names.c.name_key == row.name_key)).scalar()
    both = sorted({vm_key, *([owner] if owner else [])})
    lock_vms(connection, both)
    upsert(connection, names, [{"name_key": row.name_key, "vm_key": vm_key}])
    settle_again(connection, both)
    details = {"name": row.name_key, "vm_key": vm_key, "earlier_vm_key": owner}
    add_entries(connection, [Entry(actor=by, action="name_resolved", subject="", details=details)], at=at)
    return True


def store_inventory(connection: Connection, entries: Sequence[InventoryEntry]) -> None:
    """If *entries* differ from the inventory, replace the inventory and update the VMs."""
    digest = hashlib.sha256(msgspec.json.encode(sorted(entries, key=lambda each: each.vm_key))).hexdigest()
    known = connection.execute(select(properties.c.value).where(properties.c.name == INVENTORY).with_for_update())
    if known.scalar() == digest:
        return
    upsert(connection, properties, [{"name": INVENTORY, "value": digest}])
    connection.execute(delete(inventory))
    rows = [{"vm_key": each.vm_key, "name": each.name, "groups": "\n".join(each.groups)} for each in entries]
    if rows:
        connection.execute(inventory.insert(), rows)
    for part in in_parts(sorted(key for _, key in find_vms(connection, VmFilter()))):
        settle_again(connection, part)


def _conditions(wanted: VmFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if wanted.text:
        found.append(contains_text(vms.c.search, wanted.text))
    if wanted.scope:
        found.append(or_(*(vms.c.groups.contains(f"\n{group}\n", autoescape=True) for group in wanted.scope)))
    if wanted.silent_since is not None:
        found.append(vms.c.heard_at < wanted.silent_since)
    if wanted.is_conflict is not None:
        found.append(vms.c.is_conflict.is_(wanted.is_conflict))
    return found
