"""The lock on the state directory: one agent per directory, also if the directory is replaced."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bridge.errors import StateDirectoryError
from bridge.outbox.lock import DirectoryLock, is_locked

ON_POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no modes, and moves no open directory")
AS_A_USER = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root has every permission")

HOLD = """
import sys
from pathlib import Path
from bridge.outbox.lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def state(tmp_path):
    directory = tmp_path / "state"
    directory.mkdir()
    return directory


def test_second_agent_is_refused_with_the_directory_in_the_message(state):
    lock = DirectoryLock(state)
    with pytest.raises(StateDirectoryError, match="Another agent runs on the state directory") as caught:
        DirectoryLock(state)
    assert str(state) in str(caught.value)
    lock.release()
    lock.release()
    DirectoryLock(state).release()


def test_start_waits_for_a_lock_that_is_released_in_time(state):
    lock = DirectoryLock(state)
    timer = threading.Timer(0.3, lock.release)
    timer.start()
    DirectoryLock(state, wait_seconds=20.0).release()
    timer.join()


def test_start_does_not_wait_for_an_agent_that_responds(state):
    lock = DirectoryLock(state)
    began_at = time.monotonic()
    with pytest.raises(StateDirectoryError):
        DirectoryLock(state, wait_seconds=20.0, give_up=lambda: True)
    assert time.monotonic() - began_at < 10
    lock.release()


def test_killed_agent_leaves_no_lock(state):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        assert is_locked(state)
        with pytest.raises(StateDirectoryError):
            DirectoryLock(state)
        other.kill()
        other.wait(10)
    assert is_locked(state) is False
    DirectoryLock(state).release()


def test_check_does_not_disturb_another_check(state):
    assert is_locked(state / "missing") is False
    assert [is_locked(state), is_locked(state)] == [False, False]


@ON_POSIX
def test_lock_changes_nothing_in_an_existing_directory(state):
    state.chmod(0o500)
    try:
        DirectoryLock(state).release()
        assert list(state.iterdir()) == []
        assert state.stat().st_mode & 0o777 == 0o500
    finally:
        state.chmod(0o700)


@ON_POSIX
@pytest.mark.parametrize("is_recreated", [False, True])
def test_deleted_directory_is_created_and_locked_again(state, caplog, is_recreated):
    lock = DirectoryLock(state)
    shutil.rmtree(state)
    if is_recreated:
        state.mkdir()
    assert lock.claim()
    assert not lock.claim()
    assert is_locked(state)
    assert "deleted, moved, or replaced" in caplog.text
    lock.release()
    assert is_locked(state) is False


@ON_POSIX
def test_directory_of_another_agent_is_not_claimed(state, tmp_path):
    lock = DirectoryLock(state)
    state.rename(tmp_path / "aside")
    state.mkdir()
    other = DirectoryLock(state)
    with pytest.raises(StateDirectoryError, match="Another agent runs"):
        lock.claim()
    other.release()
    assert lock.claim()
    lock.release()


@ON_POSIX
def test_directory_is_created_with_its_parents_for_its_owner_only(tmp_path):
    DirectoryLock(tmp_path / "one" / "two").release()
    assert (tmp_path / "one" / "two").stat().st_mode & 0o777 == 0o700


def test_directory_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    paths = [tmp_path / "file", tmp_path / "file" / "state"]
    for path in [*paths, Path("/proc/x")] if sys.platform == "linux" else paths:
        with pytest.raises(StateDirectoryError, match="cannot be created") as caught:
            DirectoryLock(path)
        assert str(path) in str(caught.value)


@ON_POSIX
@AS_A_USER
def test_missing_directory_under_a_read_only_parent_is_refused(state):
    state.chmod(0o500)
    try:
        with pytest.raises(StateDirectoryError, match="Permission denied"):
            DirectoryLock(state / "state")
    finally:
        state.chmod(0o700)
