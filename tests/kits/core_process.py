"""An `Outbox` in a separate process, which a test can kill at any point.

Run as a program, it reads one JSON command per line. ``start`` forks a child that opens the outbox and executes all
further commands until it is killed. Forking from a process without threads makes a start cost milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outbox_kit import OutboxKit, RouteAll, stored_decision

from bridge.clock import REAL_CLOCK
from bridge.events.record import Verdict
from bridge.outbox import approvals, deliveries
from bridge.outbox.database import Database
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import DeliveryState
from bridge.outbox.state import Changes, State

SINKS = ("a", "b")


class CoreProcess:
    """Starts, commands, and kills the process."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__))]
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env
        )
        self.pid = 0

    def start(self, directory: Path) -> dict[str, Any]:
        """Open the outbox in *directory*; return its model as loaded."""
        answer = self.ask("start", directory=str(directory))
        self.pid = answer["pid"]
        return dict(answer["model"])

    def ask(self, op: str, **arguments: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        answer = self._server.stdout.readline()
        assert answer, "The process ended."
        value = json.loads(answer)
        if value == "killed":
            self.pid = 0
        return value

    def kill(self) -> None:
        """Kill the outbox with SIGKILL, but not the server."""
        assert self._server.stdout is not None
        os.kill(self.pid, signal.SIGKILL)
        assert json.loads(self._server.stdout.readline()) == "killed"
        self.pid = 0

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._server.kill()
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()


def model_of(state: State) -> dict[str, Any]:
    """Return what must survive a kill, as plain lists."""
    return {
        "needed": {
            sink: sorted([row.sequence, row.state.value] for row in deliveries.needed_records(state, sink, _NEEDED))
            for sink in SINKS
        },
        "totals": {
            sink: [row.accepted, row.delivered, row.pending, row.parked, row.expired, row.evicted, row.discarded]
            for sink, row in state.sinks.rows.items()
        },
        "decisions": sorted(each.decision_id for each in approvals.open_decisions(state)),
        "next_sequence": state.next_sequence,
        "counts": sorted([event.key, sum(event.counts.values())] for event in state.events.rows.values()),
    }


_NEEDED = (DeliveryState.PENDING, DeliveryState.PARKED)


class _Child:
    """Executes commands on an outbox."""

    def __init__(self, directory: Path) -> None:
        self._kit = OutboxKit(directory)
        self._disk = "healthy"
        # A bound method would not receive the database.
        Database.save = lambda database, changes: self._save(database, changes)  # type: ignore[assignment, method-assign]  # noqa: PLW0108
        self._outbox: Outbox = self._kit.open(sinks=())
        self.loaded = self._outbox.read(model_of)
        self._kit.time = REAL_CLOCK.now()
        self._configure()

    def _configure(self) -> None:
        self._outbox.configure(RouteAll(*SINKS), SINKS, labels={})

    def append(self, events: list[list[str]]) -> None:
        for event_id, transition in events:
            status = "Started" if transition == "started" else "Scheduled"
            self._kit.commit(self._outbox, self._kit.event(event_id, status=status), transition=transition, save=False)

    def settle(self, sink: str, sequences: list[int], state: str | None) -> None:
        self._kit.settle(self._outbox, sink, *sequences, state=state)

    def retry(self, sink: str) -> None:
        self._outbox.change(deliveries.retry, sink, now=0.0)

    def discard(self, sink: str) -> None:
        self._outbox.change(deliveries.discard, sink, states=_NEEDED[1:], record_id=None, now=0.0)

    def decide(self, name: str, verdict: str) -> None:
        decision = stored_decision(name, Verdict(verdict), issued_at=2**60)
        self._outbox.change(approvals.keep_decisions, [decision])

    def save(self, seconds: float = 30.0) -> bool:
        return self._outbox.wait_saved(seconds)

    def model(self) -> dict[str, Any]:
        return self._outbox.read(model_of)

    def set_disk(self, how: str) -> None:
        """Let saves fail, hang, or take long, as on a disk that is full, read-only, hanging, or slow."""
        self._disk = how

    def die_in_new_generation(self, step: str) -> None:
        """Kill this process when the file of a new generation is *created* (without rows) or *written*."""
        assert self._outbox.saver.file is not None
        self._disk = step
        os.utime(self._outbox.saver.file)
        self._outbox.wait_saved(30.0)

    def _save(self, database: Database, changes: Changes) -> None:
        if self._disk in _REFUSALS:
            raise sqlite3.OperationalError(_REFUSALS[self._disk])
        if self._disk == "created":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._disk == "slow":
            time.sleep(_SLOW_SECONDS)
        while self._disk == "hanging":
            time.sleep(_TICK_SECONDS)
        _real_save(database, changes)
        if self._disk == "written":
            os.kill(os.getpid(), signal.SIGKILL)


_REFUSALS = {"full": "database or disk is full", "read-only": "attempt to write a readonly database"}
_SLOW_SECONDS, _TICK_SECONDS = 0.2, 0.01
_real_save = Database.save


def _serve() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(command)
            os._exit(0)
        os.waitpid(pid, 0)
        _answer("killed")


def _child(command: dict[str, Any]) -> None:
    child = _Child(Path(command["directory"]))
    _answer({"pid": os.getpid(), "model": child.loaded})
    while line := sys.stdin.readline():
        command = json.loads(line)
        _answer(getattr(child, command.pop("op"))(**command))


def _answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # One byte at a time would be slow, and a buffered read would take the child's lines away from the next child.
    sys.stdin = open(0, buffering=1, closefd=False)  # noqa: SIM115
    _serve()
