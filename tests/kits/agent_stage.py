"""One VM under test: its metadata service, two webhooks, and its agent as a process.

The metadata service notes when it was polled and what was approved. The webhook ``healthy`` accepts every record. The
webhook ``waiting`` refuses every record until `Receiver.accepts` is set, so the outbox must keep its records: what it
gets after a kill is what the outbox had saved.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import fork_server

from bridge.agent.control_requests import why_unsaved
from bridge.agent.control_socket import ControlClient
from bridge.clock import format_time, utc_now
from bridge.errors import BridgeError
from bridge.events.record import decode_record
from bridge.outbox.database import read_newest
from bridge.testing.simulator.http_server import Connection, HttpServer
from bridge.testing.simulator.imds_api import Answer, Request

POLL_SECONDS = 0.2
APPROVE_ALL = '[[approval.rules]]\nname = "all"\naction = "approve"\nresources = "any"\nact = "each"\n'
_WAIT_SECONDS = 40.0

Key = tuple[str, str]
"""An EventId and a transition."""


class Azure:
    """A metadata service with the given events."""

    def __init__(self) -> None:
        self.incarnation = 1
        self.events: dict[str, dict[str, Any]] = {}
        self.changed_at: dict[Key, float] = {}
        """When each expected transition was shown first, in monotonic seconds."""
        self.polled_at: list[float] = []
        self.posted: list[tuple[str, float]] = []
        self.on_approval: Callable[[str], None] = lambda _event_id: None
        self.identity: Answer | None = Answer(body=b'{"name": "vm_0", "vmId": "AAAA"}')
        """If this is None, requests for the identity get no response."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._not_before = format_datetime(datetime.now(timezone.utc) + timedelta(days=2), usegmt=True)
        self._server = HttpServer(("127.0.0.1", 0), self._respond, self._stop)
        self._server.start()
        self.endpoint = self._server.endpoint

    def close(self) -> None:
        self._server.close()

    def announce(self, event_id: str, **fields: Any) -> None:
        self._set(event_id, "scheduled", EventStatus="Scheduled", **fields)

    def begin(self, event_id: str, **fields: Any) -> None:
        self._set(event_id, "started", EventStatus="Started", NotBefore="", **fields)

    def end(self, *event_ids: str) -> None:
        """Remove events. Started events are completed."""
        with self._lock:
            self.incarnation += 1
            for event_id in event_ids:
                began = self.events.pop(event_id)["EventStatus"] == "Started"
                self.changed_at[event_id, "completed" if began else "canceled"] = time.monotonic()

    def _set(self, event_id: str, transition: str, **fields: Any) -> None:
        with self._lock:
            self.incarnation += 1
            known = self.events.get(event_id) or {
                "EventId": event_id,
                "EventType": "Freeze",
                "ResourceType": "VirtualMachine",
                "Resources": ["vm_0", f"vm_of_{event_id}"],
                "NotBefore": self._not_before,
                "EventSource": "Platform",
                "DurationInSeconds": 5,
            }
            self.events[event_id] = {**known, **fields}
            self.changed_at[event_id, transition] = time.monotonic()

    def _respond(self, connection: Connection, request: Request) -> None:
        if not request.path.endswith("scheduledevents"):
            if self.identity is None:
                self._stop.wait()
                connection.close_connection = True
            else:
                connection.write(self.identity)
            return
        if request.method == "POST":
            for event_id in (each["EventId"] for each in json.loads(request.body)["StartRequests"]):
                self.posted.append((event_id, time.monotonic()))
                self.on_approval(event_id)
            connection.write(Answer(body=b""))
            return
        with suppress(ConnectionError):
            connection.write(Answer(body=self.document()))
        self.polled_at.append(time.monotonic())

    def document(self) -> bytes:
        """Return the current document."""
        with self._lock:
            body = {"DocumentIncarnation": self.incarnation, "Events": list(self.events.values())}
        return json.dumps(body).encode()

    def longest_gap(self, since: float) -> float:
        """Return the longest time between two polls, and up to now, since the monotonic time *since*."""
        polls = [since, *(at for at in self.polled_at if at > since), time.monotonic()]
        return max(later - earlier for earlier, later in pairwise(polls))

    def approved(self, since: float = 0.0) -> set[str]:
        """Return the events that were approved since the monotonic time *since*."""
        return {event_id for event_id, at in list(self.posted) if at > since}


