"""The agent stops on time if the outbox, a sink during a reload, or IMDS at the start hangs."""

import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from imds_documents import document, event

from bridge.testing.http_peer import HttpPeer

GRACE_SECONDS = 1.0
#: The documented limit, plus 6 s for a busy machine. The sum is less than half of the duration of each hang.
IN_TIME_SECONDS = GRACE_SECONDS + 1.0 + 6.0

CONFIG = """
stop_grace_seconds = {grace}
[imds]
endpoint = "{imds}"
poll_interval_seconds = 0.2
timeout_seconds = 30
[state]
directory = "{state}"
[status]
listen = ""
"""
SINK = """
[[sinks]]
name = "hangs-{number}"
type = "webhook"
url = "{url}"
timeout_seconds = {timeout_seconds}
"""


@pytest.fixture
def silent():
    """A port that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.settimeout(20)
        yield listener


def url_of(listener):
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def asked(listener, times):
    """Wait for *times* connections, and keep them open."""
    with ExitStack() as stack:
        for _ in range(times):
            stack.enter_context(listener.accept()[0])
        yield


def configure(agent, imds_url, sinks=""):
    agent.config.write_text(CONFIG.format(imds=imds_url, state=agent.state, grace=GRACE_SECONDS) + sinks)


def stop_in_time(agent):
    began_at = time.monotonic()
    assert agent.stop(timeout_seconds=30) == 0, agent.log
    assert time.monotonic() - began_at < IN_TIME_SECONDS, agent.log
    assert "Traceback" not in agent.log


def lock_of(agent, **options):
    blocker = sqlite3.connect(agent.state / "outbox-1.db", isolation_level=None, **options)
    blocker.execute("BEGIN IMMEDIATE")
    return blocker


def test_records_in_memory_are_saved_if_a_lock_ends_within_the_grace_period(agent, imds):
    with HttpPeer() as peer:
        peer.say(503)
        webhook = f'[[sinks]]\ntype = "webhook"\nurl = "http://127.0.0.1:{peer.address.port}/"\n'
        agent.configure(imds.url, webhook)  # with the default grace period
        imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
        agent.start()
        imds.wait_for_polls(3)
        blocker = lock_of(agent, check_same_thread=False)
        imds.show(document(2, event("E-1")), polls=1)
        agent.wait_for(lambda: "The outbox cannot be saved" in agent.log, timeout_seconds=40)
        threading.Timer(1.5, blocker.close).start()
        assert agent.stop(timeout_seconds=30) == 0
        assert "could not be saved" not in agent.log
    code, listed, _ = agent.call("outbox", "list", "--json", "--config", agent.config)
    assert (code, '"transition":"scheduled"' in listed) == (0, True)


def test_stop_is_on_time_while_hung_sinks_are_replaced(agent, imds, silent):
    def sinks(timeout_seconds):
        return "".join(
            SINK.format(number=number, url=url_of(silent), timeout_seconds=timeout_seconds) for number in range(6)
        )

    imds.identity = (200, b'{"name": "vm_0", "vmId": "AAAA"}')
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    configure(agent, imds.url, sinks(20))
    agent.start()
    imds.wait_for_polls(2)
    imds.show(document(2, event("E-1")))
    with asked(silent, 6):
        configure(agent, imds.url, sinks(21))
        agent.process.send_signal(signal.SIGHUP)
        began_at = time.monotonic()
        agent.wait_for(lambda: "configuration was reloaded" in agent.log, timeout_seconds=150)
        assert time.monotonic() - began_at < 2 + 1 + 6, "the agent waited for each hung sink"
        with asked(silent, 6):
            configure(agent, imds.url, sinks(22))
            agent.process.send_signal(signal.SIGHUP)
            stop_in_time(agent)


def test_stop_is_on_time_while_the_first_imds_request_hangs(agent, silent):
    configure(agent, url_of(silent))
    agent.start()
    with asked(silent, 1):
        stop_in_time(agent)


@contextmanager
def being_loaded(agent):
    """Yield a `run` process that is still importing its modules."""
    command = [sys.executable, "-m", "bridge", "run", "--config", agent.config]
    with (
        agent.err.open("wb") as log,
        subprocess.Popen(command, env=agent.env, cwd=agent.directory, stderr=log) as process,
    ):
        try:
            loaded, deadline = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 20
            while "msgspec" not in loaded.read_text():
                assert time.monotonic() < deadline
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only /proc shows the loaded libraries")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_during_imports_exits_0(agent, imds, number):
    configure(agent, imds.url)
    with being_loaded(agent) as process:
        process.send_signal(number)
        assert process.wait(20) == 0
    assert agent.log == ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only /proc shows the loaded libraries")
def test_sighup_during_imports_does_not_stop_the_agent(agent, imds):
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    configure(agent, imds.url)
    with being_loaded(agent) as process:
        process.send_signal(signal.SIGHUP)
        imds.wait_for_polls(1)
        process.terminate()
        assert process.wait(20) == 0
