"""OpenTelemetry's own variables, for the keys that a table of type otlp leaves out."""

from __future__ import annotations

import logging
import os

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from bridge.config.loader import read
from bridge.errors import ConfigurationError
from bridge.sink import DeliveryFailed
from bridge.testing.http_contract import Answer, HttpPeer
from bridge.testing.records import sample_record

PREFIX = "OTEL_EXPORTER_OTLP_"


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in [each for each in os.environ if each.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def peer():
    with HttpPeer() as peer:
        yield peer


@pytest.fixture
def setenv(monkeypatch):
    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name if name.startswith("OTEL_") else PREFIX + name, value)

    return set_all


def config(**table):
    return read({"sinks": [{"type": "otlp", **table}]}).sinks[0].config


def sent(peer, **table):
    """Return the one request that a sink of *table* makes for a record."""
    sink = read({"sinks": [{"type": "otlp", "timeout_seconds": 5.0, **table}]}).sinks[0].build()
    sink.send([sample_record()])
    sink.close()
    [request] = peer.requests
    return request


def resource(request):
    [logs] = ExportLogsServiceRequest.FromString(request.body).resource_logs
    return {each.key: each.value.string_value for each in logs.resource.attributes}


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://127.0.0.1:4318/v1/logs"),
        ({"ENDPOINT": "https://c.example.net:4318"}, "https://c.example.net:4318/v1/logs"),
        ({"ENDPOINT": "https://c.example.net/otlp/"}, "https://c.example.net/otlp/v1/logs"),
        (
            {"ENDPOINT": "https://c.example.net", "LOGS_ENDPOINT": "https://logs.example.net/in"},
            "https://logs.example.net/in",
        ),
        ({"ENDPOINT": "https://c.example.net", "LOGS_ENDPOINT": " "}, "https://c.example.net/v1/logs"),
        ({"LOGS_ENDPOINT": "https://logs.example.net"}, "https://logs.example.net/"),
        ({"ENDPOINT": "https://c.example.net", "PROTOCOL": "http/json"}, "https://c.example.net/v1/logs"),
    ],
)
def test_endpoint_is_that_of_the_environment(setenv, variables, url):
    setenv(**variables)
    assert config().logs_url() == url


def test_key_of_the_table_takes_precedence_over_the_environment(setenv, peer):
    setenv(ENDPOINT="https://other.example.net", HEADERS="x-key=1", PROTOCOL="grpc")
    url = f"http://{peer.address.authority}"
    assert config(endpoint=url).logs_url() == f"{url}/v1/logs"
    assert "x-key" not in sent(peer, endpoint=url, headers={"x-own": "2"}).headers


def test_headers_of_the_environment_are_sent_decoded_and_after_the_tables_token(setenv, peer, tmp_path):
    setenv(HEADERS="x-tenant=a%20b%3Dc, authorization=Bearer%20environment,x-two=2")
    (tmp_path / "token").write_text("of-the-table")
    request = sent(peer, endpoint=f"http://{peer.address.authority}", bearer_token_file=str(tmp_path / "token"))
    assert (request.headers["x-tenant"], request.headers["x-two"]) == ("a b=c", "2")
    assert request.headers["authorization"] == "Bearer of-the-table"


def test_headers_of_the_environment_stay_out_of_messages(setenv, peer):
    setenv(HEADERS="x-honeycomb-team=hunter2-4711")
    peer.say(401)
    sink = read({"sinks": [{"type": "otlp", "endpoint": f"http://{peer.address.authority}"}]}).sinks[0].build()
    with pytest.raises(DeliveryFailed) as caught:
        sink.send([sample_record()])
    sink.close()
    assert peer.requests[0].headers["x-honeycomb-team"] == "hunter2-4711"
    assert "hunter2" not in str(caught.value)


def test_token_of_the_environment_is_masked_without_its_scheme_too(setenv, peer):
    setenv(HEADERS="Authorization=Bearer%20hunter2-4711")
    peer.reply(lambda request: Answer(status=401, body=b"unknown: " + request.headers["authorization"][7:].encode()))
    sink = read({"sinks": [{"type": "otlp", "endpoint": f"http://{peer.address.authority}"}]}).sinks[0].build()
    with pytest.raises(DeliveryFailed, match="unknown: ") as caught:
        sink.send([sample_record()])
    sink.close()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("headers", ["hunter2", "x-key=a%0Ahunter2", "content-length=4711", "=hunter2"])
def test_headers_that_cannot_be_sent_are_left_out_unseen(setenv, peer, headers, caplog):
    setenv(HEADERS=headers)
    with caplog.at_level(logging.WARNING):
        request = sent(peer, endpoint=f"http://{peer.address.authority}")
    assert "x-key" not in request.headers
    assert PREFIX + "HEADERS" in caplog.text
    assert "hunter2" not in caplog.text


def test_endpoint_of_grpc_is_a_mistake_that_names_the_variables(setenv):
    setenv(ENDPOINT="http://127.0.0.1:4317", PROTOCOL="grpc")
    with pytest.raises(ConfigurationError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT.*OTEL_EXPORTER_OTLP_PROTOCOL"):
        config()
    assert config(endpoint="http://127.0.0.1:4318").logs_url() == "http://127.0.0.1:4318/v1/logs"


def test_endpoint_of_the_environment_that_is_no_url_is_a_mistake(setenv):
    setenv(ENDPOINT="https://me:hunter2@c.example.net")
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_ENDPOINT") as caught:
        config()
    assert "hunter2" not in str(caught.value)


def test_resource_is_what_the_environment_adds_but_for_who_the_vm_is(setenv, peer):
    setenv(
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=prod%2Cwest,service.name=a,host.id=forged,team=other",
        OTEL_SERVICE_NAME="events",
    )
    found = resource(sent(peer, endpoint=f"http://{peer.address.authority}"))
    assert found["deployment.environment.name"] == "prod,west"
    assert (found["service.name"], found["team"]) == ("events", "payments")  # team is a label of the record
    assert found["host.id"] != "forged"


def test_resource_attributes_that_are_written_wrong_are_left_out_whole(setenv, peer, caplog):
    setenv(OTEL_RESOURCE_ATTRIBUTES="a=1,b")
    with caplog.at_level(logging.WARNING):
        found = resource(sent(peer, endpoint=f"http://{peer.address.authority}"))
    assert "a" not in found
    assert "OTEL_RESOURCE_ATTRIBUTES" in caplog.text