class Receiver:
    """A webhook that keeps every accepted record with its arrival time."""

    def __init__(self) -> None:
        self.accepts = True
        self.arrivals: list[tuple[float, dict[str, Any]]] = []
        self._server = HttpServer(("127.0.0.1", 0), self._respond, threading.Event())
        self._server.start()
        self.url = self._server.endpoint

    def close(self) -> None:
        self._server.close()

    def _respond(self, connection: Connection, request: Request) -> None:
        if self.accepts:
            self.arrivals.append((time.monotonic(), json.loads(request.body)["data"]))
        with suppress(ConnectionError):
            connection.write(Answer(status=200 if self.accepts else 503))

    @property
    def records(self) -> list[dict[str, Any]]:
        return [record for _, record in list(self.arrivals)]

    def transitions(self) -> set[Key]:
        """Return the transitions of events that arrived."""
        return {key_of(record) for record in self.records if record["event"] is not None}

    def latency(self, changed_at: Mapping[Key, float], since: float) -> float:
        """Return the longest time from a change to its first arrival, for changes after *since* that count at once."""
        first: dict[Key, float] = {}
        for at, record in reversed(self.arrivals):
            first[key_of(record)] = at
        counted = {key: at for key, at in changed_at.items() if at > since and key[1] in ("scheduled", "started")}
        return max((first[key] - at for key, at in counted.items()), default=0.0)


