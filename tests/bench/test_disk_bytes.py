"""Bytes that reach the disk and fsyncs for each transition that is stored and delivered, with one and four sinks.

The bytes are `write_bytes` of /proc/PID/io: the pages that the agent made dirty, including checkpoints and the index of
the WAL, but without the journal of the file system. A library for LD_PRELOAD counts the fsyncs.
"""

import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import preload
import pytest

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_POLL_SECONDS = 0.2
_BEFORE = 10
_MOST_KILOBYTES = {1: 20, 4: 24}
_MOST_SYNCS = 2.05


class _Accepting(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.server.took()

    def log_message(self, *_):
        pass


class _Peer(ThreadingHTTPServer):
    """Accepts and counts the records of all sinks."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Accepting)
        self.taken = 0
        self._more = threading.Condition()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def took(self):
        with self._more:
            self.taken += 1
            self._more.notify_all()

    def wait(self, least):
        with self._more:
            assert self._more.wait_for(lambda: self.taken >= least, 300), f"{self.taken} of {least} records arrived"


@pytest.fixture
def peer():
    peer = _Peer()
    yield peer
    peer.shutdown()
    peer.server_close()


@pytest.fixture
def syncs(env, tmp_path_factory):
    """Return a file in memory that grows by a byte for each fsync of the agent."""
    env["LD_PRELOAD"] = str(preload.built(tmp_path_factory, preload.COUNT_SYNCS))
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        env["SYNCS"] = file.name
        yield lambda: Path(file.name).stat().st_size
    del env["LD_PRELOAD"], env["SYNCS"]


@pytest.mark.parametrize("sinks", [1, 4])
def test_bytes_and_fsyncs_per_transition(*, sinks, peer, serve, start_agent, figure, is_short, syncs):
    changes = 100 if is_short else 600
    documents = serve(changes=changes, polls_a_change=2, events=1)
    tables = [
        f'[[sinks]]\ntype = "webhook"\nname = "hook-{number}"\nurl = "http://127.0.0.1:{peer.server_port}/{number}"\n'
        for number in range(sinks)
    ]
    agent = start_agent(
        "agent",
        documents.endpoints[0],
        sinks="".join(tables),
        poll_interval_seconds=_POLL_SECONDS,
        stdout=subprocess.DEVNULL,
    )
    peer.wait(_BEFORE * sinks)
    before, first, syncs_before = agent.disk_bytes(), peer.taken, syncs()
    peer.wait(changes * sinks)
    time.sleep(1)  # until the results of the last deliveries are saved
    transitions = (changes * sinks - first) / sinks
    kilobytes = (agent.disk_bytes() - before) / transitions / 1000
    count = (syncs() - syncs_before) / transitions
    figure(f"per transition, {sinks} sinks: {kilobytes:.1f} KB, {count:.2f} fsyncs ({transitions:.0f} transitions)")
    assert kilobytes <= _MOST_KILOBYTES[sinks]
    assert count <= _MOST_SYNCS
