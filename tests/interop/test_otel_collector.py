"""The real OpenTelemetry Collector reads the requests of the otlp sink. otelcol/build.yaml describes its build."""

import os
import re
import shutil
import socket
import subprocess
import threading
import time

import pytest
from closing import closing_each
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bridge.agent.agent import Agent
from bridge.config.loader import load
from bridge.metrics.metrics import PREFIX as METRICS_PREFIX
from bridge.sink import DeliveryRejected
from bridge.testing import EventSpec, Simulator
from bridge.testing.http_contract import HttpPeer
from bridge.testing.records import sample_event, sample_record
from sinks.otlp.sink import OtlpConfig, OtlpSink

pytestmark = pytest.mark.interop

CONFIG = """
receivers:
  otlp:
    protocols:
      http:
        endpoint: 127.0.0.1:{port}
      grpc:
        endpoint: 127.0.0.1:{grpc_port}
exporters:
  debug:
    verbosity: detailed
  otlphttp:
    endpoint: {forward}
    compression: none
    sending_queue:
      enabled: false
service:
  telemetry:
    metrics:
      level: none
  pipelines:
    logs:
      receivers: [otlp]
      exporters: [debug{comma}]
    metrics:
      receivers: [otlp]
      exporters: [otlphttp]
    traces:
      receivers: [otlp]
      exporters: [otlphttp]
"""
_START_SECONDS = 30.0
_READ_SECONDS = 10.0


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Collector:
    """A running Collector and its output."""

    def __init__(self, program, directory, *, forward=""):
        """Forward every signal to the URL *forward* after the Collector has read it. Without a URL, print the logs."""
        self.endpoint = f"http://127.0.0.1:{(port := _free_port())}"
        config = directory / "config.yaml"
        config.write_text(
            CONFIG.format(
                port=port,
                grpc_port=(grpc_port := _free_port()),
                forward=forward or "http://127.0.0.1:9",
                comma=", otlphttp" if forward else "",
            )
        )
        self.grpc_endpoint = f"http://127.0.0.1:{grpc_port}"
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([program, "--config", str(config)], stdout=log, stderr=log)

    def wait_for(self, text, within_seconds=_READ_SECONDS):
        """Wait until the output contains *text*. Return the output."""
        never = threading.Event()
        deadline = time.monotonic() + within_seconds
        while text not in (printed := self._log.read_text()):
            assert self._process.poll() is None, printed
            assert time.monotonic() < deadline, f"{text!r} is not in the output: {printed}"
            never.wait(0.05)
        return printed

    def close(self):
        self._process.terminate()
        self._process.wait(10)


@pytest.fixture
def program():
    program = os.environ.get("OTELCOL") or shutil.which("otelcol")
    if program is None:
        pytest.skip("no OpenTelemetry Collector: set OTELCOL to one (see tests/interop/otelcol/build.yaml)")
    return program


@pytest.fixture
def collector(program, tmp_path):
    collector = Collector(program, tmp_path)
    try:
        collector.wait_for("Everything is ready", _START_SECONDS)
        yield collector
    finally:
        collector.close()


@pytest.fixture
def make_sink(collector):
    def sink_of(**keys):
        return OtlpSink(OtlpConfig(**{"name": "otlp", "endpoint": collector.endpoint, **keys}))

    with closing_each(sink_of) as make:
        yield make


def _printed(collector, record):
    """Return the lines that the Collector printed about *record*, without indentation."""
    lines = collector.wait_for(f"log.record.uid: Str({record.id})").splitlines()
    return [re.sub(r"^\s*(->)?\s*", "", line) for line in lines]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_collector_reads_event_name_severity_and_resource(collector, make_sink, compression):
    record = sample_record(event=sample_event(event_type="Preempt"))
    make_sink(compression=compression).send([record])
    printed = _printed(collector, record)
    assert {
        "EventName: azure.scheduled_event.scheduled",
        "SeverityNumber: Error(17)",
        "SeverityText: ERROR",
        "Timestamp: 2026-11-20 11:00:01.123 +0000 UTC",
        "ObservedTimestamp: 2026-11-20 11:00:01.123 +0000 UTC",
        "cloud.provider: Str(azure)",
        "cloud.platform: Str(azure.vm)",
        "cloud.region: Str(westeurope)",
        "host.name: Str(WestNO_0)",
        "service.name: Str(scheduled-events-bridge)",
        "azure.scheduled_event.labels.team: Str(payments)",
        "azure.scheduled_event.event_type: Str(Preempt)",
        'azure.scheduled_event.resources: Slice(["WestNO_0","WestNO_1"])',
        "azure.scheduled_event.duration_seconds: Int(5)",
        "azure.scheduled_event.notice_seconds: Double(898.877)",
    } <= set(printed)
    assert any(line.startswith("Body: Str(scheduled: Preempt of this VM (WestNO_0) and 1 more") for line in printed)


