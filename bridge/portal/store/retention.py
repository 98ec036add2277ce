"""Deletes old records, events, and decisions, and limits the stored records of each VM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, exists, func, select, tuple_, update

from bridge.clock import parse_time
from bridge.portal.schema import decisions, event_vms, events, names, records, verdicts, vms
from bridge.portal.store.fold import apply_changes, lock_events

#: A transaction that deletes more rows would block the records of agents for too long.
_ROWS = 500
#: More than the events that a VM can report in a minute.
_ENDED_ROWS = 200


def delete_old(connection: Connection, *, before: str) -> bool:
    """Delete a batch of data that is older than *before*.

    Return whether more might exist. If an event still exists, the function keeps its decisions and verdicts, because a
    hold is valid until its event has ended. The function never deletes audit entries.
    """
    silent = select(vms.c.vm_key).where(vms.c.heard_at < before).order_by(vms.c.vm_key).limit(_ROWS)
    gone = list(connection.execute(silent.with_for_update()).scalars())
    for table in (names, vms):
        connection.execute(delete(table).where(table.c.vm_key.in_(gone)))
    deleted = [
        _delete(connection, records, records.c.received_at < before),
        _delete_views(connection, event_vms.c.received_at < before),
    ]
    seconds = int(parse_time(before).timestamp())
    has_decision = exists().where(decisions.c.event_key == verdicts.c.event_key)
    for table, is_old in (
        (decisions, decisions.c.expires_at_seconds < seconds),
        (verdicts, (verdicts.c.expires_at < before) & ~has_decision),
    ):
        has_event = exists().where(events.c.event_key == table.c.event_key)
        deleted.append(_delete(connection, table, is_old & ~has_event))
    return _ROWS in (*deleted, len(gone))


def _delete(connection: Connection, table: Table, is_old: ColumnElement[bool]) -> int:
    old = list(connection.execute(select(*table.primary_key).where(is_old).limit(_ROWS)))
    _delete_rows(connection, table, old)
    return len(old)


def _delete_rows(connection: Connection, table: Table, found: Sequence[Sequence[Any]]) -> None:
    """Delete the rows of *table* with the primary keys *found*."""
    keys = list(table.primary_key)
    in_index = keys[0].in_([row[0] for row in found])  # SQLite does not use an index for tuples
    connection.execute(delete(table).where(in_index, tuple_(*keys).in_([tuple(row) for row in found])))


def trim_next_vm(connection: Connection, *, after: str, most_bytes: int) -> str | None:
    """Delete old records and ended events of the next VM that uses 3/4 of *most_bytes*.

    Afterwards, its records use at most 3/8, and its events hardly more. A VM must not reach *most_bytes*, because then
    the portal stores new events without details. The function also corrects the size of a VM whose old records were
    deleted by `delete_old`.

    Return the key of this VM, or None if no such VM has a key greater than *after*.
    """
    over = select(vms.c.vm_key).where(vms.c.stored_bytes >= most_bytes * 3 // 4, vms.c.vm_key > after)
    key: str | None = connection.execute(over.order_by(vms.c.vm_key).limit(1).with_for_update()).scalar()
    if key is None:
        return None
    of_records, of_events = (
        select(func.coalesce(func.sum(table.c.stored_bytes), 0)).where(table.c.vm_key == key).scalar_subquery()
        for table in (records, event_vms)
    )
    newest = func.sum(records.c.stored_bytes).over(order_by=(records.c.received_at.desc(), records.c.record_id))
    summed = select(records.c.record_id, newest.label("bytes")).where(records.c.vm_key == key).subquery()
    old = select(summed.c.record_id).where(summed.c.bytes > most_bytes * 3 // 8)
    connection.execute(delete(records).where(records.c.vm_key == key, records.c.record_id.in_(old)))
    if connection.execute(select(of_events)).scalar_one() > most_bytes * 3 // 8:
        _delete_views(connection, (event_vms.c.vm_key == key) & event_vms.c.is_open.is_(False), most=_ENDED_ROWS)
    connection.execute(update(vms).where(vms.c.vm_key == key).values(stored_bytes=of_records + of_events))
    return key


def _delete_views(connection: Connection, where: ColumnElement[bool], *, most: int = _ROWS) -> int:
    oldest = select(*event_vms.primary_key).where(where).order_by(event_vms.c.received_at).limit(most)
    rows = list(connection.execute(oldest))
    lock_events(connection, {row.event_key for row in rows})
    _delete_rows(connection, event_vms, rows)
    apply_changes(connection, (), recount={row.event_key for row in rows})
    return len(rows)
