"""The contract suite for the stdout sink, with the target of standard output as the peer."""

import contextlib
import json
import os
import sys
import threading
import uuid
from pathlib import Path
from typing import ClassVar

import pytest
from local_contract import LocalSinkContract

from bridge.testing.peers import Peer

_FULL_DISK = Path("/dev/full")

pytestmark = pytest.mark.skipif(not _FULL_DISK.exists(), reason="only Linux has /dev/full")


class Redirected(Peer):
    """Standard output, redirected to a reader, a full disk, or a full pipe without a reader."""

    def __init__(self, monkeypatch):
        self._read_end, self._write_end = os.pipe()
        self._full_read_end, self._full_write_end = os.pipe()
        self._disk = os.open(_FULL_DISK, os.O_WRONLY)
        self._descriptor = os.dup(self._write_end)
        self._stdout = os.fdopen(self._descriptor, "w")
        monkeypatch.setattr(sys, "stdout", self._stdout)
        self._lines = []
        self._marks = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def received(self):
        """Return all records written so far, up to a marker line that this property writes."""
        mark = f"read up to here {uuid.uuid4()}\n"
        os.write(self._write_end, mark.encode())
        with self._changed:
            assert self._changed.wait_for(lambda: mark in self._marks, timeout=30)
            return [[json.loads(line)["id"]] for line in self._lines]

    def accept(self):
        os.dup2(self._write_end, self._descriptor)
        os.set_blocking(self._full_read_end, False)
        with contextlib.suppress(BlockingIOError):  # a blocked write then returns
            while True:
                os.read(self._full_read_end, 65536)

    def refuse_for_now(self, retry_after_seconds=None):
        assert retry_after_seconds is None
        os.dup2(self._disk, self._descriptor)

    def stay_silent(self):
        self._fill()
        os.dup2(self._full_write_end, self._descriptor)

    def close(self):
        self._stdout.close()
        os.close(self._write_end)
        self._reader.join()
        for descriptor in (self._full_read_end, self._full_write_end, self._disk):
            os.close(descriptor)

    def _read(self):
        with os.fdopen(self._read_end) as stream:
            for line in stream:
                with self._changed:
                    (self._marks if line.startswith("read up to here ") else self._lines).append(line)
                    self._changed.notify_all()

    def _fill(self):
        os.set_blocking(self._full_write_end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self._full_write_end, b"\n" * 512)
        os.set_blocking(self._full_write_end, True)


class TestStdoutSinkContract(LocalSinkContract):
    sink_type = "stdout"
    no_network = "the sink writes to a descriptor"
    skips: ClassVar = {
        **LocalSinkContract.skips,
        "test_silence_leaves_no_thread_and_no_socket_behind": "a blocked write keeps its thread until it returns",
    }

    @pytest.fixture(autouse=True)
    def redirect(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def peer(self):
        return Redirected(self.monkeypatch)
