"""The OpenTelemetry Collector with deploy/otel-collector/config.yaml: every acknowledged record arrives.

The tests run the real Collector with the file itself. Its addresses and its directory come from the environment, and
the command line lowers a limit that takes too long to reach.
"""

import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from bridge.sink import DeliveryFailed
from bridge.testing.http_peer import HttpPeer
from bridge.testing.records import sample_event, sample_record
from bridge.testing.simulator.imds_api import Answer
from sinks.otlp.encoding import encode_request
from sinks.otlp.sink import OtlpConfig, OtlpSink

pytestmark = pytest.mark.deploy

_START_SECONDS = 30.0
_ARRIVE_SECONDS = 30.0
_STOP_SECONDS = 20.0
_LOOK_SECONDS = 0.05
_FAILED_METRIC = "otelcol_exporter_send_failed_log_records"


@pytest.fixture(scope="session")
def config(deploy):
    return deploy / "otel-collector" / "config.yaml"


def _until(found, what, within_seconds=_ARRIVE_SECONDS):
    """Wait until the result of *found* is true, and return it."""
    never = threading.Event()
    deadline = time.monotonic() + within_seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, f"{what} did not happen in {within_seconds} s"
        never.wait(_LOOK_SECONDS)
    return answer


def _free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _read(url):
    """Return the status and the text at *url*, or (None, "") if nothing listens there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return None, ""


def _logs_in(request):
    """Return the log records that *request* carries, as {uid: (resource attributes, log record)}."""
    found = {}
    for part in ExportLogsServiceRequest.FromString(request.body).resource_logs:
        resource = {each.key: each.value.string_value for each in part.resource.attributes}
        for scope in part.scope_logs:
            for log in scope.log_records:
                uid = next(each.value.string_value for each in log.attributes if each.key == "log.record.uid")
                found[uid] = (resource, log)
    return found


class Backend(HttpPeer):
    """A backend for the Collector that keeps the accepted log records."""

    def __init__(self):
        self.arrived = {}
        super().__init__(ids_in=lambda request: list(_logs_in(request)))
        self.accept()

    def accept(self):
        def take(request):
            self.arrived.update(_logs_in(request))
            return Answer(content_type="application/x-protobuf")

        self.reply(take)

    def wait_for(self, records):
        ids = {record.id for record in records}
        _until(lambda: ids <= set(self.arrived), f"the arrival of {len(ids)} records")


class Collector:
    """A Collector process with the shipped configuration, which can be killed and restarted on its directory."""

    def __init__(self, program, config, directory, backend):
        self._program = program
        self._config = config
        self._log = directory / "log"
        self.listen, health, metrics = _free_address(), _free_address(), _free_address()
        self.health_url = f"http://{health}/"
        self.metrics_url = f"http://{metrics}/metrics"
        self._environment = {
            **os.environ,
            "OTLP_BACKEND": f"http://{backend.address.authority}",
            "OTELCOL_LISTEN": self.listen,
            "OTELCOL_HEALTH": health,
            "OTELCOL_METRICS_PORT": metrics.rpartition(":")[2],
            "OTELCOL_STORAGE": str(directory / "storage"),
        }
        self._process = None

    def start(self, **settings):
        """Start with *settings* (two underscores stand for a dot) in addition to the file, and wait until healthy."""
        sets = [f"--set={name.replace('__', '.')}={value}" for name, value in settings.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "--config", str(self._config), *sets], env=self._environment, stdout=log, stderr=log
            )
        _until(self._is_healthy, "the start of the Collector", _START_SECONDS)

    def _is_healthy(self):
        assert self._process.poll() is None, self._log.read_text()
        return _read(self.health_url)[0] == 200

    def validate(self, **environment):
        """Return the exit status and the output of `validate`. A variable that is None is not set."""
        merged = {name: value for name, value in {**self._environment, **environment}.items() if value is not None}
        command = [self._program, "validate", "--config", str(self._config)]
        done = subprocess.run(command, env=merged, capture_output=True, text=True, timeout=_START_SECONDS, check=False)
        return done.returncode, done.stdout + done.stderr

    def metric(self, name):
        """Return the sum of the samples of *name*, or None without samples."""
        lines = [line for line in _read(self.metrics_url)[1].splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else None

    def kill(self):
        """Send SIGKILL."""
        self._process.kill()
        self._process.wait(_STOP_SECONDS)

    def close(self):
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()


@pytest.fixture
def backend():
    with Backend() as backend:
        yield backend


@pytest.fixture
def collector(tool, config, tmp_path, backend):
    collector = Collector(tool("otelcol"), config, tmp_path, backend)
    yield collector
    collector.close()


@contextmanager
def _sink(collector, **keys):
    sink = OtlpSink(OtlpConfig(name="otlp", endpoint=f"http://{collector.listen}", **keys))
    try:
        yield sink
    finally:
        sink.close()


def _send(collector, records):
    with _sink(collector) as sink:
        for record in records:
            sink.send([record])


def test_configuration_is_valid(collector):
    assert collector.validate() == (0, "")


def test_collector_forwards_records_unchanged(collector, backend):
    collector.start()
    records = [sample_record(1), sample_record(2, event=sample_event(event_type="Preempt"))]
    _send(collector, records)
    backend.wait_for(records)
    resource, log = backend.arrived[records[1].id]
    assert (log.severity_number, log.severity_text) == (17, "ERROR")
    assert log.event_name == "azure.scheduled_event.scheduled"
    assert resource["host.name"] == "WestNO_0"
    for record in records:
        sent = ExportLogsServiceRequest.FromString(encode_request([record])).resource_logs[0]
        resource, log = backend.arrived[record.id]
        assert log == sent.scope_logs[0].log_records[0]
        assert resource == {each.key: each.value.string_value for each in sent.resource.attributes}


def test_records_are_queued_while_the_backend_is_down(collector, backend):
    collector.start()
    backend.refuse_for_now()
    records = [sample_record(number) for number in range(1, 21)]
    _send(collector, records)
    _until(lambda: backend.received, "a first try")
    assert backend.arrived == {}
    backend.accept()
    backend.wait_for(records)


@pytest.mark.parametrize("stop", [Collector.kill, Collector.close])
def test_queued_records_survive_a_killed_or_stopped_collector(collector, backend, stop):
    collector.start()
    backend.refuse_for_now()
    records = [sample_record(number) for number in range(1, 51)]
    _send(collector, records)
    _until(lambda: backend.received, "a first try")
    stop(collector)
    assert backend.arrived == {}
    backend.accept()
    collector.start()
    backend.wait_for(records)


def test_full_queue_rejects_records_without_loss(collector, backend):
    collector.start(exporters__otlp_http__sending_queue__queue_size=10)
    backend.refuse_for_now()
    records = [sample_record(number) for number in range(1, 101)]
    with _sink(collector) as sink:
        taken = next(number for number, record in enumerate(records) if not _is_taken(sink, record))
        with pytest.raises(DeliveryFailed, match="503"):
            sink.send([records[taken]])
        assert taken >= 10
        backend.accept()
        for record in records[taken:]:
            _until(lambda record=record: _is_taken(sink, record), "room in the queue")
    backend.wait_for(records)


def _is_taken(sink, record):
    try:
        sink.send([record])
    except DeliveryFailed:
        return False
    return True


def test_permanently_rejected_records_are_dropped_and_counted(collector, backend):
    collector.start()
    backend.say(401)
    _send(collector, [sample_record()])
    assert _until(lambda: collector.metric(_FAILED_METRIC), "the count of a lost record") == 1
    backend.accept()
    later = sample_record(2)
    _send(collector, [later])
    backend.wait_for([later])
    assert set(backend.arrived) == {later.id}


def test_records_are_on_disk_before_the_response(config, package):
    """A batch processor or a queue with a time limit would lose acknowledged records after a long time."""
    read = package("yaml").safe_load(config.read_text())
    assert read["service"]["pipelines"]["logs"]["processors"] == ["memory_limiter"]
    assert read["extensions"]["file_storage"]["fsync"] is True
    for name in read["service"]["pipelines"]["logs"]["exporters"]:
        exporter = read["exporters"][name]
        assert exporter["sending_queue"]["storage"] == "file_storage"
        assert exporter["retry_on_failure"]["max_elapsed_time"] == "0s"
