import os
import subprocess
import sys
import threading

import pytest

from bridge.errors import StateDirectoryError
from bridge.outbox.locks import DirectoryLock, prepare_directory

ON_POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no modes, and locks a file")
AS_A_USER = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do everything")

HOLD = """
import sys
from pathlib import Path
from bridge.outbox.locks import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_agent_on_a_directory_is_refused_by_name(tmp_path):
    lock = DirectoryLock(tmp_path)
    with pytest.raises(StateDirectoryError, match="Another agent runs on the state directory") as caught:
        DirectoryLock(tmp_path)
    assert str(tmp_path) in str(caught.value)
    lock.release()
    lock.release()
    DirectoryLock(tmp_path).release()


def test_a_command_that_looks_for_an_instant_does_not_keep_an_agent_from_starting(tmp_path):
    looking = DirectoryLock(tmp_path)
    timer = threading.Timer(0.05, looking.release)
    timer.start()
    DirectoryLock(tmp_path).release()
    timer.join()


def test_an_agent_that_is_killed_leaves_no_lock(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(StateDirectoryError):
            DirectoryLock(tmp_path)
        other.kill()
        other.wait(10)
    DirectoryLock(tmp_path).release()


@ON_POSIX
def test_the_lock_leaves_no_file_and_needs_none(tmp_path):
    tmp_path.chmod(0o500)
    try:
        DirectoryLock(tmp_path).release()
        assert list(tmp_path.iterdir()) == []
    finally:
        tmp_path.chmod(0o700)


def test_a_directory_that_is_not_there_is_not_taken_for_a_locked_one(tmp_path):
    with pytest.raises(StateDirectoryError, match=r"gone cannot be opened and locked: No such file"):
        DirectoryLock(tmp_path / "gone")


@ON_POSIX
def test_a_directory_is_made_with_its_parents_for_its_owner_alone(tmp_path):
    prepare_directory(tmp_path / "one" / "two")
    assert (tmp_path / "one" / "two").stat().st_mode & 0o777 == 0o700
    prepare_directory(tmp_path / "one" / "two")


@ON_POSIX
def test_a_directory_that_exists_is_left_as_it_is(tmp_path):
    tmp_path.chmod(0o555)
    try:
        prepare_directory(tmp_path)
        assert tmp_path.stat().st_mode & 0o777 == 0o555
    finally:
        tmp_path.chmod(0o700)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "state"):
        with pytest.raises(StateDirectoryError, match="cannot be made") as caught:
            prepare_directory(path)
        assert str(path) in str(caught.value)


@ON_POSIX
@AS_A_USER
def test_a_directory_on_a_read_only_parent_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StateDirectoryError, match=r"cannot be made: Permission denied"):
            prepare_directory(tmp_path / "state")
    finally:
        tmp_path.chmod(0o700)
