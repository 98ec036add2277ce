"""Tracks the connected agents and the settings that they report.

An agent counts as connected while it has an open poll, and for 15 seconds after its last poll ends. Each poll has a
header that contains the agent's version, keys, and settings (PROTOCOL.md, section 2).

The portal keeps the connected agents in memory, because every poll updates them. If more than one portal process uses
the database, each process writes its own changes and reads the changes of the other processes once a second. A repeated
poll does not change an agent, so the cost does not depend on the number of agents. After a process is killed,
its agents still count as connected for up to 90 seconds.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache

import msgspec

from bridge.clock import Clock, format_time, parse_time
from bridge.logs import ThrottledLog
from bridge.portal.store.agents import SharedAgent, SharedAgents, delete_processes, shared_agents, store_agents
from bridge.portal.store.database import StoreThreads, StoreUnavailable

logger = logging.getLogger(__name__)

HEADER = "scheduled-events-agent"
_MOST_HEADER_CHARACTERS = 8_192
#: An agent is removed when its last poll ended this long ago. A poll lasts at most 600 s.
FORGOTTEN_SECONDS = 700.0
_PROCESS_SECONDS = 90.0
_RECONNECT_SECONDS = 15.0
_EXCHANGE_SECONDS = 1.0


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The header of an agent's last poll. Missing members are None."""

    version: str | None = None
    kids: tuple[str, ...] | None = None
    required_approvals: int | None = None
    dry_run: bool | None = None
    disabled: bool | None = None
    command: bool | None = None
    """Whether the agent runs a command, such as a drain, before it approves an event for the portal."""
    command_covers_all: bool | None = None
    """Whether the command prepares every VM of the event."""


class AgentSeen(AgentReport, frozen=True, kw_only=True):
    """An agent that has polled for decisions."""

    is_connected: bool
    received_index: int = 0
    """The agent has received every decision up to this number."""
    is_attested: bool = False
    """Whether the credential of the agent proves its vmId."""

    def why_not(self, kid: str) -> str | None:
        """Return the reason why the agent would not act on an approval by the key *kid*, or None."""
        if not self.is_connected:
            return "is not connected"
        if self.kids is not None and kid not in self.kids:
            return f"does not trust the key {kid}"
        if self.disabled:
            return "approves nothing, because its file approvals.disabled exists"
        if self.dry_run:
            return "does not approve, because dry_run is set"
        if (self.required_approvals or 1) > 1:
            return f"requires {self.required_approvals} approvers with separate keys, and the portal has one key"
        return None


class _Polls(msgspec.Struct):
    at: float
    reported: AgentReport
    open_polls: int = 0
    received_index: int = 0
    is_attested: bool = False
    shared: int = 0
    """The hash of the state that the other processes have."""


class _SharedBody(msgspec.Struct, frozen=True):
    is_polling: bool
    reported: AgentReport
    is_attested: bool = False
    ended_seconds: float = 0.0
    """The time from the end of the last poll to the write of this state."""


_reported_of = msgspec.json.Decoder(AgentReport).decode
_shared_body_of = lru_cache(maxsize=256)(msgspec.json.Decoder(_SharedBody).decode)


