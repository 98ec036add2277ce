"""The core compared with a plain list: no failure of the process or the file loses a saved change.

After a kill, the outbox must be as it was after one of the operations since the last confirmed save. The list of these
models is the oracle. Each case ends with SIGKILL, because an orderly close hides missing rows.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from core_process import SINKS, CoreProcess
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

_EVENTS = st.sampled_from(["E-1", "E-2", "E-3"])
_TRANSITIONS = st.sampled_from(["scheduled", "updated", "started", "completed"])
_SINK = st.sampled_from(SINKS)

#: A refused write costs a retry of 0.5 s, so only some examples contain it.
_REFUSING_EXAMPLES = 12
#: The file system cannot show that a file was truncated or overwritten in the milliseconds of a save.
_IN_PLACE = ("truncate", "overwrite", "older written")

#: A kill does not lose what the kernel has, so a file system in memory shows the same, without the waits for a disk.
_MEMORY = Path("/dev/shm")

_process = None


def _shared_process():
    global _process  # noqa: PLW0603
    if _process is None:
        _process = CoreProcess()
    return _process


class CoreMachine(RuleBasedStateMachine):
    """Random operations, disk failures, and kills."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="core-", dir=_MEMORY if _MEMORY.is_dir() else None))
        self.directory = self.root / "state"
        self.directory.mkdir()
        self.core = _shared_process()
        self.models = []
        self.decisions = 0
        self.aside = 0
        self.copy = None
        self.may_refuse = False

    @initialize(choice=st.integers(1, _REFUSING_EXAMPLES))
    def begin(self, choice):
        self.may_refuse = choice == _REFUSING_EXAMPLES // 2  # hypothesis prefers the bounds
        self.core.start(self.directory)
        self._note()
        self.save()

    def teardown(self):
        if self.core.pid:
            self.core.kill()
        shutil.rmtree(self.root, ignore_errors=True)

    # Operations.

    @rule(events=st.lists(st.tuples(_EVENTS, _TRANSITIONS), min_size=1, max_size=4))
    def append(self, events):
        for event in events:
            self.core.ask("append", events=[event])
            self._note()

    @rule(sink=_SINK, state=st.sampled_from(["delivered", "parked", "expired", None]), count=st.integers(1, 3))
    def settle(self, sink, state, count):
        pending = [sequence for sequence, its in self.models[-1]["needed"][sink] if its == "pending"]
        self.core.ask("settle", sink=sink, sequences=pending[:count], state=state)
        self._note()

    @rule(sink=_SINK)
    def retry(self, sink):
        self.core.ask("retry", sink=sink)
        self._note()

    @rule(sink=_SINK)
    def discard(self, sink):
        self.core.ask("discard", sink=sink)
        self._note()

    @rule(verdict=st.sampled_from(["approve", "hold"]))
    def decide(self, verdict):
        self.decisions += 1
        self.core.ask("decide", name=f"jti-{self.decisions}", verdict=verdict)
        self._note()

    @rule()
    def save(self):
        assert self.core.ask("save")
        self.models = self.models[-1:]

    # Failures of the disk.

    @rule()
    def keep_a_copy(self):
        """Copy the files, so that a later rule can put an older copy in place."""
        self.save()
        self.copy = self.root / "copy"
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.directory, self.copy)

    @rule(
        what=st.sampled_from(["delete", "move", "truncate", "overwrite", "older renamed", "older written"]),
        suffixes=st.sampled_from([("",), ("-wal",), ("", "-wal", "-shm")]),
    )
    def damage(self, what, suffixes):
        if what in _IN_PLACE:
            self.save()
        for path in self._files(suffixes):
            self._damage(what, path)
        self.save()

    @rule()
    def delete_directory(self):
        self.aside += 1
        self.directory.rename(self.root / f"aside-{self.aside}")
        self.save()

    @precondition(lambda self: self.may_refuse)
    @rule(how=st.sampled_from(["full", "read-only"]))
    def refuse_writes(self, how):
        self._fail(how)
        self._recover()

    @rule(how=st.sampled_from(["hanging", "slow"]), is_killed=st.booleans())
    def stall_disk(self, how, *, is_killed):
        self._fail(how)
        if is_killed:
            self._kill_and_compare()
        else:
            self._recover()

    @rule(step=st.sampled_from(["created", "written"]))
    def kill_in_new_generation(self, step):
        self.save()
        assert self.core.ask("die_in_new_generation", step=step) == "killed"
        self._restart_and_compare()

    def _fail(self, how):
        self.core.ask("set_disk", how=how)
        self.append([("E-1", "updated")])
        self.core.ask("save", seconds=0.05)

    def _recover(self):
        self.core.ask("set_disk", how="healthy")
        self.save()

    # The kill.

    @rule()
    def kill(self):
        self._kill_and_compare()

    def _kill_and_compare(self):
        self.core.kill()
        self._restart_and_compare()

    def _restart_and_compare(self):
        loaded = self.core.start(self.directory)
        assert _comparable(loaded) in [_comparable(model) for model in self.models]
        self.models = []
        self._note()
        self.save()

    @invariant()
    def totals_add_up(self):
        for accepted, *others in self.models[-1]["totals"].values() if self.models else ():
            assert accepted == sum(others)

    def _note(self):
        self.models.append(self.core.ask("model"))

    def _generations(self):
        return [int(path.stem.split("-")[1]) for path in self.directory.glob("outbox-*.db")]

    def _files(self, suffixes):
        if not self._generations():
            return []
        newest = self.directory / f"outbox-{max(self._generations())}.db"
        paths = [newest.with_name(newest.name + suffix) for suffix in suffixes if suffix != "-shm"]
        return [path for path in paths if path.exists()]

    def _damage(self, what, path):
        self.aside += 1
        if what == "delete":
            path.unlink()
        elif what == "move":
            path.rename(self.root / f"aside-{self.aside}")
        elif what == "truncate":
            os.truncate(path, 0)
        elif what == "overwrite":
            path.write_bytes(os.urandom(max(path.stat().st_size, 4096)))
        elif self.copy is not None and (self.copy / path.name).exists():
            if what == "older renamed":
                shutil.copy(self.copy / path.name, self.root / "older")
                (self.root / "older").rename(path)
            else:
                path.write_bytes((self.copy / path.name).read_bytes())


def _comparable(model):
    """Return *model* without sinks that have no records: a first start adds them after the load."""
    return {**model, "totals": {sink: row for sink, row in model["totals"].items() if row[0]}}


def _run(examples, steps):
    global _process  # noqa: PLW0603
    try:
        run_state_machine_as_test(
            CoreMachine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
    finally:
        if _process is not None:
            _process.close()
            _process = None


@pytest.mark.timeout(600)
def test_core_equals_a_list_after_kills_and_disk_failures():
    _run(200, 12)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_core_equals_a_list_in_many_examples():
    _run(5_000, 20)
