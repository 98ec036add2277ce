"""The push of the agent's metrics to an OTLP receiver: a receiver that fails never affects the agent."""

import threading
from contextlib import ExitStack

import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as service
from slow_peer import SlowPeer, drip_body
from waiting import until

from bridge.agent.agent import Agent
from bridge.cli.commands import commands
from bridge.config.loader import load
from bridge.testing import EventSpec, Simulator
from bridge.testing.http_peer import HttpPeer
from bridge.testing.simulator.imds_api import Answer

PREFIX = "scheduled_events_bridge_"
_PARTIAL = service.ExportMetricsServiceResponse(
    partial_success={"rejected_data_points": 2, "error_message": "key=hush is too old"}
).SerializeToString()


@pytest.fixture
def receiver():
    with HttpPeer() as peer:
        yield peer


@pytest.fixture
def slow_receiver():
    peer = SlowPeer(drip_body)
    yield peer
    peer.close()


@pytest.fixture
def azure():
    with Simulator(rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def settings_for(tmp_path, azure, receiver):
    def make(keys="interval_seconds = 1", endpoint=None, environ=None, rest=""):
        path = tmp_path / "config.toml"
        table = "" if keys is None else f'[telemetry]\notlp_endpoint = "{endpoint or url_of(receiver)}"\n{keys}\n'
        path.write_text(
            f'stop_grace_seconds = 1\n[imds]\nendpoint = "{azure.endpoint}"\npoll_interval_seconds = 0.2\n'
            f'[status]\nlisten = ""\n{table}{rest}[labels]\nteam = "ops"\n'
        )
        return load(path, environ or {})

    return make


@pytest.fixture
def start(tmp_path):
    with ExitStack() as running:

        def begin(settings):
            agent = Agent(settings, tmp_path / "state")
            agent.start()
            running.callback(stop, agent)
            return agent

        yield begin


def stop(agent):
    if agent.poll_thread.is_alive():
        agent.stop()


def url_of(peer):
    return f"http://{peer.address.authority}"


def pushes(peer):
    return [service.ExportMetricsServiceRequest.FromString(each.body) for each in peer.requests]


def value_of(push, name):
    metrics = {each.name: each for each in push.resource_metrics[0].scope_metrics[0].metrics}
    metric = metrics[PREFIX + name]
    return sum(point.as_double for point in getattr(metric, metric.WhichOneof("data")).data_points)


def resource_of(push):
    return {each.key: each.value.string_value for each in push.resource_metrics[0].resource.attributes}


def test_stop_pushes_the_final_totals_with_the_resource_of_the_logs(start, settings_for, receiver, azure):
    agent = start(settings_for("interval_seconds = 3600"))
    azure.world.add_event(EventSpec(event_type="Freeze"))
    until(lambda: b'sink_delivered_total{sink="stdout"} 1.0' in agent.metrics.exposition())
    agent.stop()
    last = pushes(receiver)[-1]
    assert receiver.requests[-1].path == "/v1/metrics"
    assert value_of(last, "records_total") == 1
    assert value_of(last, "sink_delivered_total") == 1
    found = resource_of(last)
    assert found["service.name"] == "scheduled-events-bridge"
    assert found["host.name"] == agent.vm_name()
    assert found["azure.scheduled_event.labels.team"] == "ops"


def test_instance_id_is_new_at_each_start_and_totals_of_the_disk_continue(start, settings_for, receiver, azure):
    first = start(settings_for())
    azure.world.add_event(EventSpec(event_type="Freeze"))
    until(lambda: b'sink_delivered_total{sink="stdout"} 1.0' in first.metrics.exposition())
    first.stop()
    start(settings_for()).stop()
    one, two = pushes(receiver)[0], pushes(receiver)[-1]
    assert resource_of(one)["service.instance.id"] != resource_of(two)["service.instance.id"]
    assert value_of(two, "sink_delivered_total") == 1
    starts = {
        point.start_time_unix_nano
        for push in (one, two)
        for metric in push.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == f"{PREFIX}sink_delivered_total"
        for point in metric.sum.data_points
    }
    assert len(starts) == 1


def test_reload_replaces_the_receiver_and_ends_the_push(start, settings_for, receiver):
    agent = start(settings_for())
    until(lambda: receiver.requests)
    with HttpPeer() as other:
        agent.reload(settings_for(endpoint=url_of(other)))
        until(lambda: other.requests)
        agent.reload(settings_for(keys=None))
        until(lambda: not any(each.name == "telemetry" for each in threading.enumerate()))


@pytest.mark.parametrize("failure", ["down", "silent", "slow", "refusing"])
def test_failing_receiver_delays_no_poll_and_no_stop(
    *, start, settings_for, receiver, slow_receiver, azure, failure, caplog
):
    endpoint = None
    if failure == "down":
        receiver.close()
    elif failure == "slow":
        endpoint = slow_receiver.url
    elif failure == "silent":
        receiver.stay_silent()
    else:
        receiver.say(503)
    agent = start(settings_for(endpoint=endpoint, environ={"OTEL_EXPORTER_OTLP_TIMEOUT": "300"}))
    until(lambda: "The metrics were not pushed" in caplog.text)
    azure.world.add_event(EventSpec(event_type="Freeze"))
    until(lambda: b'sink_delivered_total{sink="stdout"} 1.0' in agent.metrics.exposition())
    agent.stop()
    assert caplog.text.count("The metrics were not pushed") == 1  # repetitions are only counted


def test_headers_from_a_variable_are_sent_and_warnings_hide_secrets(start, settings_for, receiver, caplog, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=key%3Dhush, x-team=ops")
    receiver.say(200, body=_PARTIAL)
    environ = {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=key%3Dhush, x-team=ops"}
    start(settings_for(environ=environ))
    until(lambda: "rejected 2 data points" in caplog.text)
    headers = {name.lower(): value for name, value in receiver.requests[0].headers.items()}
    assert (headers["api-key"], headers["x-team"]) == ("key=hush", "ops")
    assert "hush" not in caplog.text


@pytest.mark.parametrize(("status", "text"), [(200, ""), (404, "FAILED: "), (302, "FAILED: ")])
def test_check_config_tries_the_receiver(*, settings_for, receiver, tmp_path, status, text):
    receiver.reply(lambda _request: Answer(status=status))
    settings_for(rest=f'[state]\ndirectory = "{tmp_path / "state"}"\n')
    done = CliRunner().invoke(
        commands, ["check-config", "--config", str(tmp_path / "config.toml"), "--connect"], catch_exceptions=False
    )
    assert f"Telemetry: {text}{url_of(receiver)} " in " ".join(done.output.split())
    assert [each.body for each in receiver.requests] == [b""]
