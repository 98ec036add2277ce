"""Stores connected agents, which portal processes exchange through the database."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, delete, select

from bridge.portal.schema import agents
from bridge.portal.store.database import upsert


class SharedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that polls at one process."""

    vm_key: str
    asked_at: str
    """The time of this state, in UTC with milliseconds."""
    received_index: int
    body: str
    """The agent's header and whether a poll is open, as JSON."""


def store_agents(connection: Connection, changed: Sequence[SharedAgent], *, process: str) -> None:
    """Store the changed agents of *process*."""
    upsert(connection, agents, [{"process": process, **msgspec.structs.asdict(each)} for each in changed])


def agents_of_other_processes(connection: Connection, *, process: str, since: str) -> list[SharedAgent]:
    """Return the agents that processes other than *process* have stored since *since*."""
    query = select(agents.c.vm_key, agents.c.asked_at, agents.c.received_index, agents.c.body)
    found = connection.execute(query.where(agents.c.process != process, agents.c.asked_at >= since))
    return [SharedAgent(**row._asdict()) for row in found]


def delete_agents(connection: Connection, *, before: str) -> None:
    """Delete the agents that were last updated before *before*."""
    connection.execute(delete(agents).where(agents.c.asked_at < before))