class ConnectedAgents:
    """The agents that poll for decisions, by VM."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._here: dict[str, _Polls] = {}
        self._elsewhere: dict[str, dict[str, _Polls]] = {}
        self._unshared: set[str] = set()

    def begins(self, vm_key: str, header: str, *, index: int = 0, is_attested: bool = False) -> None:
        """Record the start of a poll and the agent's *header*."""
        known = self._here.get(vm_key)
        open_polls = 1 if known is None else known.open_polls + 1
        self._here[vm_key] = _Polls(
            at=self._clock.monotonic(),
            reported=_read(header),
            open_polls=open_polls,
            received_index=index,
            is_attested=is_attested,
            shared=0 if known is None else known.shared,
        )
        self._unshared.add(vm_key)

    def ends(self, vm_key: str) -> None:
        """Record the end of a poll."""
        known = self._here.get(vm_key)
        if known is not None:
            known.open_polls -= 1
            known.at = self._clock.monotonic()
            self._unshared.add(vm_key)

    def of(self, vm_keys: Iterable[str]) -> dict[str, AgentSeen]:
        """Return the agents of *vm_keys* that have polled.

        Threads of the store also call this method.
        """
        places = [self._here, *self._elsewhere.values()]
        found = {key: [seen for place in places if (seen := place.get(key))] for key in vm_keys}
        return {key: self._agent_seen(known) for key, known in found.items() if known}

    def all(self) -> dict[str, AgentSeen]:
        """Return every agent that has polled."""
        return self.of({key for place in (self._here, *self._elsewhere.values()) for key in list(place)})

    def changes_to_share(self, *, is_everything: bool) -> list[SharedAgent]:
        """Return the changes since the last call, or everything, for the other processes."""
        keys = self._here.keys() if is_everything else self._unshared & self._here.keys()
        self._unshared = set()
        monotonic = self._clock.monotonic()
        changes = []
        for key in keys:
            seen = self._here[key]
            is_polling = seen.open_polls > 0
            state = hash((is_polling, seen.reported, seen.is_attested, seen.received_index))
            if state != seen.shared or is_everything:
                seen.shared = state
                ended = 0.0 if is_polling else round(monotonic - seen.at, 1)
                body = msgspec.json.encode(_SharedBody(is_polling, seen.reported, seen.is_attested, ended)).decode()
                changes.append(SharedAgent(vm_key=key, received_index=seen.received_index, body=body))
        return changes

    def receive(self, shared: Mapping[str, SharedAgents]) -> None:
        """Apply the changes of all other live processes. Not thread-safe."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        elsewhere = {}
        for process, changes in shared.items():
            agents = {} if changes.is_everything else self._elsewhere.get(process, {})
            at = monotonic - (now - parse_time(changes.stored_at)).total_seconds()
            for each in changes.agents:
                body = _shared_body_of(each.body)
                agents[each.vm_key] = _Polls(
                    at=at - body.ended_seconds,
                    reported=body.reported,
                    open_polls=int(body.is_polling),
                    received_index=each.received_index,
                    is_attested=body.is_attested,
                )
            elsewhere[process] = agents
        self._elsewhere = elsewhere

    def remove_old(self) -> list[str]:
        """Remove the agents that have stopped polling. Return those that polled at this process."""
        oldest = self._clock.monotonic() - FORGOTTEN_SECONDS
        removed: list[str] = []
        for place in (*self._elsewhere.values(), self._here):
            removed = [key for key, seen in place.items() if seen.open_polls == 0 and seen.at < oldest]
            for key in removed:
                del place[key]
        return removed

    def _agent_seen(self, known: list[_Polls]) -> AgentSeen:
        seen = max(known, key=_recency)
        return AgentSeen(
            is_connected=seen.open_polls > 0 or self._clock.monotonic() - seen.at < _RECONNECT_SECONDS,
            **msgspec.structs.asdict(seen.reported),
            received_index=max(each.received_index for each in known),
            is_attested=seen.is_attested,
        )


class AgentExchange:
    """Removes old agents and exchanges data with other portal processes."""

    def __init__(self, store: StoreThreads, connected_agents: ConnectedAgents, *, clock: Clock) -> None:
        self._store = store
        self._connected_agents = connected_agents
        self._clock = clock
        self._process = uuid.uuid4().hex
        self._read_until: dict[str, str] = {}
        """The time of the newest state of each other process that was read."""
        self._log = ThrottledLog(logger, clock=clock)

    async def follow(self) -> None:
        """Update both sides once a second until the task is canceled."""
        must_share_everything = True
        while True:
            removed = self._connected_agents.remove_old()
            if self._store.store.kind.is_shared:
                try:
                    await self.exchange(is_everything=must_share_everything, removed=removed)
                except StoreUnavailable as error:
                    self._log.problem("store", logging.ERROR, f"The agents of other processes are unknown. {error}")
                    must_share_everything = True
                else:
                    self._log.recovered("store", "The agents of other processes are known again.")
                    must_share_everything = False
            await asyncio.sleep(_EXCHANGE_SECONDS)

    async def exchange(self, *, is_everything: bool = False, removed: Sequence[str] = ()) -> None:
        """Exchange the changed agents, or all agents, with other processes."""
        now = self._clock.now()
        if is_everything:
            before = format_time(now - timedelta(seconds=2 * FORGOTTEN_SECONDS))
            await self._store.write(delete_processes, before=before)
        changes = self._connected_agents.changes_to_share(is_everything=is_everything)
        await self._store.write(store_agents, changes, removed, process=self._process, at=format_time(now))
        since = format_time(now - timedelta(seconds=_PROCESS_SECONDS))
        others = await self._store.read(
            shared_agents, other_than=self._process, alive_since=since, read_until=self._read_until
        )
        await asyncio.to_thread(self._connected_agents.receive, others)  # thousands of agents would block the polls
        self._read_until = {process: each.stored_at for process, each in others.items()}


def _recency(seen: _Polls) -> tuple[bool, float]:
    return seen.open_polls > 0, seen.at


@lru_cache(maxsize=64)  # most agents of a fleet send the same header
def _read(header: str) -> AgentReport:
    try:
        return _reported_of(header[:_MOST_HEADER_CHARACTERS].encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return AgentReport()
