"""Tracks the connected agents and the settings that they report.

An agent counts as connected while it has an open poll, and for 15 seconds after its last poll ends. Each poll has a
header that contains the agent's version, keys, and settings (PROTOCOL.md, section 2).

The portal keeps the connected agents in memory, because every poll updates them. If more than one portal process uses
the database, each process writes its own changes and reads the changes of the other processes once a second. After a
process is killed, its agents still count as connected for up to 90 seconds.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache

import msgspec

from bridge.clock import Clock, format_time, parse_time
from bridge.logs import ThrottledLog
from bridge.portal.store.agents import SharedAgent, agents_of_other_processes, delete_agents, store_agents
from bridge.portal.store.database import StoreThreads, StoreUnavailable

logger = logging.getLogger(__name__)

HEADER = "scheduled-events-agent"
_MOST_HEADER_CHARACTERS = 8_192
#: An agent is removed when its last poll ended this long ago. A poll lasts at most 600 s.
FORGOTTEN_SECONDS = 700.0
_OPEN_POLL_SECONDS = 90.0
_RECONNECT_SECONDS = 15.0
_EXCHANGE_SECONDS = 1.0
_FULL_EXCHANGE_ROUNDS = int(_OPEN_POLL_SECONDS / 3)


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


class _SharedBody(msgspec.Struct, frozen=True):
    is_polling: bool
    reported: AgentReport
    is_attested: bool = False


_reported_of = msgspec.json.Decoder(AgentReport).decode
_shared_body_of = msgspec.json.Decoder(_SharedBody).decode


class ConnectedAgents:
    """The agents that poll for decisions, by VM."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._here: dict[str, _Polls] = {}
        self._elsewhere: dict[str, _Polls] = {}
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
        found = {key: [each for each in (self._here.get(key), self._elsewhere.get(key)) if each] for key in vm_keys}
        return {key: self._agent_seen(known) for key, known in found.items() if known}

    def all(self) -> dict[str, AgentSeen]:
        """Return every agent that has polled."""
        return self.of([*self._here, *self._elsewhere])

    def changes_to_share(self, *, is_everything: bool) -> list[SharedAgent]:
        """Return the changes since the last call, or everything, for the other processes."""
        keys = self._here.keys() if is_everything else self._unshared & self._here.keys()
        self._unshared = set()
        now, monotonic = self._clock.now(), self._clock.monotonic()
        changes = []
        for key in keys:
            seen = self._here[key]
            is_polling = seen.open_polls > 0
            asked_at = format_time(now - timedelta(seconds=0.0 if is_polling else monotonic - seen.at))
            body = msgspec.json.encode(_SharedBody(is_polling, seen.reported, seen.is_attested)).decode()
            changes.append(SharedAgent(vm_key=key, asked_at=asked_at, received_index=seen.received_index, body=body))
        return changes

    def receive(self, shared: Iterable[SharedAgent]) -> None:
        """Replace the agents of all other processes. Not thread-safe."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        found: dict[str, _Polls] = {}
        for each in shared:
            ago = (now - parse_time(each.asked_at)).total_seconds()
            body = _shared_body_of(each.body)
            is_polling = body.is_polling and ago < _OPEN_POLL_SECONDS
            seen = _Polls(
                at=monotonic - ago,
                reported=body.reported,
                open_polls=int(is_polling),
                received_index=each.received_index,
                is_attested=body.is_attested,
            )
            found[each.vm_key] = max(seen, found.get(each.vm_key, seen), key=_recency)
        self._elsewhere = found

    def remove_old(self) -> None:
        """Remove the agents that have stopped polling."""
        oldest = self._clock.monotonic() - FORGOTTEN_SECONDS
        self._here = {key: seen for key, seen in self._here.items() if seen.open_polls > 0 or seen.at >= oldest}

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
        self._log = ThrottledLog(logger, clock=clock)

    async def follow(self) -> None:
        """Update both sides once a second until the task is canceled."""
        rounds = 0
        while True:
            self._connected_agents.remove_old()
            if self._store.store.kind.is_shared:
                try:
                    await self.exchange(is_everything=rounds % _FULL_EXCHANGE_ROUNDS == 0)
                except StoreUnavailable as error:
                    self._log.problem("store", logging.ERROR, f"The agents of other processes are unknown. {error}")
                    rounds = -1  # the next round shares everything
                else:
                    self._log.recovered("store", "The agents of other processes are known again.")
            rounds += 1
            await asyncio.sleep(_EXCHANGE_SECONDS)

    async def exchange(self, *, is_everything: bool) -> None:
        """Exchange the changed agents, or all agents, with other processes."""
        changes = self._connected_agents.changes_to_share(is_everything=is_everything)
        if changes:
            await self._store.write(store_agents, changes, process=self._process)
        if is_everything:
            await self._store.write(delete_agents, before=self._ago(2 * FORGOTTEN_SECONDS))
        since = self._ago(FORGOTTEN_SECONDS)
        shared = await self._store.read(agents_of_other_processes, process=self._process, since=since)
        await asyncio.to_thread(self._connected_agents.receive, shared)  # thousands of agents would block the polls

    def _ago(self, seconds: float) -> str:
        return format_time(self._clock.now() - timedelta(seconds=seconds))


def _recency(seen: _Polls) -> tuple[bool, float]:
    return seen.open_polls > 0, seen.at


@lru_cache(maxsize=64)  # most agents of a fleet send the same header
def _read(header: str) -> AgentReport:
    try:
        return _reported_of(header[:_MOST_HEADER_CHARACTERS].encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return AgentReport()
