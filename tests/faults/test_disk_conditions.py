"""For each disk condition, the agent keeps polling, loses no records, and approves only saved events.

Each case runs a real agent with a rule that approves every event. Events are announced, begin, and end before, during,
and after the condition. Then the agent is killed with SIGKILL and started again, and the records that the sinks
received are compared with the events. ``pytest -s`` prints the longest poll gap and the highest latency of the healthy
sink. The long form holds each condition for 30 s.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import preload
import pytest
from agent_stage import NOTHING, Stage, judge
from loop_disk import loop_disk
from small_disk import small_disk
from starved import no_descriptors_in, no_threads_in

SHORT_SECONDS, LONG_SECONDS = 2.5, 30.0
MOST_GAP_SECONDS, HANGING_GAP_SECONDS = 2.0, 2.5
MOST_LATENCY_SECONDS = 2.0
#: The delay between two attempts to save grows to 30 s.
SETTLE_SECONDS = 60.0
STOP_SECONDS = 30.0
ANOTHER_AGENT = 73


@dataclass(frozen=True)
class Condition:
    """A condition of the disk. *begin* is a context manager over a `Stage`, for the duration of the condition."""

    name: str
    begin: Callable
    disk: str = "plain"
    is_behind: bool = False
    """True if the agent cannot save records and therefore must not approve events."""
    most_gap_seconds: float = MOST_GAP_SECONDS
    is_killed: bool = False
    """True if the agent is killed during the condition."""

    def __str__(self):
        return self.name


def newest_files(stage):
    """Return the newest file of the outbox and its WAL."""
    newest = stage.newest_file
    return [path for path in (newest, newest.with_name(f"{newest.name}-wal")) if path.exists()]


@contextmanager
def file_changed(change, stage):
    for path in newest_files(stage):
        change(stage, path)
    yield


def delete(_stage, path):
    path.unlink()


def move(stage, path):
    path.rename(stage.directory / path.name)


def truncate(_stage, path):
    os.truncate(path, 0)


def overwrite(_stage, path):
    path.write_bytes(os.urandom(path.stat().st_size))


def write_older_copy(stage, path):
    path.write_bytes((stage.directory / "copy" / path.name).read_bytes())


def rename_older_copy(stage, path):
    shutil.copy(stage.directory / "copy" / path.name, stage.state / "older")
    (stage.state / "older").rename(path)


@contextmanager
def directory_deleted(stage):
    shutil.rmtree(stage.state)
    yield


@contextmanager
def directory_moved(stage):
    stage.state.rename(stage.state.with_name("moved"))
    yield


@contextmanager
def directory_replaced(stage):
    stage.state.rename(stage.state.with_name("moved"))
    stage.state.mkdir(mode=0o700)
    yield


@contextmanager
def frozen(stage):
    stage.disk.freeze()
    yield
    stage.disk.thaw()


@contextmanager
def full(stage):
    stage.disk.fill()
    yield
    stage.disk.free()


@contextmanager
def remounted_read_only(stage):
    stage.disk.break_down()
    yield
    stage.process.wait(STOP_SECONDS)
    stage.disk.repair()


@contextmanager
def fault(names, stage):
    """Enable faults of the LD_PRELOAD library. ``deleted`` in *names* deletes the files, to require a new file."""
    for name in names:
        if name == "deleted":
            for path in newest_files(stage):
                path.unlink()
        else:
            (stage.directory / "faults" / name).touch()
    yield
    for path in (stage.directory / "faults").iterdir():
        path.unlink()


@contextmanager
def small_volume(stage):
    """Deliver more records than the volume can hold."""
    stage.waiting.accepts = True
    for batch in range(4):
        names = [f"H-{batch}-{number}" for number in range(40)]
        for name in names:
            stage.azure.begin(name, Description="x" * 4000)
        stage.wait_for_records(stage.waiting)
        stage.azure.end(*names)
        stage.wait_until_settled()
    stage.wait_for_records(stage.waiting)
    stage.waiting.accepts = False
    yield


@contextmanager
def no_descriptors(stage):
    with no_descriptors_in(stage.pid):
        yield


@contextmanager
def no_threads(stage):
    with no_threads_in(stage.pid):
        yield


@contextmanager
def no_descriptors_for_a_new_file(stage):
    with no_descriptors_in(stage.pid), file_changed(delete, stage):
        yield


CONDITIONS = [
    Condition("the file is deleted", partial(file_changed, delete)),
    Condition("the file is moved", partial(file_changed, move)),
    Condition("the file is truncated", partial(file_changed, truncate)),
    Condition("the file is overwritten with garbage", partial(file_changed, overwrite)),
    Condition("an older copy is written into the file", partial(file_changed, write_older_copy)),
    Condition("an older copy replaces the file", partial(file_changed, rename_older_copy)),
    Condition("the directory is deleted", directory_deleted),
    Condition("the directory is moved", directory_moved),
    Condition("the directory is replaced", directory_replaced),
    Condition("the file system is frozen", frozen, disk="loop", is_behind=True, most_gap_seconds=HANGING_GAP_SECONDS),
    Condition(
        "the file system is frozen at the kill",
        frozen,
        disk="loop",
        is_behind=True,
        most_gap_seconds=HANGING_GAP_SECONDS,
        is_killed=True,
    ),
    Condition("the disk is full, and then has free space", full, disk="tmpfs", is_behind=True),
    Condition("the disk is full at the kill", full, disk="tmpfs", is_behind=True, is_killed=True),
    Condition("remounted read-only", remounted_read_only, disk="loop", is_behind=True, is_killed=True),
    Condition("read-only, and then writable", partial(fault, ["readonly"]), disk="preload", is_behind=True),
    Condition("EIO on each write", partial(fault, ["write"]), disk="preload", is_behind=True),
    Condition("EIO on each fsync", partial(fault, ["fsync"]), disk="preload", is_behind=True),
    Condition("EIO on each open", partial(fault, ["open", "deleted"]), disk="preload", is_behind=True),
    Condition(
        "each commit is 3 s late",
        partial(fault, ["slow"]),
        disk="preload",
        is_behind=True,
        most_gap_seconds=HANGING_GAP_SECONDS,
    ),
    Condition("a volume of 2 MiB", small_volume, disk="volume"),
    Condition("no descriptors", no_descriptors),
    Condition("no descriptors for a new file", no_descriptors_for_a_new_file, is_behind=True),
    Condition("no threads", no_threads),
]


@contextmanager
def staged(condition, tmp_path, env, tmp_path_factory):
    """Return a stage on the disk that *condition* needs."""
    if condition.disk == "loop":
        with loop_disk(tmp_path / "disk") as disk, opened(tmp_path, env, disk) as stage:
            yield stage
    elif condition.disk in ("tmpfs", "volume"):
        with (
            small_disk(tmp_path / "disk", 2 if condition.disk == "volume" else 8) as disk,
            opened(tmp_path, env, disk) as stage,
        ):
            yield stage
    elif condition.disk == "preload":
        (tmp_path / "faults").mkdir()
        library = preload.built(tmp_path_factory, preload.FAULTS)
        faults = {"FAULTS": str(tmp_path / "faults"), "FAULT_ROOT": str(tmp_path / "state")}
        with opened(tmp_path, {**env, **faults}, None, preload=library) as stage:
            yield stage
    else:
        with opened(tmp_path, env, None) as stage:
            yield stage


@contextmanager
def opened(directory, env, disk, **options):
    state = directory / "state" if disk is None else disk.path / "state"
    stage = Stage(directory, env, state=state, **options)
    stage.disk = disk
    try:
        yield stage
    finally:
        if disk is not None and hasattr(disk, "thaw"):
            disk.thaw()  # A frozen file system blocks the kill of the agent.
        stage.close()


def run(stage, condition, seconds):
    """Apply *condition* for *seconds*. Return (longest poll gap, latency of the healthy sink)."""
    stage.start()
    stage.wait_until_settled()
    shutil.copytree(stage.state, stage.directory / "copy", ignore=shutil.ignore_patterns("*.sock", "*-shm"))
    for _ in range(4):
        stage.change()
    stage.wait_until_settled()
    began = time.monotonic()
    with condition.begin(stage):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            stage.change(with_endings=not condition.is_killed)
            time.sleep(seconds / 10)
        stage.wait(lambda: not missing_changes(stage), 5.0)
        gap, latency = stage.azure.longest_gap(began), latency_of(stage, began)
        if condition.is_behind:
            assert stage.azure.approved(since=began) == set()
        if condition.is_killed:
            stage.process.kill()  # The process ends when its system calls return.
    if condition.is_killed:
        stage.process.wait(STOP_SECONDS)
        stage.start()
    healed = time.monotonic()
    stage.change()
    stage.wait_until_settled(SETTLE_SECONDS)
    return max(gap, stage.azure.longest_gap(healed)), latency


def latency_of(stage, since):
    """Return the highest latency of the healthy sink, without the bulk events that fill a small volume."""
    changes = {key: at for key, at in stage.azure.changed_at.items() if key[0].startswith("E-")}
    return stage.healthy.latency(changes, since)


def missing_changes(stage):
    """Return the changes that the healthy sink has not received, without endings, which take five polls."""
    return {key for key in stage.missing(stage.healthy) if key[1] in ("scheduled", "started")}


def kill_and_compare(stage):
    """Kill the agent, start it again, and compare the records of both sinks with the events."""
    stage.kill()
    stage.waiting.accepts = True
    stage.start()
    stage.change()
    stage.wait_until_settled()
    stage.wait_for_records(stage.waiting)
    for receiver in (stage.healthy, stage.waiting):
        assert judge(stage.expected(), receiver.records) == NOTHING
    assert stage.unsaved_approvals == []
    assert "Traceback" not in stage.log, stage.log


@pytest.mark.parametrize(
    "seconds", [SHORT_SECONDS, pytest.param(LONG_SECONDS, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_agent_survives_disk_condition(condition, seconds, tmp_path, agent_env, tmp_path_factory):
    with staged(condition, tmp_path, agent_env, tmp_path_factory) as stage:
        gap, latency = run(stage, condition, seconds)
        report(condition.name, gap, latency)
        kill_and_compare(stage)
        assert gap < condition.most_gap_seconds
        assert latency < MOST_LATENCY_SECONDS


def report(name, gap, latency):
    print(f"\n{name:<45} longest poll gap {gap:.2f} s, healthy sink {latency:.2f} s", end="")  # noqa: T201


def test_agent_exits_if_another_agent_takes_over_the_state_directory(tmp_path, agent_env):
    with opened(tmp_path, agent_env, None) as stage:
        stage.start()
        stage.change(with_endings=False)
        stage.wait_until_settled()
        first = stage.process
        first.send_signal(signal.SIGSTOP)  # Otherwise, this agent could lock the new directory first.
        stage.state.rename(stage.state.with_name("moved"))
        stage.start()
        began = time.monotonic()
        first.send_signal(signal.SIGCONT)
        assert first.wait(10) == ANOTHER_AGENT
        for _ in range(3):
            stage.change(with_endings=False)
        stage.wait_until_settled()
        gap, latency = stage.azure.longest_gap(began), latency_of(stage, began)
        report("the directory is replaced by another agent", gap, latency)
        kill_and_compare(stage)
        assert gap < MOST_GAP_SECONDS
        assert latency < MOST_LATENCY_SECONDS
