"""A disk that hangs: it gives no error, the call just does not return. Frozen as a backup does it."""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import wait

import outbox_kit
import preload
import pytest

from bridge.events.event import Document
from bridge.outbox import deliveries, meta
from bridge.outbox.locks import is_in_memory
from bridge.outbox.reader import OutboxFile

BOUND_SECONDS = 6.0
"""A commit has 2 s; the rest is for a busy machine."""


class FrozenDisk:
    """A file system in a file, which can be frozen and thawed."""

    def __init__(self, path):
        self.path = path
        self.is_frozen = False
        self._thaw_later = None
        image = path.with_name("image")
        path.mkdir()
        with image.open("wb") as file:
            file.truncate(48 * 1024 * 1024)
        self.is_mounted = all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze"))) and all(
            subprocess.run(command, check=False, capture_output=True).returncode == 0
            for command in (["mkfs.ext4", "-q", "-F", image], ["mount", "-o", "loop", image, path])
        )
        if self.is_mounted and not (self.freeze() and self.thaw()):
            self.unmount()

    def freeze(self):
        # A process that hangs on a frozen disk cannot even be killed: it thaws by itself, whatever happens here.
        self._thaw_later = subprocess.Popen(["sh", "-c", 'sleep 40; fsfreeze -u "$0"', self.path])
        self.is_frozen = subprocess.run(["fsfreeze", "-f", self.path], check=False, timeout=30).returncode == 0
        return self.is_frozen

    def thaw(self):
        if self._thaw_later is not None:
            self._thaw_later.kill()
            self._thaw_later.wait()
            self._thaw_later = None
        done = subprocess.run(["fsfreeze", "-u", self.path], check=False, timeout=30)
        self.is_frozen = False
        return done.returncode == 0

    def unmount(self):
        if self.is_frozen:
            self.thaw()
        if self.is_mounted:
            subprocess.run(["umount", "-l", self.path], check=True)
            self.is_mounted = False


@pytest.fixture
def disk(tmp_path, kit):
    """Return a disk that can be frozen, with the outbox's directory on it."""
    disk = FrozenDisk(tmp_path / "disk")
    if not disk.is_mounted:
        pytest.skip("Only root can mount and freeze a file system, with mkfs.ext4 and fsfreeze.")
    kit.directory = disk.path / "state"
    try:
        yield disk
        if disk.is_frozen:
            disk.thaw()
        kit.close()
    finally:
        disk.unmount()


def until_on_disk(outbox, seconds=20.0):
    end = time.monotonic() + seconds
    while outbox.in_memory and time.monotonic() < end:
        outbox.tend().result(30)
        time.sleep(0.05)
    assert not outbox.in_memory


def test_a_frozen_disk_keeps_nothing_back_and_has_all_of_it_when_it_thaws(kit, disk, caplog):
    outbox, told = kit.open(), []
    outbox.on_memory = lambda: told.append(outbox.in_memory)
    kit.fill(outbox, 5)
    kit.settle(outbox, "a", 1, 2)
    stream_id = outbox.read(meta.load).result().stream_id
    observations = [kit.observation(outbox, kit.event(f"E-{number}"), document=Document()) for number in range(3)]
    disk.freeze()
    began = time.monotonic()
    written = [outbox.write(outbox.records.append_observation, each) for each in observations]
    assert not wait(written, BOUND_SECONDS).not_done
    assert time.monotonic() - began >= 1.5
    records = [future.result()[0] for future in written]
    assert [record.sequence for record in records] == [6, 7, 8]
    assert outbox.in_memory
    assert told == [True]
    assert "The disk under the outbox refuses" in caplog.text
    # What is seen and sent meanwhile does not wait.
    began = time.monotonic()
    later = kit.commit(outbox, kit.event("E-9", event_type="Preempt"), document=Document())[0]
    assert kit.due(outbox, "a")[0] == later.sequence
    kit.settle(outbox, "a", 3, later.sequence)
    outbox.tend().result(5)
    assert time.monotonic() - began < BOUND_SECONDS / 2
    assert outbox.in_memory
    assert is_in_memory(kit.directory)
    disk.thaw()
    until_on_disk(outbox)
    assert kit.due(outbox, "a") == [4, 5, 6, 7, 8]
    assert kit.due(outbox, "b") == [9, *range(1, 9)]
    rows = outbox.read(deliveries.due, "b", limit=99).result()
    assert len({row.record.id for row in rows}) == 9
    assert {row.record.stream_id for row in rows} == {stream_id}
    for totals in kit.totals(outbox).values():
        assert totals["accepted"] == totals["pending"] + totals["delivered"] == 9
    outbox.close()
    outbox = kit.open()
    assert (kit.due(outbox, "a"), outbox.read(meta.load).result().stream_id) == ([4, 5, 6, 7, 8], stream_id)
    assert list(kit.directory.glob("outbox.db.*")) == []
    assert kit.commit(outbox, kit.event("after"), document=Document())[0].sequence == 10


