"""Tracks the connected agents and the settings that they report.

An agent counts as connected while it has an open poll, and for 15 seconds after its last poll ends. Each poll has a
header that contains the agent's version, keys, and settings (PROTOCOL.md, section 2). The portal forgets an agent one
day after it disconnects.

The portal keeps the agents in memory, because every poll updates them. An agent belongs to the portal process that it
polled last. `AgentExchange` writes each change of this process's agents to the database, and reads the changes of other
processes. When a process stops, its connected agents remain in the database. The other processes show these agents as
reconnecting for 60 seconds, and then take them over as disconnected. A process that starts later also shows them as
reconnecting for its first 60 seconds.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import Enum
from functools import lru_cache

import msgspec

from bridge.clock import Clock, format_time, parse_time
from bridge.logs import ThrottledLog
from bridge.portal.store.agents import StoredAgent, changes_of_other_processes, delete_agents, store_agents
from bridge.portal.store.database import StoreThreads, StoreUnavailable

HEADER = "scheduled-events-agent"
_MOST_HEADER_CHARACTERS = 8_192
KEPT_SECONDS = 86_400.0
_RECONNECTING_SECONDS = 60.0
_GRACE_SECONDS = 15.0
#: If the heartbeat of a process does not change for this time, the process counts as stopped.
_ALIVE_SECONDS = 10.0
#: A limit is necessary, because an agent with a shared token can poll for VMs that do not exist.
_MOST_AWAY = 100_000


class Connection(str, Enum):
    """Whether an agent polls for decisions."""

    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    """The agent was connected to a portal process that stopped less than 60 s ago."""
    DISCONNECTED = "disconnected"


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The settings from an agent's last poll. A setting that the agent did not send is None."""

    version: str | None = None
    kids: tuple[str, ...] | None = None
    required_approvals: int | None = None
    dry_run: bool | None = None
    disabled: bool | None = None
    command: bool | None = None
    """Whether the agent runs a command, such as a drain, before it approves an event for the portal."""
    command_covers_all: bool | None = None
    """Whether the command prepares every VM of the event."""

    def refusal(self, kid: str) -> str | None:
        """Return the reason why the agent would not act on an approval by the key *kid*, or None."""
        if self.kids is not None and kid not in self.kids:
            return f"does not trust the key {kid}"
        if self.disabled:
            return "approves nothing, because its file approvals.disabled exists"
        if self.dry_run:
            return "does not approve, because dry_run is set"
        if (self.required_approvals or 1) > 1:
            return f"requires {self.required_approvals} approvers with separate keys, and the portal has one key"
        return None


