"""The file sink: the sink contract, half lines, two writers, and blocked calls."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import ClassVar

import pytest
from leaks import new_threads
from local_contract import LocalSinkContract

from bridge.config.loader import read
from bridge.sink import DeliveryFailed
from bridge.testing.peers import Peer
from bridge.testing.records import sample_record
from bridge.testing.watching import in_time
from sinks.file import FileConfig, FileSink

fcntl = pytest.importorskip("fcntl", reason="the files of these tests are locked as POSIX does")
resource = pytest.importorskip("resource", reason="likewise, a full disk is played by its limits")


def sink_of(path, **table):
    return read({"sinks": [{"type": "file", "path": str(path), **table}]}).sinks[0].build()


def ids(path):
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


class FilePeer(Peer):
    """A file that can be written, that is a directory, or that somebody else has locked."""

    def __init__(self, path):
        self.path = path
        self._kept = path.with_name("kept")
        self._lock = None

    @property
    def received(self):
        path = self._kept if self._kept.exists() else self.path
        return [[each] for each in ids(path)] if path.is_file() else []

    def accept(self):
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self.path.is_dir():
            self.path.rmdir()
            if self._kept.exists():
                self._kept.rename(self.path)

    def refuse_for_now(self, retry_after_seconds=None):
        assert retry_after_seconds is None
        if self.path.is_file():
            self.path.rename(self._kept)
        self.path.mkdir(exist_ok=True)

    def stay_silent(self):
        self._lock = self.path.open("a")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def wait_until_busy(self, *, writes_before):
        del writes_before
        threading.Event().wait(0.1)

    def close(self):
        self.accept()


class TestFileSinkContract(LocalSinkContract):
    sink_type = "file"
    no_network = "it writes to a file"
    skips: ClassVar = {
        **LocalSinkContract.skips,
        "test_silence_leaves_no_thread_and_no_socket_behind": "a blocked call keeps its thread until it returns",
    }

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path):
        self.directory = tmp_path
        self.count = 0

    def peer(self):
        self.count += 1
        return FilePeer(self.directory / f"records-{self.count}.jsonl")

    def table(self, address):
        del address
        return {"path": str(self.directory / f"records-{self.count}.jsonl")}


def test_file_that_another_tool_moves_away_is_made_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    sink = sink_of(path)
    sink.send([sample_record(1)])
    path.rename(tmp_path / "moved")
    sink.send([sample_record(2)])
    sink.close()
    assert (ids(tmp_path / "moved"), ids(path)) == ([sample_record(1).id], [sample_record(2).id])


def test_half_a_line_that_a_kill_left_does_not_break_the_next_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"half": ')
    sink = sink_of(path)
    sink.send([sample_record(1)])
    sink.close()
    half, whole = path.read_text().splitlines()
    assert half == '{"half": '
    assert json.loads(whole)["id"] == sample_record(1).id


def test_record_that_did_not_fit_on_the_disk_is_written_whole_by_the_next_send(tmp_path):
    path = tmp_path / "a.jsonl"
    sink = sink_of(path)
    sink.send([sample_record(1)])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(DeliveryFailed, match="File too large") as caught:
            sink.send([sample_record(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.needs_attention
    sink.send([sample_record(2)])
    sink.close()
    first, _, second = path.read_text().splitlines()
    assert [json.loads(line)["id"] for line in (first, second)] == [sample_record(1).id, sample_record(2).id]


@pytest.mark.parametrize("kind", ["pipe", "directory", "nowhere"])
def test_path_that_is_no_file_needs_a_person_and_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "no" / "a.jsonl" if kind == "nowhere" else tmp_path / "a.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    sink = sink_of(path)
    for call in (lambda: sink.send([sample_record(1)]), sink.check):
        with pytest.raises(DeliveryFailed, match="cannot be written") as caught:
            call()
        assert caught.value.needs_attention
    sink.close()


WRITER = """
import sys
from bridge.config.loader import read
from bridge.testing.records import sample_record
table = {"type": "file", "path": sys.argv[1]}
sink = read({"sinks": [table]}).sinks[0].build()
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 100):
    sink.send([sample_record(number)])
"""


def test_two_writers_of_one_file_lose_and_break_no_line(tmp_path):
    path = tmp_path / "a.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(first)]) for first in (1, 101)]
    assert [each.wait(60) for each in writers] == [0, 0]
    assert sorted(ids(path)) == sorted(sample_record(number).id for number in range(1, 201))


# A disk that hangs.


def test_call_that_hangs_costs_one_thread_and_what_follows_waits_for_it():
    sink, let_go, made = FileSink(FileConfig(path="/a", timeout_seconds=0.1)), threading.Event(), []

    def hang():
        made.append(1)
        let_go.wait(10)

    before = threading.enumerate()

    def run_in_vain():
        with pytest.raises(DeliveryFailed, match=r"/a did not respond within 0\.1 s"):
            sink.run(hang)

    for _ in range(3):
        in_time(run_in_vain, deadline_seconds=0.1)
    assert (len(new_threads(before)), len(made)) == (1, 1)
    let_go.set()
    sink.config = FileConfig(path="/a", timeout_seconds=30.0)
    sink.run(lambda: made.append(2))
    assert made == [1, 2]


def test_close_ends_the_wait_for_a_call_that_hangs():
    sink, let_go, errors = FileSink(FileConfig(path="/a")), threading.Event(), []

    def run():
        with contextlib.suppress(DeliveryFailed):
            sink.run(lambda: let_go.wait(10))
        errors.append(1)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    sink.close()
    thread.join(5)
    assert errors
    let_go.set()
    with pytest.raises(DeliveryFailed, match="closed"):
        sink.run(lambda: None)