class Stage:
    """The VM and its agent. The state directory is *state*, by default a directory in *directory*.

    With *preload*, a library for LD_PRELOAD, the agent gets the variables of *env* as well.
    """

    def __init__(
        self,
        directory: Path,
        env: Mapping[str, str],
        *,
        state: Path | None = None,
        preload: Path | None = None,
        approval: str = f"[approval]\n{APPROVE_ALL}",
    ) -> None:
        self.directory, self.env, self.preload = directory, dict(env), preload
        self.state = state or directory / "state"
        self.azure, self.healthy, self.waiting = Azure(), Receiver(), Receiver()
        self.waiting.accepts = False
        self.config = directory / "config.toml"
        self.err = directory / "err.log"
        self.configure(approval)
        self.process: fork_server.Process | None = None
        self.unsaved_approvals: list[str] = []
        """Events whose approval was posted before it was in the file."""
        self.azure.on_approval = self._look_into_the_file
        self._number = 0

    def configure(self, approval: str) -> None:
        hooks = [("healthy", self.healthy), ("waiting", self.waiting)]
        sinks = [f'[[sinks]]\ntype = "webhook"\nname = "{name}"\nurl = "{hook.url}/"\n' for name, hook in hooks]
        self.config.write_text(
            f'[imds]\nendpoint = "{self.azure.endpoint}"\npoll_interval_seconds = {POLL_SECONDS}\n'
            f'[state]\ndirectory = "{self.state}"\n[status]\nlisten = ""\n{"".join(sinks)}{approval}'
        )

    @property
    def newest_file(self) -> Path:
        """Return the newest file of the outbox."""
        return max(self.state.glob("outbox-*.db"), key=lambda path: int(path.stem.split("-")[1]))

    # The agent.

    def start(self, **env: str) -> Stage:
        self.process = self.new_agent(**env)
        polls = len(self.azure.polled_at)
        self.wait(lambda: len(self.azure.polled_at) > polls + 1)
        return self

    def new_agent(self, **env: str) -> fork_server.Process:
        """Start another agent with the same configuration."""
        words = ("run", "--config", str(self.config))
        env = {**self.env, **env}
        with self.err.open("ab") as log, open(os.devnull, "r+b") as nothing:  # noqa: PTH123  # no Path
            if self.preload is None:
                return fork_server.start(*words, stdout=nothing, stderr=log, env=env, cwd=self.directory)
            command = [sys.executable, "-m", "bridge", *words]
            env["LD_PRELOAD"] = str(self.preload)
            return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=log, env=env, cwd=self.directory)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for each in (self.azure, self.healthy, self.waiting):
            each.close()

    def wait(self, condition: Callable[[], object], seconds: float = _WAIT_SECONDS, *, message: str = "") -> None:
        """Wait until *condition* is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            code = None if self.process is None else self.process.poll()
            assert code is None, f"The agent ended with {code}.\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, f"{message or 'The condition stayed false.'}\n{self.log[-3000:]}"
            time.sleep(0.02)

    @property
    def log(self) -> str:
        return self.err.read_text()

    def is_saved(self) -> bool:
        """Return whether the agent reports that everything is saved."""
        try:
            return ControlClient(self.state, seconds=2.0).ask(why_unsaved) is None
        except BridgeError:
            return False

    # Events.

    def change(self, *, with_endings: bool = True) -> None:
        """Announce another event; with *with_endings*, also begin or end an older one. Wait until it was polled."""
        self._number += 1
        if with_endings and self._number % 3 == 0:
            events, approved = list(self.azure.events.items()), self.azure.approved()
            self.azure.end(*(event_id for event_id, event in events if event["EventStatus"] == "Started"))
            # The approval of an event that begins before it is approved would be refused.
            scheduled = (event_id for event_id, event in events if event["EventStatus"] == "Scheduled")
            for event_id in [each for each in scheduled if each in approved][:1]:
                self.azure.begin(event_id)
        self.azure.announce(f"E-{self._number}")
        self.wait_for_polls()

    def wait_for_polls(self, count: int = 2, seconds: float = 5.0) -> None:
        wanted = len(self.azure.polled_at) + count
        self.wait(lambda: len(self.azure.polled_at) >= wanted, seconds, message="The agent stopped polling.")

    def wait_until_settled(self, seconds: float = _WAIT_SECONDS) -> None:
        """Wait until the healthy sink has every record, every open event is approved, and everything is saved."""
        self.wait_for_records(self.healthy, seconds)
        self.wait(self.is_saved, seconds, message="The outbox is not saved.")

    def wait_for_records(self, receiver: Receiver, seconds: float = _WAIT_SECONDS) -> None:
        """Wait until *receiver* has every expected record."""
        deadline = time.monotonic() + seconds
        while missing := self.missing(receiver):
            assert time.monotonic() < deadline, f"These records are missing: {missing}\n{self.log[-3000:]}"
            time.sleep(0.02)

    def expected(self) -> set[Key]:
        """Return every transition that must have a record: all changes, and each posted approval."""
        is_open = {event_id for event_id, event in self.azure.events.items() if event["EventStatus"] == "Scheduled"}
        approvals = self.azure.approved() | (is_open if self.has_approvals else set())
        return {*self.azure.changed_at, *((event_id, "approved") for event_id in approvals)}

    @property
    def has_approvals(self) -> bool:
        return APPROVE_ALL in self.config.read_text()

    def missing(self, receiver: Receiver) -> set[Key]:
        return self.expected() - receiver.transitions()

    def _look_into_the_file(self, event_id: str) -> None:
        """Check the state that a start after a kill at this moment would load."""
        with tempfile.TemporaryDirectory() as copy:
            for path in self.state.glob("outbox-*.db*"):
                if not path.name.endswith("-shm"):
                    with suppress(OSError):
                        shutil.copy(path, copy)
            rows = read_newest(Path(copy)).rows.get("approvals", [])
        if not any(row.event_id == event_id and row.attempts for row in rows):
            self.unsaved_approvals.append(event_id)


def key_of(record: Mapping[str, Any]) -> Key:
    """Return the transition of *record*. After a restart, an agent may only know that a canceled event ended."""
    transition = "canceled" if record["transition"] == "ended" else record["transition"]
    return ("" if record["event"] is None else record["event"]["event_id"], transition)


NOTHING: dict[str, list[Key]] = {"lost": [], "invented": [], "two ids": [], "shared ids": []}
"""The result of `judge` without errors."""


def judge(expected: Iterable[Key], records: Iterable[Mapping[str, Any]]) -> dict[str, list[Key]]:
    """Return the transitions that are lost, invented, or have two IDs; and IDs of two transitions."""
    ids: dict[Key, set[str]] = {}
    for record in records:
        ids.setdefault(key_of(record), set()).add(record["id"])
    wanted = set(expected)
    owners = Counter(each for found in ids.values() for each in found)
    return {
        "lost": sorted(wanted - ids.keys()),
        "invented": sorted(ids.keys() - wanted),
        "two ids": sorted(key for key, found in ids.items() if len(found) > 1),
        "shared ids": sorted(key for key, found in ids.items() if any(owners[each] > 1 for each in found)),
    }


def sum_of_chains(
    run: Callable[[Path, int], Mapping[str, int]], directory: Path, *, chains: int, at_once: int
) -> Counter[str]:
    """Call *run* for *chains* agents, each with a directory and a random seed. Return the summed counts."""

    def one(number: int) -> Counter[str]:
        home = directory / f"chain{number}"
        home.mkdir()
        return Counter(run(home, random.SystemRandom().randrange(2**32)))

    with ThreadPoolExecutor(at_once) as pool:
        return sum(pool.map(one, range(chains)), Counter())


def open_in_fold(records: Iterable[Mapping[str, Any]]) -> set[str] | None:
    """Return the EventIds of the events that the portal shows as open; None without the portal's libraries."""
    if importlib.util.find_spec("sqlalchemy") is None:
        return None
    from fold_kit import add, all_events  # noqa: PLC0415  # not without the portal's libraries

    from bridge.portal.store.database import Store  # noqa: PLC0415  # not without the portal's libraries

    with tempfile.TemporaryDirectory() as directory:
        store = Store.of_file(Path(directory) / "portal.db")
        try:
            store.migrate()
            decoded = [decode_record(json.dumps(record).encode()) for record in records]
            if decoded:
                add(store, *decoded, at=format_time(utc_now()))
            return {each.event.event_id or "" for each in all_events(store).values() if each.is_open}
        finally:
            store.close()
