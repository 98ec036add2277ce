"""Prints the way of one document and of one decision through a running agent, file by file.

    python tests/bench/trace_path.py [--calls]

A real agent runs in this process, against a simulated metadata service, a webhook on loopback and a portal with an
Ed25519 key. Every Python call of `bridge` and `sinks` is noted by `sys.setprofile` in each of its threads.

The document is followed from the poll that gets it until the worker stores that the sink took its record; the
decision from the portal's answer until the approver stores what Azure answered to StartRequests. Counted are

- files on the way: those that take part and call on into another. One that answers its caller and calls nobody, as the
  parser of documents does, is printed apart, for it is read when its own question is asked. So is the bottom of the
  house, which any line may call: clock, texts, logs, errors, metrics, `bridge.http`, `bridge.system`, the tables of
  the outbox, and the values that travel, event and record. The sink is one file, where the agent enters it; what
  it does inside is its author's;
- calls that enter a file again: the caller is another file, and the file that is called stands further out on the
  same stack. It was left for a lower layer, and that one calls back into it;
- calls upward: into a file of a higher layer (`layers` in pyproject.toml) than its caller's. Not judged: what is handed
  in from above, as the router is, is called so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

sys.path.append(str(Path(__file__).parents[1] / "kits"))  # where pytest finds what stands there, a script does not

from portal_stub import PortalStub

import bridge
from bridge.agent.agent import Agent
from bridge.config import loader
from bridge.imds.document import parse_document
from bridge.testing import EventSpec, Simulator
from bridge.testing.http_peer import HttpPeer
from bridge.testing.simulator.imds_api import Answer, Request

T = TypeVar("T")

_ROOT = Path(str(bridge.__file__)).parents[1]
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_ASIDE = ("MainThread", "identity", "deadline", "saver", "control")
_STORE_RESULTS = ("record_results", "append_outcomes")
_WAIT_SECONDS = 20.0
_POLL_SECONDS = 1.0
_QUIET_SECONDS = 0.3
#: What any line may call.
_BOTTOM = (
    "bridge/backoff.py",
    "bridge/clock.py",
    "bridge/errors.py",
    "bridge/events/event.py",
    "bridge/events/record.py",
    "bridge/http/",
    "bridge/log",
    "bridge/metrics/",
    "bridge/outbox/state.py",
    "bridge/sink.py",
    "bridge/strict_json.py",
    "bridge/system/",
    "bridge/text.py",
)


@dataclass(frozen=True)
class Call:
    """A call of one file's code, and the files below which it happened, the caller's first."""

    at: float
    thread: str
    file: str
    name: str
    stack: tuple[str, ...]

    @property
    def is_from_another(self) -> bool:
        """Return whether another file called; the first call of a thread comes from none."""
        return bool(self.stack) and self.stack[0] != self.file

    def __str__(self) -> str:
        return f"{self.stack[0] if self.stack else 'thread'} -> {self.file}:{self.name}"


@dataclass(frozen=True)
class Way:
    """What was noted on one way."""

    title: str
    calls: list[Call]
    layers: dict[str, int] = field(repr=False)

    @property
    def files(self) -> list[str]:
        """Return the files that hand it on, and the sink, in the order in which they are entered first."""
        callers = {call.stack[0] for call in self._own if call.stack and call.stack[0] != call.file}
        found = (file for file in self._entered if file in callers or file.startswith("sinks/"))
        # A decision causes a record, whose delivery is a path of its own.
        return [file for file in found if self.title == "document" or not file.startswith("bridge/delivery/")]

    @property
    def leaves(self) -> list[str]:
        """Return the files that answer and call nobody."""
        on_the_way = set(self.files)
        return [file for file in self._entered if file not in on_the_way]

    @property
    def bottom(self) -> list[str]:
        """Return the files of the bottom that were called, by anybody but the sink."""
        called = (call.file for call in self.calls if not _is_inside_the_sink(call))
        return list(dict.fromkeys(file for file in called if file.startswith(_BOTTOM)))

    @property
    def re_entered(self) -> list[str]:
        """Return ``caller -> file:function``, for each call into a file that waits for its caller."""
        found = (call for call in self.calls if call.is_from_another and call.file in call.stack)
        return list(dict.fromkeys(map(str, found)))

    @property
    def upward(self) -> list[str]:
        """Return ``caller -> file:function``, for each call into a layer above the caller's."""
        found = (call for call in self.calls if call.is_from_another and self._is_upward(call))
        return list(dict.fromkeys(map(str, found)))

    @property
    def changes(self) -> int:
        """Return how often a call changes the file."""
        return sum(call.is_from_another for call in self.calls)

    @property
    def _own(self) -> list[Call]:
        return [call for call in self.calls if not call.file.startswith(_BOTTOM) and not _is_inside_the_sink(call)]

    @property
    def _entered(self) -> list[str]:
        entered = (file for call in self._own for file in (*reversed(call.stack), call.file))
        return list(dict.fromkeys(file for file in entered if not file.startswith(_BOTTOM)))

    def _is_upward(self, call: Call) -> bool:
        return self._layer(call.stack[0]) > self._layer(call.file)

    def _layer(self, file: str) -> int:
        """Return the number of the layer of *file*, counted from the top; sinks stand on the sink contract."""
        return self.layers["sink" if file.startswith("sinks/") else Path(file).parts[1].removesuffix(".py")]

    def report(self) -> str:
        """Return what there is to read."""
        whole = len({call.file for call in self.calls})
        counted = f"{len(self.files)} files of {whole} that take part, {len(self.re_entered)} entered again"
        steps = f"{self.changes} of {len(self.calls)} calls change file"
        lines = [f"{self.title}: {counted}, {steps}"]
        lines += [f"  {number:2} {file}" for number, file in enumerate(self.files, 1)]
        for title, entries in (
            ("that answer and call nobody", self.leaves),
            ("at the bottom", self.bottom),
            ("entered again", self.re_entered),
            ("called upward", self.upward),
        ):
            lines += [f"  {title}: {len(entries)}", *(f"     {entry}" for entry in entries)]
        return "\n".join(lines)

    def every_call(self) -> str:
        """Return each call on a line, indented by the depth of its stack."""
        return "\n".join(f"  {call.thread:18}{'. ' * len(call.stack)}{call.file}:{call.name}" for call in self.calls)


