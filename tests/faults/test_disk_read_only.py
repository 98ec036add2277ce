import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import outbox_kit
import pytest

from bridge.errors import OutboxReadOnly
from bridge.outbox import deliveries, meta
from bridge.outbox.reader import OutboxFile

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
NOBODY = 65534

#: Commits fifteen records in two sinks, of which five are delivered to a, and dies without closing anything.
DIE = """
import os, sys, runpy
from pathlib import Path
from bridge.outbox import deliveries, meta
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
outbox = kit.open()
kit.fill(outbox, 15)
kit.settle(outbox, "a", 1, 2, 3, 4, 5)
os.kill(os.getpid(), 9)
"""

#: Opens the outbox as nobody, says what it finds, takes one record in, and says so again when a line comes in.
LIVE = """
import json, os, sys, runpy, urllib.parse  # the last now: nobody may not be able to read the standard library
from pathlib import Path
from bridge.outbox import deliveries, meta
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
def say():
    rows = outbox.read(deliveries.due, "a", limit=99).result()
    print(json.dumps({"in_memory": outbox.in_memory, "a": kit.due(outbox, "a"), "b": kit.due(outbox, "b"),
                      "totals": kit.totals(outbox)["a"], "state": outbox.read(meta.load).result().stream_id,
                      "records": [row.record.event.event_id for row in rows]}))
    sys.stdout.flush()
outbox = kit.open()
say()
kit.commit(outbox, kit.event("E-1"))
kit.commit(outbox, kit.event("E-2"))
kit.settle(outbox, "a", *kit.due(outbox, "a")[:1])
say()
for line in sys.stdin:
    outbox.tend().result()
    say()
outbox.close()
"""


def run_kit(kit_file, script, directory):
    return [sys.executable, "-c", script, str(kit_file), str(directory)]


@pytest.fixture
def kit():
    """Return a kit for an outbox in a directory that a user who is not root can reach.

    Not in that of pytest: each run of it that begins makes the directory of all runs private again.
    """
    with tempfile.TemporaryDirectory(prefix="outbox-", ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)
        kit = outbox_kit.OutboxKit(Path(directory) / "state")
        yield kit
        kit.close()


@pytest.fixture
def kit_file():
    return Path(outbox_kit.__file__)


@pytest.fixture
def left_behind(kit_file, kit):
    """Return a directory as an agent leaves it that was killed: everything it did is in the -wal."""
    done = subprocess.run(run_kit(kit_file, DIE, kit.directory), check=False, timeout=60)
    assert done.returncode == -9
    names = {path.name for path in kit.directory.iterdir()}
    assert names == {"nudge", "outbox.db", "outbox.db-shm", "outbox.db-wal"}
    assert (kit.directory / "outbox.db-wal").stat().st_size > (kit.directory / "outbox.db").stat().st_size
    return kit.directory


