"""Which agents poll for decisions, and the contents of their headers (PROTOCOL.md, section 2).

The table is in memory, because every poll changes it. An agent that stops polling is removed within minutes. Until
then its entry is kept packed: many small objects, scattered over the memory that thousands of lost connections leave
free, would prevent the return of that memory to the system.

Where several processes of the portal share a database, any of them may hold an agent's poll. Each process therefore
writes its changes to the database once a second and reads the entries of the others. The polls of a process that was
killed count as lost after HELD_SECONDS.
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
_LONGEST = 8_192
#: A poll lasts at most 600 s; an agent that is there has the next one open within a second.
FORGOTTEN_SECONDS = 700.0
#: For so long a poll that another process holds counts, unless that says again that it does.
HELD_SECONDS = 90.0
_AWAY_SECONDS = 15.0


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
    """What processes tell each other of an agent."""

    is_held: bool
    reported: _Reported


_decode = msgspec.json.Decoder(_Reported).decode
_shared_body_of = msgspec.json.Decoder(_SharedBody).decode
#: As JSON, which has room for all that a header can say; a number in it may have hundreds of digits.
_unpack = msgspec.json.Decoder(dict[str, _Seen]).decode
_pack = msgspec.json.Encoder().encode


class ConnectedAgents:
    """The agents that ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._away = _pack({})
        self._of_other_processes: dict[str, _Seen] = {}
        self._unshared: set[str] = set()

    def begins(self, vm_key: str, header: str, *, index: int = 0) -> None:
        """Note that a poll of *vm_key* begins, with what its agent says in *header*, for what comes after *index*."""
        known = self._seen.get(vm_key)
        open_polls = 1 if known is None else known.open_polls + 1
        self._seen[vm_key] = _Seen(
            at=self._clock.monotonic(), reported=_read(header), open_polls=open_polls, received_index=index
        )
        self._unshared.add(vm_key)

    def ends(self, vm_key: str) -> None:
        """Note that a poll of *vm_key* was answered, or lost."""
        known = self._seen.get(vm_key)
        if known is not None:
            known.open_polls -= 1
            known.at = self._clock.monotonic()
            self._unshared.add(vm_key)

    def of(self, vm_keys: Iterable[str]) -> dict[str, AgentSeen]:
        """Return what is known of those of *vm_keys* that ever asked; a thread of the store asks, too."""
        return self._shown_of(vm_keys, self._here(), self._of_other_processes)

    def all(self) -> dict[str, AgentSeen]:
        """Return what is known of every agent that ever asked."""
        here, of_other_processes = self._here(), self._of_other_processes
        return self._shown_of({**here, **of_other_processes}, here, of_other_processes)

    def shared(self, *, is_everything: bool) -> list[SharedAgent]:
        """Return what has changed here since this was asked last, or everything, for the other processes."""
        here = self._here() if is_everything else self._seen
        keys = here.keys() if is_everything else self._unshared & here.keys()
        self._unshared = set()
        now, monotonic = self._clock.now(), self._clock.monotonic()
        shared = []
        for key in keys:
            seen = here[key]
            ago = 0.0 if seen.open_polls > 0 else monotonic - seen.at
            body = msgspec.json.encode(_SharedBody(is_held=seen.open_polls > 0, reported=seen.reported)).decode()
            asked_at = format_time(now - timedelta(seconds=ago))
            shared.append(SharedAgent(vm_key=key, asked_at=asked_at, received_index=seen.received_index, body=body))
        return shared

    def receive(self, of_other_processes: Iterable[SharedAgent]) -> None:
        """Take what all other processes know, in place of what they knew before; any one thread may do so."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        found: dict[str, _Seen] = {}
        for each in of_other_processes:
            ago = (now - parse_time(each.asked_at)).total_seconds()
            shared = _shared_body_of(each.body)
            is_held = shared.is_held and ago < HELD_SECONDS
            seen = _Seen(
                at=monotonic - ago,
                reported=shared.reported,
                open_polls=int(is_held),
                received_index=each.received_index,
            )
            found[each.vm_key] = max(seen, found.get(each.vm_key, seen), key=_newer)
        self._of_other_processes = found

    def tidy(self) -> None:
        """Pack the agents that are away, and forget those that have not asked for longer than any poll lasts.

        It is called now and then, from the thread of `begins` and `ends`.
        """
        now, here = self._clock.monotonic(), self._here()
        seen = {key: each for key, each in here.items() if each.open_polls > 0 or each.at >= now - _AWAY_SECONDS}
        self._away = _pack(
            {key: here[key] for key in here.keys() - seen.keys() if here[key].at >= now - FORGOTTEN_SECONDS}
        )
        self._seen = seen  # after the others are packed: whoever asks meanwhile finds an agent twice rather than never
        self._unshared &= seen.keys()  # the rest was told long ago, or there is nobody to tell

    def _here(self) -> dict[str, _Seen]:
        """Return what is known of the agents that asked this process."""
        seen = self._seen  # before the packed ones, which `tidy` changes first
        return {**_unpack(self._away), **seen}

    def _shown_of(
        self, vm_keys: Iterable[str], here: dict[str, _Seen], of_other_processes: dict[str, _Seen]
    ) -> dict[str, AgentSeen]:
        return {
            key: self._shown([each for each in (here.get(key), of_other_processes.get(key)) if each is not None])
            for key in vm_keys
            if key in here or key in of_other_processes
        }

    def _shown(self, known: list[_Seen]) -> AgentSeen:
        seen = max(known, key=_newer)
        # Between two polls an agent is away for a second at most; one that is worse off is not there.
        is_connected = seen.open_polls > 0 or self._clock.monotonic() - seen.at < _AWAY_SECONDS
        reported = seen.reported
        return AgentSeen(
            is_connected=is_connected,
            version=reported.version,
            kids=reported.kids,
            required_approvals=reported.required_approvals,
            dry_run=reported.dry_run,
            disabled=reported.disabled,
            received_index=max(each.received_index for each in known),
        )


def _newer(seen: _Seen) -> tuple[bool, float]:
    """Return by what the better of two is known: it holds a poll, or has heard of the agent later."""
    return seen.open_polls > 0, seen.at


@lru_cache(maxsize=64)  # most agents of a fleet say the same
def _read(header: str) -> _Reported:
    """Return what *header* says; nothing, where it is none of the protocol's."""
    try:
        return _decode(header[:_LONGEST].encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _Reported()


_ROUND_SECONDS = 1.0
#: Every so many rounds what is still so is told again, and what is old goes.
_ROUNDS = int(HELD_SECONDS / 3)


class AgentExchange:
    """Keeps *connections* and the database in step, where several processes may share it."""

    def __init__(self, store: StoreThreads, connected_agents: ConnectedAgents, *, clock: Clock) -> None:
        self._store = store
        self._connected_agents = connected_agents
        self._clock = clock
        self._process = uuid.uuid4().hex
        self._log = ThrottledLog(logger, clock=clock)

    async def follow(self) -> None:
        """Tell and hear each second, until it is cancelled."""
        rounds = 0
        while self._store.is_shared:
            try:
                await self.exchange(is_everything=rounds % _ROUNDS == 0)
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"Agents of other processes are not known. {error}")
                rounds = -1  # and then everything is told
            else:
                self._log.recovered("store", "Agents of other processes are known again.")
            rounds += 1
            await asyncio.sleep(_ROUND_SECONDS)
        await asyncio.Event().wait()  # nobody to tell; a task that follows has no end of its own

    async def exchange(self, *, is_everything: bool) -> None:
        """Tell what has changed here, or everything, and hear what is told elsewhere."""
        shared = self._connected_agents.shared(is_everything=is_everything)
        if shared:
            await self._store.write(store_agents, shared, process=self._process)
        if is_everything:
            await self._store.write(delete_agents, before=self._ago(2 * FORGOTTEN_SECONDS))
        of_other_processes = await self._store.read(
            agents_of_other_processes, process=self._process, since=self._ago(FORGOTTEN_SECONDS)
        )
        await asyncio.to_thread(self._connected_agents.receive, of_other_processes)  # of thousands it takes a while

    def _ago(self, seconds: float) -> str:
        return format_time(self._clock.now() - timedelta(seconds=seconds))