def _is_inside_the_sink(call: Call) -> bool:
    return any(file.startswith("sinks/") for file in call.stack)


class Tracer:
    """Notes the calls in every thread that starts while it is installed, but in those that are not on the way."""

    def __init__(self) -> None:
        self._files: dict[str, str | None] = {}
        self._calls: list[Call] = []
        self._skipped: tuple[str, ...] = ()
        self._is_on = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hear of the calls of threads that start from now on."""
        threading.setprofile(self._hear)
        try:
            yield
        finally:
            threading.setprofile(None)

    def follow(
        self,
        title: str,
        begin: Callable[[], object],
        landed_at: Callable[[], float | None],
        *,
        skip: tuple[str, ...],
    ) -> Way:
        """Return the way of what *begin* starts; it ends with the first write begun after *landed_at*.

        Threads whose names begin with one of *skip* do something else meanwhile.
        """
        self._calls, self._skipped = [], skip
        self._is_on = True
        try:
            begin()
            landed = _wait(landed_at)
            end = _wait(lambda: self._end(landed))
        finally:
            self._is_on = False
        calls = [call for call in self._calls if call.at <= end]
        return Way(title, calls, _layers())

    def _end(self, landed_at: float) -> float | None:
        """Return the time of the call that stores the result; None before this call."""
        calls = list(self._calls)
        return next((call.at for call in calls if call.at > landed_at and call.name in _STORE_RESULTS), None)

    def _hear(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self._is_on or event != "call":
            return
        file = self._file(frame)
        if file is None:
            return
        thread = threading.current_thread().name
        if thread.startswith(self._skipped):
            return
        self._calls.append(Call(time.monotonic(), thread, file, frame.f_code.co_name, tuple(self._stack(frame.f_back))))

    def _stack(self, frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            file = self._file(frame)
            if file is not None:
                yield file
            frame = frame.f_back

    def _file(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._files:
            self._files[name] = _of_the_agent(name)
        return self._files[name]


def trace(directory: Path) -> tuple[Way, Way]:
    """Return the ways of a document and of a decision, through agents that keep their state in *directory*."""
    tracer = Tracer()
    with tracer.installed():
        return _document(tracer, directory), _decision(tracer, directory)


def _document(tracer: Tracer, directory: Path) -> Way:
    """Follow a document through an agent that approves nothing."""
    sent: list[float] = []

    def accept(_request: Request) -> Answer:
        sent.append(time.monotonic())
        return Answer(status=200)

    with Simulator(vms=["vm_0"], rate_limit=False) as azure, HttpPeer() as webhook:
        webhook.reply(accept)
        sink = {"type": "webhook", "name": "hook", "url": f"http://{webhook.address.authority}/"}
        with _agent(directory / "watching", azure, sinks=[sink]):
            _wait_for_a_poll(azure)
            return tracer.follow(
                "document", lambda: _announce(azure), lambda: sent[0] if sent else None, skip=("approv", *_ASIDE)
            )


def _decision(tracer: Tracer, directory: Path) -> Way:
    """Follow a decision about an event that the agent has seen and told."""
    with (
        Simulator(vms=["vm_0"], rate_limit=False) as azure,
        PortalStub(directory / "portal", tls=False) as portal,
        _agent(
            directory / "approving",
            azure,
            approval={"remote": {"url": portal.url, "keys": portal.key_tables()}},
            sinks=[{"type": "bridge.testing.sinks:MemorySink", "name": "memory", "box": "trace"}],
        ),
    ):
        _announce(azure)
        (event,) = parse_document(azure.world.document()).events
        portal.wait_for_requests(2)
        _wait_for_a_poll(azure)
        decided_at = _wait_for_a_poll(azure)
        return tracer.follow(
            "decision",
            lambda: portal.decide(event, vm_id=azure.machines[0].vm_id),
            lambda: _request(azure, "POST", after=decided_at),
            skip=("poll", "delivery", "sink", *_ASIDE),
        )


@contextmanager
def _agent(directory: Path, azure: Simulator, **tables: object) -> Iterator[None]:
    imds = {"endpoint": azure.endpoint, "poll_interval_seconds": _POLL_SECONDS}
    agent = Agent(loader.read({"imds": imds, "status": {"listen": ""}, **tables}), directory)
    agent.start()
    try:
        yield
    finally:
        agent.stop()


def _announce(azure: Simulator) -> None:
    azure.world.add_event(EventSpec(event_type="Freeze", on_approval="wait", notice_seconds=36_000))


def _wait_for_a_poll(azure: Simulator) -> float:
    """Return a moment after a poll, so that what follows is not mixed with another; and when that poll came."""
    now = time.monotonic()
    at = _wait(lambda: _request(azure, "GET", after=now))
    time.sleep(_QUIET_SECONDS)
    return at


def _request(azure: Simulator, method: str, *, after: float) -> float | None:
    """Return when the first such request for events came; the simulator's clock is the monotonic one."""
    times = (
        seen.monotonic_seconds for seen in azure.requests if seen.method == method and "scheduledevents" in seen.path
    )
    return next((at for at in times if at > after), None)


def _wait(find: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + _WAIT_SECONDS
    while (found := find()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Nothing came within {_WAIT_SECONDS:g} s.")
        time.sleep(0.001)
    return found


def _of_the_agent(name: str) -> str | None:
    try:
        file = Path(name).relative_to(_ROOT).as_posix()
    except ValueError:
        return None
    is_ours = file.startswith(("bridge/", "sinks/")) and not file.startswith("bridge/testing/")
    return file if is_ours else None


def _layers() -> dict[str, int]:
    """Return module or package -> number of its layer, from the top."""
    contracts = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    rungs = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {name.strip(): number for number, rung in enumerate(rungs) for name in rung.replace("|", ":").split(":")}


def main() -> None:
    """Print both ways."""
    parser = argparse.ArgumentParser(description="Print the way of a document and of a decision through the agent.")
    parser.add_argument("--calls", action="store_true", help="print every call, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for way in trace(Path(directory)):
            print(way.report(), end="\n\n")  # noqa: T201
            if arguments.calls:
                print(way.every_call(), end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main()
