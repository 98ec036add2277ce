"""Tracks the connected agents and the settings that they report.

An agent counts as connected while it has an open poll, and for 15 seconds after its last poll ends. Each poll has a
header that contains the agent's version, keys, and settings (PROTOCOL.md, section 2). Disconnected agents stay known
for one day.

The portal keeps the agents in memory, because every poll updates them. `bridge.portal.agent_exchange` writes each
change to the database, and reads the changes of other portal processes. When a process stops, its connected agents
remain in the database. The other processes show these agents as reconnecting for 60 seconds, and then take them over as
disconnected. A process that starts later also shows them as reconnecting for its first 60 seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from enum import Enum
from functools import lru_cache

import msgspec

from bridge.clock import Clock, format_time, parse_time
from bridge.portal.store.agents import StoredAgent

HEADER = "scheduled-events-agent"
_MOST_HEADER_CHARACTERS = 8_192
KEPT_SECONDS = 86_400.0
RECONNECTING_SECONDS = 60.0
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
    """The settings in the header of an agent's last poll. Missing settings are None."""

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


class AgentSeen(AgentReport, frozen=True, kw_only=True):
    """An agent that has polled for decisions."""

    is_connected: bool
    is_reconnecting: bool = False
    received_index: int = 0
    """The agent has received every decision up to this number."""
    is_attested: bool = False
    """Whether the credential of the agent proves its vmId."""

    def why_not(self, kid: str) -> str | None:
        """Return the reason why the agent would not act on an approval by *kid* now, or None."""
        if self.is_reconnecting:
            return "is reconnecting to the portal"
        return self.refusal(kid) if self.is_connected else "is not connected"


class _Polls(msgspec.Struct, kw_only=True):
    """The polls of an agent at one process."""

    at: float
    """The start of the last poll, or its end if no poll is open."""
    reported: AgentReport
    received_index: int = 0
    is_attested: bool = False
    open_polls: int = 0
    """Always 0 for another process."""
    is_connected: bool = True
    """For this process, `sweep` sets the value to False after the grace period."""


class _Body(msgspec.Struct, frozen=True):
    reported: AgentReport
    is_attested: bool = False


class _Process(msgspec.Struct, kw_only=True):
    """Another portal process, which might have stopped."""

    heartbeat: int
    known_at: float
    alive_at: float | None = None
    """The time at which the heartbeat last changed, or None if it has not changed."""
    seen: Connection = Connection.RECONNECTING
    agents: dict[str, _Polls] = msgspec.field(default_factory=dict)

    def connection(self, now: float) -> Connection:
        """Return the state of the agents that were connected to this process."""
        if self.alive_at is not None and now - self.alive_at < _ALIVE_SECONDS:
            return Connection.CONNECTED
        is_recent = now - (self.known_at if self.alive_at is None else self.alive_at) < RECONNECTING_SECONDS
        return Connection.RECONNECTING if is_recent else Connection.DISCONNECTED


_reported_of = msgspec.json.Decoder(AgentReport).decode
_ORDER = tuple(reversed(Connection))


