"""Stores connected agents, which portal processes exchange through the database.

The row of a process itself, with an empty `vm_key`, has the time of its newest state. A process that no longer updates
this row has ended, and its agents no longer count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection, delete, select

from bridge.portal.schema import agents
from bridge.portal.store.database import in_parts, upsert

_PROCESS = ""


class SharedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that polls at one process."""

    vm_key: str
    received_index: int
    body: str
    """The agent's header and whether a poll is open, as JSON."""


class SharedAgents(msgspec.Struct, frozen=True, kw_only=True):
    """The agents of one process that changed, or all of its agents."""

    stored_at: str
    """The time of the newest state, by the clock of the process, in UTC with milliseconds."""
    is_everything: bool
    agents: tuple[SharedAgent, ...]


def store_agents(
    connection: Connection, changed: Sequence[SharedAgent], removed: Sequence[str], *, process: str, at: str
) -> None:
    """Store the changed agents of *process*, and delete the removed agents."""
    for part in in_parts(removed):
        connection.execute(delete(agents).where(agents.c.process == process, agents.c.vm_key.in_(part)))
    whole = [SharedAgent(vm_key=_PROCESS, received_index=0, body=""), *changed]
    upsert(
        connection, agents, [{"process": process, "stored_at": at, **msgspec.structs.asdict(each)} for each in whole]
    )


def shared_agents(
    connection: Connection, *, other_than: str, alive_since: str, read_until: Mapping[str, str]
) -> dict[str, SharedAgents]:
    """Return the agents of each other live process that changed after *read_until*.

    Return all agents of a process that is not in *read_until*, or whose clock was set back.
    """
    is_alive = (agents.c.vm_key == _PROCESS, agents.c.process != other_than, agents.c.stored_at >= alive_since)
    found = {}
    for process, stored_at in list(connection.execute(select(agents.c.process, agents.c.stored_at).where(*is_alive))):
        after = read_until.get(process, "")
        is_everything = not after or after > stored_at
        query = select(agents.c.vm_key, agents.c.received_index, agents.c.body)
        query = query.where(agents.c.process == process, agents.c.vm_key != _PROCESS)
        changed = query if is_everything else query.where(agents.c.stored_at > after)
        rows = tuple(SharedAgent(**row._asdict()) for row in connection.execute(changed))
        found[process] = SharedAgents(stored_at=stored_at, is_everything=is_everything, agents=rows)
    return found


def delete_processes(connection: Connection, *, before: str) -> None:
    """Delete the processes that ended before *before*, and their agents."""
    ended = select(agents.c.process).where(agents.c.vm_key == _PROCESS, agents.c.stored_at < before)
    connection.execute(delete(agents).where(agents.c.process.in_(ended)))
