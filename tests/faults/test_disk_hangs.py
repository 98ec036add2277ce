"""A disk that hangs: it gives no error, the call just does not return. Frozen as a backup does it."""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import wait

import outbox_kit
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
    outbox = kit.open()
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
    if shutil.which("gcc") is None:
        pytest.skip("The library that makes the disk hang needs gcc.")
    directory = tmp_path_factory.mktemp("shim")
    (directory / "hang.c").write_text(SHIM)
    build = ["gcc", "-shared", "-fPIC", "-o", directory / "hang.so", directory / "hang.c", "-ldl"]
    subprocess.run(build, check=True, timeout=60)
    return directory / "hang.so"


@pytest.mark.parametrize("before", [3, 3000], ids=["copied into memory", "too large for memory"])
def test_a_commit_that_comes_through_after_all_tells_nothing_twice(kit, shim, tmp_path, before):
    env = {**os.environ, "LD_PRELOAD": str(shim), "HANG_WHILE": str(tmp_path / "hang")}
    arguments = [sys.executable, "-c", LIVE, outbox_kit.__file__, str(kit.directory), str(before)]
    done = subprocess.run(arguments, check=False, timeout=60, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["was"], found["is"]) == (True, False)
    assert len(set(found["told"])) == before + 4
    for totals in found["totals"].values():
        assert totals["accepted"] == totals["pending"] + totals["delivered"] == before + 4
    records = OutboxFile(kit.directory).records()
    assert [record.sequence for record in records] == list(range(1, before + 5))
    assert [record.id for record in records] == found["told"]
    assert list(kit.directory.glob("outbox.db.*")) == []