class AgentSeen(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that has polled for decisions."""

    connection: Connection
    report: AgentReport = AgentReport()
    received_index: int = 0
    """The agent has received every decision up to this number."""
    is_attested: bool = False
    """Whether the agent's credential proves its vmId."""

    def why_not(self, kid: str) -> str | None:
        """Return the reason why the agent would not act on an approval by *kid* now, or None."""
        if self.connection is Connection.RECONNECTING:
            return "is reconnecting to the portal"
        return self.report.refusal(kid) if self.connection is Connection.CONNECTED else "is not connected"


class _Agent(msgspec.Struct, kw_only=True):
    """An agent of any portal process."""

    seen: AgentSeen
    process: str
    """The process that the agent polled last, or that took over the agent from a stopped process."""
    at: float
    """The start of the last poll, the end of the last poll, or the time when the agent disconnected."""
    open_polls: int = 0
    """The number of open polls at this process."""


class ConnectedAgents:
    """The agents that poll for decisions, by VM."""

    def __init__(self, clock: Clock) -> None:
        self.process = uuid.uuid4().hex
        """The name of this process in the database."""
        self._clock = clock
        self._agents: dict[str, _Agent] = {}
        self._alive_until: dict[str, float] = {}
        """The time at which each other process counts as stopped, unless its heartbeat changes first."""
        self._without_poll: set[str] = set()
        """The agents that `sweep` checks. Almost all other agents of a fleet have an open poll."""
        self._is_loaded = False
        self._unshared: set[str] = set()
        self._changed: set[str] = set()

    def begins(self, vm_key: str, header: str, *, index: int = 0, is_attested: bool = False) -> None:
        """Record the start of a poll and the agent's *header*."""
        seen = AgentSeen(
            connection=Connection.CONNECTED, report=_read(header), received_index=index, is_attested=is_attested
        )
        known = self._agents.get(vm_key)
        if known is None or known.process != self.process or known.seen != seen:
            self._changed.add(vm_key)
            self._unshared.add(vm_key)
        open_polls = 1 if known is None else known.open_polls + 1
        at = self._clock.monotonic()
        self._agents[vm_key] = _Agent(seen=seen, process=self.process, at=at, open_polls=open_polls)

    def ends(self, vm_key: str) -> None:
        """Record the end of a poll."""
        known = self._agents[vm_key]
        known.open_polls -= 1
        known.at = self._clock.monotonic()
        self._without_poll.add(vm_key)

    def of(self, vm_keys: Iterable[str]) -> dict[str, AgentSeen]:
        """Return the agents of *vm_keys* that have polled.

        Threads other than the event loop also call this method.
        """
        now = self._clock.monotonic()
        return {key: self._seen(agent, now) for key in vm_keys if (agent := self._agents.get(key)) is not None}

    def all(self) -> dict[str, AgentSeen]:
        """Return every agent that has polled within the last day."""
        return self.of(self._agents)

    def take_changes(self) -> set[str]:
        """Return the VMs whose agent has changed since the last call."""
        found, self._changed = self._changed, set()
        return found

    def sweep(self) -> None:
        """Update the state of the agents, and remove any that have been disconnected for a day."""
        now, connected = self._clock.monotonic(), Connection.CONNECTED
        away = []
        for key in list(self._without_poll):
            agent = self._agents[key]
            if agent.open_polls and agent.seen.connection is connected:
                self._without_poll.discard(key)
                continue
            seen = self._seen(agent, now)
            is_away = seen.connection is Connection.DISCONNECTED
            if seen is not agent.seen:
                agent.seen = seen
                self._changed.add(key)
                if agent.open_polls or is_away:
                    agent.process, agent.at = self.process, now
                    self._unshared.add(key)
            if is_away:
                away.append((agent.at, key))
        away.sort()
        for number, (at, key) in enumerate(away):
            if number < len(away) - _MOST_AWAY or now - at >= KEPT_SECONDS:
                del self._agents[key]
                self._without_poll.discard(key)

    def take_unshared(self) -> list[StoredAgent]:
        """Return the agents of this process that have changed since the last call."""
        keys, self._unshared = self._unshared, set()
        at, now = self._clock.now(), self._clock.monotonic()
        return [
            StoredAgent(
                vm_key=key,
                is_connected=agent.seen.connection is Connection.CONNECTED,
                is_attested=agent.seen.is_attested,
                received_index=agent.seen.received_index,
                report=msgspec.json.encode(agent.seen.report).decode(),
                polled_at=format_time(at - timedelta(seconds=now - agent.at)),
            )
            for key in sorted(keys)  # processes that store the same agents lock the rows in the same order
            if (agent := self._agents.get(key)) is not None and agent.process == self.process
        ]

    def share_again(self, agents: Iterable[StoredAgent]) -> None:
        """Let `take_unshared` return *agents* again, because they could not be stored."""
        self._unshared |= {each.vm_key for each in agents}

    def receive(self, alive: Iterable[str], changed: Iterable[StoredAgent]) -> None:
        """Add the *changed* agents of other processes.

        *alive* contains the processes whose heartbeat has changed.
        """
        now, at = self._clock.monotonic(), self._clock.now()
        # When this process starts, a process in the database might already have stopped.
        self._alive_until |= dict.fromkeys(alive, now + _ALIVE_SECONDS if self._is_loaded else now)
        self._is_loaded = True
        for each in changed:
            here = self._agents.get(each.vm_key)
            self._agents[each.vm_key] = _Agent(
                seen=AgentSeen(
                    connection=self._connection(each.process, now) if each.is_connected else Connection.DISCONNECTED,
                    report=_read(each.report),
                    received_index=each.received_index,
                    is_attested=each.is_attested,
                ),
                process=each.process,
                at=now - (at - parse_time(each.polled_at)).total_seconds(),
                open_polls=0 if here is None else here.open_polls,
            )
            self._changed.add(each.vm_key)
            self._without_poll.add(each.vm_key)

    def _seen(self, agent: _Agent, now: float) -> AgentSeen:
        """Return *agent* with its current connection."""
        connection = agent.seen.connection
        if agent.open_polls:
            connection = Connection.CONNECTED
        elif connection is not Connection.DISCONNECTED and agent.process != self.process:
            connection = self._connection(agent.process, now)
        elif now - agent.at >= _GRACE_SECONDS:
            connection = Connection.DISCONNECTED
        if connection is agent.seen.connection:
            return agent.seen
        return msgspec.structs.replace(agent.seen, connection=connection)

    def _connection(self, process: str, now: float) -> Connection:
        """Return the state of an agent that was connected to the other process *process*."""
        seconds = now - self._alive_until[process]
        if seconds >= _RECONNECTING_SECONDS:
            return Connection.DISCONNECTED
        return Connection.CONNECTED if seconds < 0 else Connection.RECONNECTING


@lru_cache(maxsize=64)  # most agents of a fleet send the same header
def _read(header: str) -> AgentReport:
    try:
        return msgspec.json.decode(header[:_MOST_HEADER_CHARACTERS].encode(), type=AgentReport)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return AgentReport()


logger = logging.getLogger(__name__)

_ROUND_SECONDS = 0.5
_HEARTBEAT_SECONDS = 1.0
_CLEANUP_SECONDS = 60.0


class AgentExchange:
    """Shares the state of connected agents between portal processes through the database.

    The exchange calls *notify* after it has loaded changes from another process. If several processes can share the
    database, it also stores a heartbeat every second, even without changes.
    """

    def __init__(
        self, store: StoreThreads, connected_agents: ConnectedAgents, *, notify: Callable[[], None], clock: Clock
    ) -> None:
        self._store = store
        self._connected_agents = connected_agents
        self._notify = notify
        self._clock = clock
        self._heartbeat = 0
        self._heartbeats: dict[str, int] = {}
        """The last known heartbeat of each other process."""
        self._stored_at = clock.monotonic()
        self._cleaned_at = -_CLEANUP_SECONDS
        self._log = ThrottledLog(logger, clock=clock)

    async def follow(self) -> None:
        """Call `exchange` twice a second until the task is canceled."""
        while True:
            try:
                await self.exchange()
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"The state of connected agents cannot be stored. {error}")
            else:
                self._log.recovered("store", "The database stores the state of connected agents again.")
            self._connected_agents.sweep()
            await asyncio.sleep(_ROUND_SECONDS)

    async def exchange(self) -> None:
        """Store changes to this process's agents, and load changes from other processes."""
        agents, process = self._connected_agents, self._connected_agents.process
        is_shared, now = self._store.store.kind.is_shared, self._clock.monotonic()
        is_cleanup = now - self._cleaned_at >= _CLEANUP_SECONDS
        changes = agents.take_unshared()
        if changes or (is_shared and now - self._stored_at >= _HEARTBEAT_SECONDS):
            self._heartbeat = max(self._heartbeat + 1, int(1000 * self._clock.timestamp()))
            try:
                await self._store.write(store_agents, changes, process=process, heartbeat=self._heartbeat)
            except StoreUnavailable:
                agents.share_again(changes)
                raise
            self._stored_at = now
        if is_cleanup:
            before = self._clock.now() - timedelta(seconds=KEPT_SECONDS)
            await self._store.write(delete_agents, before=before)
            self._cleaned_at = now
        if is_shared or is_cleanup:
            heartbeats, found = await self._store.read(
                changes_of_other_processes, process=process, known=self._heartbeats
            )
            self._heartbeats |= heartbeats
            agents.receive(heartbeats, found)
            if found:
                self._notify()
