"""The real OpenTelemetry Collector reads what the otlp sink sends; otelcol/build.yaml says how to build it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from bridge.sink import DeliveryRejected
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
service:
  telemetry:
    metrics:
      level: none
  pipelines:
    logs:
      receivers: [otlp]
      exporters: [debug]
"""
_START_SECONDS = 30.0
_READ_SECONDS = 10.0


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Collector:
    """A running Collector, and what it has printed."""

    def __init__(self, program: str, directory: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{(port := _free_port())}"
        config = directory / "config.yaml"
        config.write_text(CONFIG.format(port=port, grpc_port=(grpc_port := _free_port())))
        self.grpc_endpoint = f"http://127.0.0.1:{grpc_port}"
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([program, "--config", str(config)], stdout=log, stderr=log)

    def wait_for(self, text: str, within_seconds: float = _READ_SECONDS) -> str:
        """Return all that was printed, once *text* is in it."""
        never = threading.Event()
        deadline = time.monotonic() + within_seconds
        while text not in (printed := self._log.read_text()):
            assert self._process.poll() is None, printed
            assert time.monotonic() < deadline, f"{text!r} did not come: {printed}"
            never.wait(0.05)
        return printed

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@pytest.fixture
def collector(tmp_path):
    program = os.environ.get("OTELCOL") or shutil.which("otelcol")
    if program is None:
        pytest.skip(
            "no OpenTelemetry Collector: set OTELCOL to one (tests/interop/otelcol/build.yaml says how to build it)"
        )
    collector = Collector(program, tmp_path)
    try:
        collector.wait_for("Everything is ready", _START_SECONDS)
        yield collector
    finally:
        collector.close()


@pytest.fixture
def make_sink(collector):
    made = []

    def make(**keys):
        made.append(OtlpSink(OtlpConfig(**{"name": "otlp", "endpoint": collector.endpoint, **keys})))
        return made[-1]

    yield make
    for sink in made:
        sink.close()


def _printed(collector, record):
    """Return ``name: value`` lines of what the Collector printed of *record*, without its indentation."""
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


def test_errors_of_the_collector_are_read_to_people(make_sink):
    sink = make_sink(headers={"Content-Encoding": "zstd"})
    with pytest.raises(DeliveryRejected, match=" responded with 400 "):
        sink.send([sample_record()])


def test_check_is_accepted_and_writes_nothing(collector, make_sink):
    sink = make_sink()
    sink.check()
    record = sample_record()
    sink.send([record])
    assert "\n".join(_printed(collector, record)).count("LogRecord #") == 1