def test_a_disk_that_freezes_right_after_a_commit_holds_nothing_back_for_long(kit, disk):
    """To begin a transaction writes to the -shm, unless somebody has read since the last commit."""
    outbox = kit.open(sinks=("a",))
    kit.fill(outbox, 1)
    later = kit.observation(outbox, kit.event("F-0", status="Started"), document=Document())
    kit.settle(outbox, "a", 1)
    disk.freeze()
    record = outbox.write(outbox.records.append_observation, later).result(BOUND_SECONDS)[0]
    assert outbox.in_memory
    assert record.sequence in kit.due(outbox)  # what the disk has could be read: nothing waits for it


@pytest.mark.long
def test_a_disk_that_freezes_again_and_again_loses_nothing(kit, disk):
    outbox = kit.open(sinks=("a",))
    expected = []
    for turn in range(2):
        expected += [record.sequence for record in kit.fill(outbox, 2, size=turn)]
        observation = kit.observation(outbox, kit.event(f"E-{turn}"), document=Document())
        disk.freeze()
        expected += [
            record.sequence
            for record in outbox.write(outbox.records.append_observation, observation).result(BOUND_SECONDS)
        ]
        assert outbox.in_memory
        disk.thaw()
        until_on_disk(outbox)
    assert kit.due(outbox) == expected == [1, 2, 3, 4, 5, 6]


# Without a file system of its own: what is written is there, but nothing makes it durable.

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
static int sync_by(const char *name, int descriptor) {
    while (access(getenv("HANG_WHILE"), F_OK) == 0) usleep(10000);
    if (getenv("SYNC_MILLISECONDS")) usleep(atoi(getenv("SYNC_MILLISECONDS")) * 1000);
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(descriptor);
}
int fsync(int descriptor) { return sync_by("fsync", descriptor); }
int fdatasync(int descriptor) { return sync_by("fdatasync", descriptor); }
"""

#: Commits one record before, three while and one after nothing can be made durable, and prints what came of it.
LIVE = """
import json, os, runpy, sys, time
from pathlib import Path
from bridge.events.event import Document
from bridge.outbox import deliveries
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
hang = Path(os.environ["HANG_WHILE"])
outbox = kit.open()
records = kit.fill(outbox, int(sys.argv[3]), size=4000)
observation = kit.observation(outbox, kit.event("E-1"), document=Document())
hang.touch()
records += outbox.write(outbox.records.append_observation, observation).result(20)
in_memory = outbox.in_memory
records += kit.commit(outbox, kit.event("E-2"), kit.event("E-1"), document=Document())
kit.settle(outbox, "a", records[-1].sequence)
hang.unlink()
end = time.monotonic() + 20
while outbox.in_memory and time.monotonic() < end:
    outbox.tend().result()
    time.sleep(0.05)
records += kit.commit(outbox, kit.event("E-3"), document=Document())
print(json.dumps({"was": in_memory, "is": outbox.in_memory, "told": [record.id for record in records],
                  "totals": kit.totals(outbox)}))
outbox.close()
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """Return a library under which nothing becomes durable while a file is there."""
    return preload.built(tmp_path_factory, SHIM)


def run(script, kit, shim, tmp_path, *arguments, code=0, **environment):
    """Return what *script* prints, run where the disk hangs while there is a file."""
    env = {**os.environ, "LD_PRELOAD": str(shim), "HANG_WHILE": str(tmp_path / "hang"), **environment}
    command = [sys.executable, "-c", script, outbox_kit.__file__, str(kit.directory), *map(str, arguments)]
    done = subprocess.run(command, check=False, timeout=90, capture_output=True, text=True, env=env)
    assert done.returncode == code, done.stderr
    return done.stdout


def live(kit, shim, tmp_path, before, **environment):
    return json.loads(run(LIVE, kit, shim, tmp_path, before, **environment))


@pytest.mark.parametrize("before", [3, 3000], ids=["copied into memory", "too large for memory"])
def test_a_commit_that_comes_through_after_all_tells_nothing_twice(kit, shim, tmp_path, before):
    found = live(kit, shim, tmp_path, before)
    assert (found["was"], found["is"]) == (True, False)
    assert len(set(found["told"])) == before + 4
    for totals in found["totals"].values():
        assert totals["accepted"] == totals["pending"] + totals["delivered"] == before + 4
    records = OutboxFile(kit.directory).records()
    assert [record.sequence for record in records] == list(range(1, before + 5))
    assert [record.id for record in records] == found["told"]
    assert list(kit.directory.glob("outbox.db.*")) == []


