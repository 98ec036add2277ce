"""Which agents poll for decisions, and the contents of their headers (PROTOCOL.md, section 2).

The table is in memory, because every poll changes it. Processes that share a database write their changes once a second
and read those of the others. The polls of a killed process count as lost after HELD_SECONDS.
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
from bridge.portal.signing import AgentSeen
from bridge.portal.store.agents import SharedAgent, agents_of_other_processes, delete_agents, store_agents
from bridge.portal.store.database import StoreThreads, StoreUnavailable

logger = logging.getLogger(__name__)

HEADER = "scheduled-events-agent"
_MOST_HEADER_CHARACTERS = 8_192
#: An agent whose last poll ended longer ago is removed. A poll lasts at most 600 s.
FORGOTTEN_SECONDS = 700.0
#: A poll at another process counts for this long after the last update by that process.
HELD_SECONDS = 90.0
#: An agent stays connected for this long between two polls.
_RECONNECT_SECONDS = 15.0
_EXCHANGE_SECONDS = 1.0
_FULL_EXCHANGE_ROUNDS = int(HELD_SECONDS / 3)


class _Reported(msgspec.Struct, frozen=True):
    version: str | None = None
    kids: tuple[str, ...] | None = None
    required_approvals: int | None = None
    dry_run: bool | None = None
    disabled: bool | None = None


class _Seen(msgspec.Struct):
    at: float
    reported: _Reported
    open_polls: int = 0
    received_index: int = 0


class _SharedBody(msgspec.Struct, frozen=True):
    is_held: bool
    reported: _Reported


_reported_of = msgspec.json.Decoder(_Reported).decode
_shared_body_of = msgspec.json.Decoder(_SharedBody).decode


class ConnectedAgents:
    """The agents that poll for decisions, by VM."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._here: dict[str, _Seen] = {}
        self._elsewhere: dict[str, _Seen] = {}
        self._unshared: set[str] = set()

    def begins(self, vm_key: str, header: str, *, index: int = 0) -> None:
        """Record the start of a poll for the decisions after *index*, with the agent's *header*."""
        known = self._here.get(vm_key)
        open_polls = 1 if known is None else known.open_polls + 1
        self._here[vm_key] = _Seen(
            at=self._clock.monotonic(), reported=_read(header), open_polls=open_polls, received_index=index
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
        """Return the agents of *vm_keys* that have polled; also called from the threads of the store."""
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
            is_held = seen.open_polls > 0
            asked_at = format_time(now - timedelta(seconds=0.0 if is_held else monotonic - seen.at))
            body = msgspec.json.encode(_SharedBody(is_held=is_held, reported=seen.reported)).decode()
            changes.append(SharedAgent(vm_key=key, asked_at=asked_at, received_index=seen.received_index, body=body))
        return changes

    def receive(self, shared: Iterable[SharedAgent]) -> None:
        """Replace the agents of all other processes; called from one thread at a time."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        found: dict[str, _Seen] = {}
        for each in shared:
            ago = (now - parse_time(each.asked_at)).total_seconds()
            body = _shared_body_of(each.body)
            is_held = body.is_held and ago < HELD_SECONDS
            seen = _Seen(
                at=monotonic - ago, reported=body.reported, open_polls=int(is_held), received_index=each.received_index
            )
            found[each.vm_key] = max(seen, found.get(each.vm_key, seen), key=_recency)
        self._elsewhere = found

    def remove_old(self) -> None:
        """Remove the agents that have stopped polling."""
        oldest = self._clock.monotonic() - FORGOTTEN_SECONDS
        self._here = {key: seen for key, seen in self._here.items() if seen.open_polls > 0 or seen.at >= oldest}

    def _agent_seen(self, known: list[_Seen]) -> AgentSeen:
        seen = max(known, key=_recency)
        return AgentSeen(
            is_connected=seen.open_polls > 0 or self._clock.monotonic() - seen.at < _RECONNECT_SECONDS,
            **msgspec.structs.asdict(seen.reported),
            received_index=max(each.received_index for each in known),
        )


class AgentExchange:
    """Removes old agents, and shares the agents with the other processes of the portal."""

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
        """Write the changes, or everything, and read the agents of the other processes."""
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


def _recency(seen: _Seen) -> tuple[bool, float]:
    return seen.open_polls > 0, seen.at


@lru_cache(maxsize=64)  # most agents of a fleet send the same header
def _read(header: str) -> _Reported:
    """Return the contents of *header*; empty if *header* is malformed."""
    try:
        return _reported_of(header[:_MOST_HEADER_CHARACTERS].encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _Reported()
