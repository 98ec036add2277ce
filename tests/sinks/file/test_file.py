"""The file sink: the contract suite, partial lines, two writers, and blocked calls."""

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

fcntl = pytest.importorskip("fcntl", reason="the tests use POSIX file locks")
resource = pytest.importorskip("resource", reason="the tests simulate a full disk with POSIX resource limits")


def sink_of(path, **table):
    return read({"sinks": [{"type": "file", "path": str(path), **table}]}).sinks[0].build()


def ids(path):
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


class FilePeer(Peer):
    """A writable file, a directory, or a file that another process has locked."""

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
    no_network = "the sink writes to a file"
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


def test_file_moved_by_another_tool_is_created_again(tmp_path):
    path = tmp_path / "a.jsonl"
    sink = sink_of(path)
    sink.send([sample_record(1)])
    path.rename(tmp_path / "moved")
    sink.send([sample_record(2)])
    sink.close()
    assert (ids(tmp_path / "moved"), ids(path)) == ([sample_record(1).id], [sample_record(2).id])


def test_partial_line_left_by_a_kill_does_not_break_the_next_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"half": ')
    sink = sink_of(path)
    sink.send([sample_record(1)])
    sink.close()
    half, whole = path.read_text().splitlines()
    assert half == '{"half": '
    assert json.loads(whole)["id"] == sample_record(1).id


def test_record_truncated_by_a_full_disk_is_written_again(tmp_path):
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
def test_path_that_is_not_a_regular_file_needs_attention_without_a_wait(tmp_path, kind):
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


def test_two_writers_of_one_file_lose_and_mix_no_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(first)]) for first in (1, 101)]
    assert [each.wait(60) for each in writers] == [0, 0]
    assert sorted(ids(path)) == sorted(sample_record(number).id for number in range(1, 201))


# A hung disk.


def test_hung_call_uses_one_thread_and_blocks_later_calls():
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


def test_close_ends_the_wait_for_a_hung_call():
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
