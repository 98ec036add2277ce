"""Stores the inventory, and applies it to the known VMs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, delete, select

from bridge.portal.inventory import InventoryEntry
from bridge.portal.schema import inventory, properties, vms
from bridge.portal.store.database import in_parts, upsert
from bridge.portal.store.ingest import INVENTORY, settle_again


def store_inventory(connection: Connection, entries: Sequence[InventoryEntry], *, at: str) -> bool:
    """Replace the inventory and update the VMs.

    Return False if the database already has *entries*.
    """
    digest = hashlib.sha256(msgspec.json.encode(sorted(entries, key=lambda each: each.vm_key))).hexdigest()
    known = connection.execute(select(properties.c.value).where(properties.c.name == INVENTORY).with_for_update())
    if known.scalar() == digest:
        return False
    upsert(connection, properties, [{"name": INVENTORY, "value": digest}])
    connection.execute(delete(inventory))
    rows = [{"vm_key": each.vm_key, "name": each.name, "groups": "\n".join(each.groups)} for each in entries]
    if rows:
        connection.execute(inventory.insert(), rows)
    keys = list(
        connection.execute(select(vms.c.vm_key).where(vms.c.body.is_not(None)).order_by(vms.c.vm_key)).scalars()
    )
    for part in in_parts(keys):
        settle_again(connection, part, at=at)
    return True