def test_collector_error_rejects_the_record_with_its_status(make_sink):
    sink = make_sink(headers={"Content-Encoding": "zstd"})
    with pytest.raises(DeliveryRejected, match=" responded with 400 "):
        sink.send([sample_record()])


def test_check_is_accepted_and_writes_no_record(collector, make_sink):
    sink = make_sink()
    sink.check()
    record = sample_record()
    sink.send([record])
    assert "\n".join(_printed(collector, record)).count("LogRecord #") == 1


AGENT = """stop_grace_seconds = 5
[imds]
endpoint = "{azure}"
poll_interval_seconds = 0.2
[status]
listen = ""
[telemetry]
otlp_endpoint = "{collector}"
interval_seconds = 1
[[sinks]]
type = "otlp"
endpoint = "{collector}"
[[sinks]]
type = "otlp"
name = "spans"
signal = "traces"
endpoint = "{collector}"
"""


def test_collector_counts_match_the_agents_counts(program, tmp_path):
    """The Collector receives the metrics, logs, and spans of one run, and forwards them to the test."""
    with HttpPeer() as peer, Simulator(vms=["vm_0"], rate_limit=False) as azure:
        collector = Collector(program, tmp_path, forward=f"http://{peer.address.authority}")
        try:
            collector.wait_for("Everything is ready", _START_SECONDS)
            config = tmp_path / "config.toml"
            config.write_text(AGENT.format(azure=azure.endpoint, collector=collector.endpoint))
            agent = Agent(load(config, {}), tmp_path / "state")
            agent.start()
            for kind in ("Freeze", "Reboot"):
                event = azure.world.add_event(EventSpec(event_type=kind, notice_seconds=900))
                _wait_for(lambda: _count(agent, "records_total", transition="scheduled"), kind == "Reboot")
                azure.world.start(event)
                _wait_for(lambda: _count(agent, "records_total", transition="started"), kind == "Reboot")
                azure.world.complete(event)
                _wait_for(lambda: _count(agent, "records_total", transition="completed"), kind == "Reboot")
            agent.stop()
        finally:
            collector.close()
        pushed = _last_totals(peer)
        logs = _forwarded(peer, "logs", ExportLogsServiceRequest, "log_records")
        spans = _forwarded(peer, "traces", ExportTraceServiceRequest, "spans")
    assert pushed == _totals(agent)
    assert len(logs) == pushed["sink_delivered_total", frozenset({("sink", "otlp")})] == 6
    assert len(spans) == pushed["sink_delivered_total", frozenset({("sink", "spans")})] == 2
    assert {log.trace_id for log in logs} == {span.trace_id for span in spans}


def _wait_for(count, is_second):
    deadline, never = time.monotonic() + _READ_SECONDS, threading.Event()
    while count() < 1 + is_second:
        assert time.monotonic() < deadline
        never.wait(0.05)


def _count(agent, name, **labels):
    return agent.metrics.registry.get_sample_value(f"{METRICS_PREFIX}{name}", labels) or 0


def _totals(agent):
    """Return all totals of /metrics, except those of the process."""
    return {
        (sample.name.removeprefix(METRICS_PREFIX), frozenset(sample.labels.items())): sample.value
        for family in agent.metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith(METRICS_PREFIX) and sample.name.endswith("_total")
    }


def _last_totals(peer):
    last = [each for each in peer.requests if each.path.endswith("/metrics")][-1]
    [resource] = ExportMetricsServiceRequest.FromString(last.body).resource_metrics
    return {
        (
            metric.name.removeprefix(METRICS_PREFIX),
            frozenset((each.key, each.value.string_value) for each in point.attributes),
        ): point.as_double
        for metric in resource.scope_metrics[0].metrics
        if metric.name.startswith(METRICS_PREFIX)
        for point in metric.sum.data_points
    }


def _forwarded(peer, signal, request_class, field):
    found = [request_class.FromString(each.body) for each in peer.requests if each.path.endswith(f"/{signal}")]
    kind = "spans" if field == "spans" else "logs"
    resources = [each for request in found for each in getattr(request, f"resource_{kind}")]
    scopes = [each for resource in resources for each in getattr(resource, f"scope_{kind}")]
    return [each for scope in scopes for each in getattr(scope, field)]