@pytest.mark.long
def test_a_disk_that_was_slow_before_it_hung_is_gone_back_to(kit, shim, tmp_path):
    found = live(kit, shim, tmp_path, 3, SYNC_MILLISECONDS="1200")
    assert (found["was"], found["is"]) == (True, False)
    assert [record.id for record in OutboxFile(kit.directory).records()] == found["told"]


#: The disk hangs twice in one life; between, what was delivered is deleted for its age.
TWICE = """
import json, os, runpy, sys, time
from pathlib import Path
from bridge.events.event import Document
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
hang = Path(os.environ["HANG_WHILE"])
outbox = kit.open()
told = []
for turn in range(2):
    told += kit.fill(outbox, 5, size=turn)
    kit.settle(outbox, "a", *[record.sequence for record in told])
    kit.settle(outbox, "b", *[record.sequence for record in told[:-1]])
    kit.wait(7200)
    assert outbox.clean().result() > 0
    observation = kit.observation(outbox, kit.event(f"E-{turn}"), document=Document())
    hang.touch()
    told += outbox.write(outbox.records.append_observation, observation).result(20)
    assert outbox.in_memory
    hang.unlink()
    end = time.monotonic() + 20
    while outbox.in_memory and time.monotonic() < end:
        outbox.tend().result()
        time.sleep(0.05)
    assert not outbox.in_memory
print(json.dumps({"told": [record.id for record in told], "totals": kit.totals(outbox), "due": kit.due(outbox, "b")}))
outbox.close()
"""


def test_two_hangs_in_one_life_count_what_was_deleted_between_them_once(kit, shim, tmp_path):
    found = json.loads(run(TWICE, kit, shim, tmp_path))
    assert len(set(found["told"])) == 12
    assert found["due"] == [11, 12]
    for totals in found["totals"].values():
        assert totals["accepted"] == sum(totals[state] for state in totals if state != "accepted") == 12, totals


#: The disk hangs, and is slower than a commit may take from then on; the outbox is closed as an agent's stop does it.
CLOSE = """
import os, runpy, sys
from pathlib import Path
from bridge.events.event import Document
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
hang = Path(os.environ["HANG_WHILE"])
outbox = kit.open()
hang.touch()
record, = kit.commit(outbox, kit.event("E-1"), document=Document())
assert outbox.in_memory
record, = kit.commit(outbox, kit.event("E-2"), document=Document())
os.environ["SYNC_MILLISECONDS"] = "2500"
hang.unlink()
outbox.take_slow_disk()
assert outbox.in_memory
assert outbox.close(60)
"""


@pytest.mark.long
def test_what_is_in_memory_is_on_a_slow_disk_after_a_stop(kit, shim, tmp_path):
    run(CLOSE, kit, shim, tmp_path)
    assert [record.event.event_id for record in OutboxFile(kit.directory).records()] == ["E-1", "E-2"]


#: Every sync takes long from the second record on, and the agent is killed while it works from memory.
SLOW = """
import json, os, runpy, sqlite3, sys, time
from pathlib import Path
from bridge.events.event import Document
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
outbox = kit.open()
kit.fill(outbox, 2)
os.environ["SYNC_MILLISECONDS"] = sys.argv[3]
kit.commit(outbox, kit.event("E-1"), document=Document())
assert outbox.in_memory
longest = 0.0
def timed(work, *arguments, **options):
    global longest
    began = time.monotonic()
    value = work(*arguments, **options)
    longest = max(longest, time.monotonic() - began)
    return value
def on_disk():
    with sqlite3.connect(f"file:{kit.directory}/outbox.db?mode=ro", uri=True, timeout=40) as disk:
        sequences = [sequence for (sequence,) in disk.execute("SELECT sequence FROM records ORDER BY sequence")]
        delivered = disk.execute("SELECT COUNT(*) FROM deliveries WHERE state = 'delivered'").fetchone()[0]
    disk.close()
    return sequences, delivered
def until(expected):
    end = time.monotonic() + 60
    while (found := on_disk()) != expected and time.monotonic() < end:
        timed(outbox.tend().result)
        time.sleep(0.1)
    assert found == expected, found
timed(kit.commit, outbox, kit.event("E-2"), document=Document())
timed(kit.settle, outbox, "a", 1, 2)
until(([1, 2, 3, 4], 2))
assert outbox.in_memory
if sys.argv[4] == "many":
    told = list(range(5, 1505))
    kit.fill(outbox, 1500, size=2000)
    for sink in "ab":
        kit.settle(outbox, sink, *told)
    until(([1, 2, 3, 4, *told], 3002))
    end = time.monotonic() + 60
    while (used := outbox.totals().result()[0].used_bytes) > 2**20 and time.monotonic() < end:
        timed(outbox.tend().result)
        time.sleep(0.1)
    assert used < 2**20 and outbox.in_memory, used
    os.environ["SYNC_MILLISECONDS"] = "0"
    kit.settle(outbox, "b", 1)
    while outbox.in_memory and time.monotonic() < end:
        timed(outbox.tend().result)
        time.sleep(0.1)
    assert on_disk() == ([1, 2, 3, 4, *told], 3003)
    print(json.dumps([longest, kit.totals(outbox)]), flush=True)
    outbox.close()
    sys.exit()
timed(kit.settle, outbox, "b", 1)
sequence = timed(kit.commit, outbox, kit.event("E-3"), document=Document())[0].sequence
if sys.argv[4] == "killed":
    print(json.dumps([longest, kit.totals(outbox)]), flush=True)
    os._exit(9)
until(([1, 2, 3, 4, 5], 3))
if sys.argv[4] == "stopped":
    timed(kit.commit, outbox, kit.event("E-4"), document=Document())
    outbox.close(10)
    print(json.dumps([longest, outbox.is_committed]), flush=True)
    os._exit(0)
os.environ["SYNC_MILLISECONDS"] = "0"
end = time.monotonic() + 30
while outbox.in_memory and time.monotonic() < end:
    timed(outbox.tend().result)
    time.sleep(0.1)
assert not outbox.in_memory
print(json.dumps([longest, kit.totals(outbox)]), flush=True)
outbox.close()
"""