class Agent:
    """An outbox in a process of its own, without the rights of root."""

    def __init__(self, kit_file, directory, log):
        self._log = log.open("w")
        self._process = subprocess.Popen(
            run_kit(kit_file, LIVE, directory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def says(self):
        line = self._process.stdout.readline()
        assert line, f"The agent died: {Path(self._log.name).read_text()}"
        return json.loads(line)

    def tend(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.says()


def forbid(directory, *, file_mode=0o444, directory_mode=0o555):
    for path in directory.iterdir():
        path.chmod(file_mode)
    directory.chmod(directory_mode)


def allow(directory):
    directory.chmod(0o700)
    for path in (directory, *directory.iterdir()):
        if IS_ROOT:
            os.chown(path, NOBODY, NOBODY)
        path.chmod(0o700 if path.is_dir() else 0o600)


def test_a_directory_without_the_right_to_write_is_read_to_the_last_commit(kit_file, left_behind, tmp_path):
    forbid(left_behind)
    with Agent(kit_file, left_behind, tmp_path / "log") as agent:
        found = agent.says()
        assert found["in_memory"]
        assert (found["a"], found["b"]) == (list(range(6, 16)), list(range(1, 16)))
        assert (found["totals"]["accepted"], found["totals"]["delivered"]) == (15, 5)
        assert agent.says()["a"] == list(range(7, 18))
        assert agent.tend()["in_memory"]
        allow(left_behind)
        back = agent.tend()
        assert not back["in_memory"]
        assert (back["a"], back["b"], back["state"]) == (list(range(7, 18)), list(range(1, 18)), found["state"])
        assert (back["totals"]["accepted"], back["totals"]["delivered"]) == (17, 6)
    assert "The disk under the outbox refuses" in (tmp_path / "log").read_text()
    assert [path.name for path in left_behind.glob("outbox.db.*")] == []


def test_a_directory_that_cannot_even_be_read_is_joined_when_it_can(kit_file, left_behind, tmp_path):
    forbid(left_behind, file_mode=0o000)
    with Agent(kit_file, left_behind, tmp_path / "log") as agent:
        blind = agent.says()
        assert (blind["in_memory"], blind["a"]) == (True, [])
        assert agent.says()["records"] == ["E-2"]
        allow(left_behind)
        back = agent.tend()
        assert not back["in_memory"]
        assert back["state"] != blind["state"]
        assert back["a"] == [*range(6, 16), 17]
        assert back["b"] == [*range(1, 18)]
        assert back["records"][-1] == "E-2"
        assert (back["totals"]["accepted"], back["totals"]["delivered"]) == (17, 6)
    assert [path.name for path in left_behind.glob("outbox.db.*")] == []


def test_an_empty_directory_without_the_right_to_write_is_used_when_it_may_be(kit_file, kit, tmp_path):
    kit.directory.mkdir()
    forbid(kit.directory)
    with Agent(kit_file, kit.directory, tmp_path / "log") as agent:
        assert agent.says()["in_memory"]
        assert agent.says()["a"] == [2]
        allow(kit.directory)
        back = agent.tend()
        assert (back["in_memory"], back["a"], back["b"]) == (False, [2], [1, 2])
    assert kit.due(kit.open()) == [2]


# A whole file system, as the kernel leaves it after an error.


@pytest.fixture
def mounted(kit):
    """Mount a disk of its own where the outbox will be."""
    kit.directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(kit.directory)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("A disk can only be mounted by root; see the tests with a directory that may not be written.")
    try:
        yield kit.directory
        kit.close()
    finally:
        subprocess.run(["umount", "-l", str(kit.directory)], check=True)


def remount(directory, how):
    subprocess.run(["mount", "-o", f"remount,{how}", str(directory)], check=True)


def test_a_disk_that_comes_up_read_only_is_read_to_the_last_commit(kit, mounted, kit_file, caplog):
    assert subprocess.run(run_kit(kit_file, DIE, mounted), check=False, timeout=60).returncode == -9
    remount(mounted, "ro")
    outbox = kit.open()
    assert outbox.in_memory
    assert "The disk under the outbox refuses" in caplog.text
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == (list(range(6, 16)), list(range(1, 16)))
    kit.commit(outbox, kit.event("E-1"))
    kit.settle(outbox, "a", 6)
    outbox.tend().result()
    assert outbox.in_memory
    with pytest.raises(OutboxReadOnly):
        OutboxFile(mounted).retry()
    assert len(OutboxFile(mounted).records()) == 15
    remount(mounted, "rw")
    outbox.tend().result()
    assert not outbox.in_memory
    outbox.close()
    outbox = kit.open()
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == (list(range(7, 17)), list(range(1, 17)))
    assert list(mounted.glob("outbox.db.*")) == []


def test_an_old_state_is_not_taken_for_the_last_one_when_the_wal_cannot_be_read(kit, mounted, kit_file):
    kit.fill(kit.open(), 5)
    kit.close()
    assert subprocess.run(run_kit(kit_file, DIE, mounted), check=False, timeout=60).returncode == -9
    (mounted / "outbox.db-shm").unlink()
    remount(mounted, "ro")
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"))
    assert kit.due(outbox, "b") == [1, 2]
    remount(mounted, "rw")
    outbox.tend().result()
    assert not outbox.in_memory
    rows = outbox.read(deliveries.due, "b", limit=99).result()
    assert [row.sequence for row in rows] == list(range(1, 23))
    assert {row.record.stream_id for row in rows} == {outbox.read(meta.load).result().stream_id}
    assert [row.record.event.event_id for row in rows][-2:] == ["E-1", "E-2"]


def test_a_disk_that_comes_up_read_only_after_a_clean_stop_is_read(kit, mounted):
    kit.fill(kit.open(), 10)
    kit.close()
    remount(mounted, "ro")
    outbox = kit.open()
    assert (outbox.in_memory, kit.due(outbox)) == (True, list(range(1, 11)))
    remount(mounted, "rw")
    outbox.tend().result()
    assert (outbox.in_memory, kit.due(outbox)) == (False, list(range(1, 11)))


def test_a_damaged_file_on_a_read_only_disk_is_set_aside_when_that_is_possible(kit, mounted):
    kit.fill(kit.open(), 10)
    kit.close()
    path = mounted / "outbox.db"
    path.write_bytes(b"\0" * path.stat().st_size)
    remount(mounted, "ro")
    outbox = kit.open()
    assert outbox.in_memory
    kit.commit(outbox, kit.event("E-1"))
    outbox.tend().result()
    remount(mounted, "rw")
    for _ in range(2):
        outbox.tend().result()
    assert not outbox.in_memory
    assert len(list(mounted.glob("outbox.db.damaged-*Z"))) == 1
    assert kit.due(outbox) == [1]
    outbox.close()
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT COUNT(*) FROM records").fetchone() == (1,)
    connection.close()
