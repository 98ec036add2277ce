"""The memory of the installed agent after it has sent 1,500 records, and its growth with the next 1,500."""

import importlib.util
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from eventhubs_emulator.process import NEEDS, started
from private_ca import PrivateCa
from waiting import until

from bridge.testing import EventSpec, Simulator
from bridge.testing.http_contract import HttpPeer
from bridge.testing.simulator.imds_api import TOKEN_PATH

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_CHANGES, _EVENTS = 150, 10
_RECORDS = _CHANGES * _EVENTS
_MIB = 1_048_576  # as ps and top count
_MOST_GROWTH_MIB = 2


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """A configuration and its limit. The value of each peer, a context manager, replaces a placeholder in *sinks*."""

    sinks: str
    limit_mib: float
    peers: tuple = ()


@contextmanager
def _http_peer():
    """Accept all POST requests, and yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Accepting)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def _event_hub():
    """Run the emulator, and yield the path of a file with its connection string."""
    if importlib.util.find_spec("proton") is None:
        pytest.skip(NEEDS)
    with started() as emulator, tempfile.NamedTemporaryFile("w") as file:
        file.write(emulator.connection_string())
        file.flush()
        yield file.name


class _Accepting(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def handle(self):
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_):
        pass


_STDOUT = '[[sinks]]\ntype = "stdout"\n'
_WEBHOOK = '[[sinks]]\ntype = "webhook"\nurl = "{}/hook"\n'

_EVENTHUBS = """[[sinks]]
type = "eventhubs"
credential = "connection_string"
connection_string_file = "{}"
"""
_OTLP = '[[sinks]]\ntype = "otlp"\nendpoint = "{}"\n'

_SETUPS = {
    "stdout and webhook": _Setup(sinks=_STDOUT + _WEBHOOK, limit_mib=35, peers=(_http_peer,)),
    "stdout, webhook, eventhubs and otlp": _Setup(
        sinks=_STDOUT + _WEBHOOK + _EVENTHUBS + _OTLP, limit_mib=50, peers=(_http_peer, _event_hub, _http_peer)
    ),
}


@pytest.mark.parametrize("name", _SETUPS)
def test_memory_after_1500_records(*, name, serve, start_agent, figure, chart, tmp_path):
    setup = _SETUPS[name]
    documents = serve(changes=2 * _CHANGES, polls_a_change=1, events=_EVENTS)
    printed = tmp_path / "stdout.jsonl"
    with ExitStack() as peers, printed.open("wb") as stdout:
        urls = [peers.enter_context(peer()) for peer in setup.peers]
        agent = start_agent(
            "agent",
            documents.endpoints[0],
            sinks=setup.sinks.format(*urls),
            poll_interval_seconds=0.2,
            stdout=stdout,
        )
        _wait_for_lines(printed, _RECORDS, within_seconds=300)
        now = agent.memory_bytes("VmRSS") / _MIB
        _wait_for_lines(printed, 2 * _RECORDS, within_seconds=300)
        later = agent.memory_bytes("VmRSS") / _MIB
    figure(f"memory {name} {now:.1f} MiB after {_RECORDS} records, {later:.1f} MiB after {2 * _RECORDS}")
    chart("memory", f"agent: {name.replace(' and', ',')}", value=now)
    assert now <= setup.limit_mib
    assert later - now <= _MOST_GROWTH_MIB


_MANAGED_IDENTITY = """[[sinks]]
type = "eventhubs"
fully_qualified_namespace = "127.0.0.1"
eventhub = "scheduled-events"
endpoint = "127.0.0.1:{}"
ca_file = "{}"
"""


def test_memory_and_first_record_of_eventhubs_with_managed_identity(
    *, start_agent, env, figure, chart, tmp_path, monkeypatch
):
    pytest.importorskip("proton", reason=NEEDS)
    ca = PrivateCa(tmp_path / "ca")
    cert_file, key_file = map(str, ca.issue("localhost"))
    with started(cert_file=cert_file, key_file=key_file) as hub, Simulator(vms=["vm_0"], rate_limit=False) as azure:
        monkeypatch.setitem(env, "AZURE_POD_IDENTITY_AUTHORITY_HOST", azure.endpoint)
        sinks = _MANAGED_IDENTITY.format(hub.ports["amqps"], ca.ca_file)
        agent = start_agent("agent", azure.endpoint, sinks=sinks, poll_interval_seconds=0.2, stdout=None)
        until(lambda: sum("scheduledevents" in each.path for each in azure.requests) > 25, seconds=60)  # five seconds
        has_token = any(each.path == TOKEN_PATH for each in azure.requests)
        idle = agent.memory_bytes("VmRSS") / _MIB
        began_at = time.monotonic()
        azure.world.add_event(EventSpec(event_type="Freeze"))
        hub.wait_for(lambda state: state["transfers"])
        seconds = time.monotonic() - began_at
        after = agent.memory_bytes("VmRSS") / _MIB
    figure(f"memory eventhubs by managed identity {idle:.1f} MiB idle, {after:.1f} MiB after one record")
    figure(f"eventhubs by managed identity: {seconds:.2f} s from the change to the first record, with an idle agent")
    chart("memory", "agent: eventhubs, managed identity", value=after)
    assert has_token
    assert after <= 60


def _wait_for_lines(path, least, *, within_seconds):
    deadline, never = time.monotonic() + within_seconds, threading.Event()
    while (lines := path.read_bytes().count(b"\n")) < least:
        if time.monotonic() > deadline:
            pytest.fail(f"After {within_seconds:g} s the agent had printed {lines} of {least} records.")
        never.wait(0.2)


_TELEMETRY = '[[sinks]]\ntype = "stdout"\n[telemetry]\notlp_endpoint = "{}"\ninterval_seconds = 1\n'
_PUSHES = 20
_MOST_TELEMETRY_MIB = 15


def test_memory_of_the_metrics_push(*, serve, start_agent, env, figure, monkeypatch):
    """Compare agents without a push, with a Collector that accepts pushes, and with a Collector that never responds."""
    monkeypatch.setitem(env, "OTEL_EXPORTER_OTLP_TIMEOUT", "500")
    documents = serve(changes=0, polls_a_change=1, events=1)
    with HttpPeer() as accepting, HttpPeer() as silent:
        silent.stay_silent()
        tables = {"none": _STDOUT} | {
            name: _TELEMETRY.format(f"http://{peer.address.authority}")
            for name, peer in {"accepting": accepting, "silent": silent}.items()
        }
        agents = {
            name: start_agent(
                name, documents.endpoints[0], sinks=table, poll_interval_seconds=0.2, stdout=subprocess.DEVNULL
            )
            for name, table in tables.items()
        }
        until(lambda: min(len(accepting.requests), len(silent.requests)) >= _PUSHES, seconds=60)
        mib = {name: agent.memory_bytes("VmRSS") / _MIB for name, agent in agents.items()}
    more = {name: used - mib["none"] for name, used in mib.items()}
    figure(
        f"memory of the push of metrics: {more['accepting']:.1f} MiB; {more['silent']:.1f} MiB with a silent Collector"
    )
    assert max(more.values()) <= _MOST_TELEMETRY_MIB