class ConnectedAgents:
    """The agents that poll for decisions, by VM."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._here: dict[str, _Polls] = {}
        self._processes: dict[str, _Process] = {}
        self._unshared: set[str] = set()
        self._changed: set[str] = set()

    def begins(self, vm_key: str, header: str, *, index: int = 0, is_attested: bool = False) -> None:
        """Record the start of a poll and the agent's *header*."""
        known = self._here.get(vm_key)
        new = _Polls(
            at=self._clock.monotonic(),
            reported=_read(header),
            open_polls=1 if known is None else known.open_polls + 1,
            received_index=index,
            is_attested=is_attested,
        )
        if known is None or _shared(known) != _shared(new):
            self._note({vm_key})
        self._here[vm_key] = new

    def ends(self, vm_key: str) -> None:
        """Record the end of a poll."""
        known = self._here.get(vm_key)
        if known is not None:
            known.open_polls -= 1
            known.at = self._clock.monotonic()

    def of(self, vm_keys: Iterable[str]) -> dict[str, AgentSeen]:
        """Return the agents of *vm_keys* that have polled.

        Threads other than the event loop also call this method.
        """
        return {key: seen for key in vm_keys if (seen := self._agent_seen(key)) is not None}

    def all(self) -> dict[str, AgentSeen]:
        """Return every agent that has polled within the last day."""
        return self.of(self._keys())

    def reports(self) -> dict[str, tuple[Connection, AgentReport, bool]]:
        """Return the state, header, and `is_attested` of every agent, faster than `all`."""
        found = ((key, self._best(key)) for key in self._keys())
        return {key: (best[0], best[1].reported, best[1].is_attested) for key, best in found if best is not None}

    def take_changes(self) -> set[str]:
        """Return the VMs whose agent has changed since the last call."""
        found, self._changed = self._changed, set()
        return found

    def sweep(self) -> None:
        """Mark agents that have disconnected, and forget them after a day."""
        now = self._clock.monotonic()
        idle = [(key, polls) for key, polls in self._here.items() if not polls.open_polls]
        for key, polls in idle:
            if polls.is_connected and now - polls.at >= _GRACE_SECONDS:
                polls.is_connected = False
                self._note({key})
        away = sorted((polls.at, key) for key, polls in idle if not polls.is_connected)
        for number, (at, key) in enumerate(away):
            if number < len(away) - _MOST_AWAY or now - at >= KEPT_SECONDS:
                del self._here[key]
        for process in self._processes.values():
            state = process.connection(now)
            if state is not process.seen:
                process.seen = state
                self._changed |= process.agents.keys()

    def take_unshared(self) -> list[StoredAgent]:
        """Return the agents of this process that have changed since the last call."""
        keys, self._unshared = self._unshared, set()
        at, now = self._clock.now(), self._clock.monotonic()
        return [
            StoredAgent(
                vm_key=key,
                is_connected=polls.is_connected,
                received_index=polls.received_index,
                body=msgspec.json.encode(_Body(polls.reported, polls.is_attested)).decode(),
                polled_at=format_time(at - timedelta(seconds=now - polls.at)),
            )
            for key in keys
            if (polls := self._here.get(key)) is not None
        ]

    def share_again(self, agents: Iterable[StoredAgent]) -> None:
        """Make the next call of `take_unshared` return *agents*, which were not stored."""
        self._unshared |= {each.vm_key for each in agents}

    def share_all(self) -> None:
        """Make the next call of `take_unshared` return all agents of this process."""
        self._unshared |= self._here.keys()

    def heartbeats(self) -> dict[str, int]:
        """Return the last known heartbeat of each other process."""
        return {name: process.heartbeat for name, process in self._processes.items()}

    def receive(self, heartbeats: Mapping[str, int], changed: Iterable[StoredAgent]) -> None:
        """Add the *changed* agents, and remove the processes that are not in *heartbeats*."""
        now, at = self._clock.monotonic(), self._clock.now()
        for name, heartbeat in heartbeats.items():
            known = self._processes.setdefault(name, _Process(heartbeat=heartbeat, known_at=now))
            if known.heartbeat != heartbeat:
                known.heartbeat, known.alive_at = heartbeat, now
        for name in self._processes.keys() - heartbeats.keys():
            del self._processes[name]
        for each in changed:
            body = _body_of(each.body)
            self._processes[each.process].agents[each.vm_key] = _Polls(
                at=now - (at - parse_time(each.polled_at)).total_seconds(),
                is_connected=each.is_connected,
                received_index=each.received_index,
                reported=body.reported,
                is_attested=body.is_attested,
            )
            self._changed.add(each.vm_key)

    def take_over_stopped(self) -> list[str]:
        """Take over the agents of stopped portal processes. Return these processes."""
        now = self._clock.monotonic()
        stopped = [name for name, each in self._processes.items() if each.connection(now) is Connection.DISCONNECTED]
        for name in stopped:
            for key, polls in self._processes.pop(name).agents.items():
                if key not in self._here:
                    self._here[key] = polls
                    polls.at = now if polls.is_connected else polls.at
                    polls.is_connected = False
                    self._note({key})
        return stopped

    def _note(self, vm_keys: Iterable[str]) -> None:
        self._unshared |= set(vm_keys)
        self._changed |= set(vm_keys)

    def _keys(self) -> list[str]:
        return list(dict.fromkeys([*self._here, *(key for each in self._processes.values() for key in each.agents)]))

    def _best(self, vm_key: str) -> tuple[Connection, _Polls] | None:
        """Return the agent's most connected state, and the newest if several are equal."""
        here, now = self._here.get(vm_key), self._clock.monotonic()
        if here is not None and here.is_connected and (here.open_polls > 0 or now - here.at < _GRACE_SECONDS):
            return Connection.CONNECTED, here
        found = [] if here is None else [(Connection.DISCONNECTED, here)]
        for process, polls in self._elsewhere(vm_key):
            state = process.connection(now) if polls.is_connected else Connection.DISCONNECTED
            if state is Connection.RECONNECTING and here is not None:
                state = Connection.DISCONNECTED  # the agent returned to this process, and left again
            found.append((state, polls))
        return max(found, key=lambda each: (_ORDER.index(each[0]), each[1].at), default=None)

    def _elsewhere(self, vm_key: str) -> list[tuple[_Process, _Polls]]:
        processes = list(self._processes.values())
        return [(each, polls) for each in processes if (polls := each.agents.get(vm_key)) is not None]

    def _agent_seen(self, vm_key: str) -> AgentSeen | None:
        best = self._best(vm_key)
        if best is None:
            return None
        state, newest = best
        indexes = [polls.received_index for _, polls in self._elsewhere(vm_key)]
        return AgentSeen(
            is_connected=state is Connection.CONNECTED,
            is_reconnecting=state is Connection.RECONNECTING,
            **msgspec.structs.asdict(newest.reported),
            received_index=max(newest.received_index, *indexes, 0),
            is_attested=newest.is_attested,
        )


def _shared(polls: _Polls) -> tuple[AgentReport, int, bool, bool]:
    return polls.reported, polls.received_index, polls.is_attested, polls.is_connected


@lru_cache(maxsize=64)  # most agents of a fleet send the same header
def _read(header: str) -> AgentReport:
    try:
        return _reported_of(header[:_MOST_HEADER_CHARACTERS].encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return AgentReport()


@lru_cache(maxsize=64)
def _body_of(text: str) -> _Body:
    return msgspec.json.decode(text, type=_Body)
