"""Stores which agents poll each portal process, and their attested documents.

After a restart, the portal uses these tables to find the agents that were connected before. Portal processes also share
their agents through these tables. Each process increases its heartbeat whenever it writes, and stores it in the rows
that it changes. The heartbeat is a time in milliseconds. Because clocks can differ, other processes only compare the
heartbeats of one process with each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec
from sqlalchemy import Connection, delete, select

from bridge.clock import format_time
from bridge.portal.schema import agents, processes, properties
from bridge.portal.store.database import insert, upsert

_PREFIX = "document:"
_LONGEST_NAME = 32


class StoredAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent and the portal process that it belongs to."""

    vm_key: str
    is_connected: bool
    is_attested: bool
    received_index: int
    report: str
    """The settings in the agent's header, as JSON."""
    polled_at: str
    """The time of the last poll when the row was stored."""
    process: str = ""


def store_agents(connection: Connection, changed: Sequence[StoredAgent], *, process: str, heartbeat: int) -> None:
    """Store the *changed* agents of *process*, and its heartbeat."""
    common = {"process": process, "heartbeat": heartbeat}
    upsert(connection, agents, [{**msgspec.structs.asdict(each), **common} for each in changed])
    upsert(connection, processes, [common])


def changes_of_other_processes(
    connection: Connection, *, process: str, known: Mapping[str, int]
) -> tuple[dict[str, int], list[StoredAgent]]:
    """Return the heartbeats that differ from *known*, and the changed agents."""
    query = select(processes.c.process, processes.c.heartbeat).where(processes.c.process != process)
    heartbeats = {
        row.process: row.heartbeat for row in connection.execute(query) if row.heartbeat != known.get(row.process)
    }
    columns = [agents.c[field] for field in StoredAgent.__struct_fields__]
    found = []
    for name in heartbeats:
        is_new = (agents.c.process == name) & (agents.c.heartbeat > known.get(name, -1))
        found += [StoredAgent(**row._asdict()) for row in connection.execute(select(*columns).where(is_new))]
    return heartbeats, found


def delete_agents(connection: Connection, *, before: datetime) -> None:
    """Delete the agents and processes that have been inactive since *before*.

    A stopped process remains while it has agents.
    """
    is_old = agents.c.is_connected.is_(False) & (agents.c.polled_at < format_time(before))
    connection.execute(delete(agents).where(is_old))
    is_stopped = processes.c.heartbeat < 1000 * before.timestamp()
    connection.execute(delete(processes).where(is_stopped, processes.c.process.not_in(select(agents.c.process))))


def take_document(connection: Connection, vm_id: str, nonce: str, *, at: str, until: str) -> bool:
    """Mark an attested document as used until the time *until*.

    Return False if it was already used, even before a restart or at another portal process.
    """
    is_over = properties.c.name.startswith(_PREFIX, autoescape=True) & (properties.c.value <= at)
    connection.execute(delete(properties).where(is_over))
    digest = hashlib.sha256(f"{vm_id} {nonce}".encode()).hexdigest()
    name = f"{_PREFIX}{digest}"[:_LONGEST_NAME]
    new = insert(connection, properties).values(name=name, value=until).on_conflict_do_nothing()
    # The rowcount cannot be used, because the PostgreSQL driver reports -1.
    return connection.execute(new.returning(properties.c.name)).first() is not None