@pytest.mark.long
def test_a_disk_that_is_slow_for_a_while_is_gone_back_to(kit, shim, tmp_path):
    longest, totals = json.loads(run(SLOW, kit, shim, tmp_path, 3000, "quick again"))
    assert longest < 2.0
    for each in totals.values():
        assert each["accepted"] == sum(each[state] for state in each if state != "accepted") == 5
    assert (totals["a"]["delivered"], totals["b"]["delivered"]) == (2, 1)
    outbox = kit.open()
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == ([3, 4, 5], [2, 3, 4, 5])
    assert kit.totals(outbox) == totals


@pytest.mark.long
def test_a_stop_on_a_disk_that_is_always_slow_brings_all_of_it_there_in_ten_seconds(kit, shim, tmp_path):
    """What was written beside the work is not written again, and the connection for it is open."""
    longest, is_committed = json.loads(run(SLOW, kit, shim, tmp_path, 2600, "stopped"))
    assert longest < 2.0
    assert is_committed
    assert [record.sequence for record in OutboxFile(kit.directory).records()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_memory_forgets_what_is_finished_once_it_is_on_the_slow_disk(kit, shim, tmp_path):
    _, totals = json.loads(run(SLOW, kit, shim, tmp_path, 2600, "many"))
    for each in totals.values():
        assert each["accepted"] == sum(each[state] for state in each if state != "accepted") == 1504
    assert (totals["a"]["delivered"], totals["b"]["delivered"]) == (1502, 1501)
    outbox = kit.open()
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == ([3, 4], [2, 3, 4])


def test_a_disk_that_is_always_slow_gets_the_records_beside_the_work(kit, shim, tmp_path):
    """The agent is killed then, without a way back: what it wrote beside its work is there."""
    found = run(SLOW, kit, shim, tmp_path, 2600, "killed", code=9)
    assert json.loads(found)[0] < 2.0
    outbox = kit.open()
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == ([3, 4], [1, 2, 3, 4])
    (record,) = kit.commit(outbox, kit.event("after"), document=Document())
    assert record.stream_id != OutboxFile(kit.directory).records()[0].stream_id


#: For a second after the watch leaves the thread that hangs, no thread can be started.
NO_THREADS = """
import os, runpy, sys, threading
from pathlib import Path
from bridge.events.event import Document
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
hang = Path(os.environ["HANG_WHILE"])
outbox = kit.open()
observation = kit.observation(outbox, kit.event("E-1"), document=Document())
start, tried = threading.Thread.start, threading.Event()
def refuse(self):
    tried.set()
    raise RuntimeError("can't start new thread")
hang.touch()
threading.Thread.start = refuse
written = outbox.write(outbox.records.append_observation, observation)
assert tried.wait(20)
threading.Thread.start = start
hang.unlink()
print(len(written.result(20)), len(kit.commit(outbox, kit.event("E-2"), document=Document())))
for _ in range(200):  # on a busy disk the way back takes a while
    if not outbox.in_memory:
        break
    outbox.tend().result(20)
    threading.Event().wait(0.1)
outbox.close()
"""


def test_a_disk_that_hangs_while_no_thread_can_be_started_does_not_end_the_outbox(kit, shim, tmp_path):
    assert run(NO_THREADS, kit, shim, tmp_path).split() == ["1", "1"]
    assert [record.event.event_id for record in OutboxFile(kit.directory).records()] == ["E-1", "E-2"]
