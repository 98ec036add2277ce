"""The rows of agents that ask for decisions: each process has its own, and reads those of the others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, delete, select

from bridge.portal.schema import agents
from bridge.portal.store.database import upsert


class SharedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """What a process knows of an agent."""

    vm_key: str
    asked_at: str
    """When that was so: UTC, milliseconds."""
    received_index: int
    body: str
    """What the agent said of itself, and whether a poll of it is held, as JSON."""


def store_agents(connection: Connection, shared: Sequence[SharedAgent], *, process: str) -> None:
    """Have the other processes know what *process* knows."""
    upsert(connection, agents, [{"process": process, **msgspec.structs.asdict(each)} for each in shared])


def agents_of_other_processes(connection: Connection, *, process: str, since: str) -> list[SharedAgent]:
    """Return what the processes but *process* have told *since* then."""
    query = select(agents.c.vm_key, agents.c.asked_at, agents.c.received_index, agents.c.body)
    found = connection.execute(query.where(agents.c.process != process, agents.c.asked_at >= since))
    return [SharedAgent(**row._asdict()) for row in found]


def delete_agents(connection: Connection, *, before: str) -> None:
    """Forget what was told *before* then, by a process that may be gone."""
    connection.execute(delete(agents).where(agents.c.asked_at < before))
