"""The otlp sink: the mapping of records, requests, and the outcome of each response."""

import importlib
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pkgutil import iter_modules

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.semconv._incubating import attributes as semconv

from bridge.config.loader import read
from bridge.errors import ConfigurationError
from bridge.events.otel_resource import CONVENTIONAL_LABELS
from bridge.events.record import Approval
from bridge.sink import DeliveryFailed, DeliveryRejected, Transition, VmIdentity
from bridge.testing.http_contract import Answer
from bridge.testing.records import sample_event, sample_record
from sinks.otlp.encoding import encode_request, log_record
from sinks.otlp.sink import OtlpConfig, OtlpSink, signal_url

PREFIX = "azure.scheduled_event."


@pytest.fixture
def sink(peer):
    sink = OtlpSink(config(peer))
    yield sink
    sink.close()


def config(peer, **keys):
    return OtlpConfig(name="otlp", endpoint=f"http://{peer.address.authority}", timeout_seconds=30.0, **keys)


def plain(value):
    """Return an AnyValue as a Python value."""
    kind = value.WhichOneof("value")
    return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def attributes(pairs):
    found = {pair.key: plain(pair.value) for pair in pairs}
    assert len(found) == len(pairs), "attribute keys are unique (OpenTelemetry, Common)"
    return found


def sent(peer):
    [request] = peer.requests
    return ExportLogsServiceRequest.FromString(request.body)


def response(rejected=0, message=""):
    answer = ExportLogsServiceResponse()
    answer.partial_success.rejected_log_records = rejected
    answer.partial_success.error_message = message
    return answer.SerializeToString()


# The mapping of a record.


def test_every_field_of_one_record_is_exported(peer, sink):
    """The complete example of one record in a backend, field by field."""
    sink.send([sample_record()])
    [resource_logs] = sent(peer).resource_logs
    [scope_logs] = resource_logs.scope_logs
    [found] = scope_logs.log_records
    seen = datetime(2026, 11, 20, 11, 0, 1, 123000, tzinfo=timezone.utc)
    assert scope_logs.scope.name == "scheduled-events-bridge"
    assert datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=found.time_unix_nano // 1000) == seen
    assert found.observed_time_unix_nano == found.time_unix_nano
    assert (found.severity_number, found.severity_text) == (9, "INFO")
    assert found.event_name == "azure.scheduled_event.scheduled"
    assert found.body.string_value.startswith(
        "scheduled: Freeze of this VM (WestNO_0) and 1 more, not before 2026-11-20 11:15:00 UTC"
    )
    assert attributes(resource_logs.resource.attributes) == {
        "service.name": "scheduled-events-bridge",
        "service.version": version("scheduled-events-bridge"),
        "service.instance.id": "01a1f89c-fb80-7000-8000-00000000a5a5",
        PREFIX + "labels.team": "payments",
        "cloud.provider": "azure",
        "cloud.platform": "azure.vm",
        "cloud.region": "westeurope",
        "cloud.account.id": "11111111-2222-4333-8444-555555555555",
        "cloud.resource_id": "/subscriptions/11111111-2222-4333-8444-555555555555/resourceGroups/west/providers/"
        "Microsoft.Compute/virtualMachines/WestNO_0",
        "host.id": "f2a1c5d0-3b7e-4c1a-9d2e-6b8f0a4c7e11",
        "host.name": "WestNO_0",
        "azure.resource_group.name": "west",
    }
    assert attributes(found.attributes) == {
        "log.record.uid": sample_record().id,
        PREFIX + "record_id": sample_record().id,
        PREFIX + "transition_key": f"{1:064x}",
        PREFIX + "stream_id": "01a1f89c-fb80-7000-8000-00000000a5a5",
        PREFIX + "active_event_ids": ["C7061BAC-AFDC-4513-B24B-AA5F13A16123"],
        PREFIX + "sequence": 1,
        PREFIX + "schema_version": 1,
        PREFIX + "transition": "scheduled",
        PREFIX + "evidence": "observed",
        PREFIX + "observed_at": "2026-11-20T11:00:01.123Z",
        PREFIX + "incarnation": "3",
        PREFIX + "previous_incarnation": "2",
        PREFIX + "notice_seconds": 898.877,
        PREFIX + "affects_this_vm": True,
        PREFIX + "event_id": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        PREFIX + "event_type": "Freeze",
        PREFIX + "event_status": "Scheduled",
        PREFIX + "resource_type": "VirtualMachine",
        PREFIX + "resources": ["WestNO_0", "WestNO_1"],
        PREFIX + "not_before": "2026-11-20T11:15:00Z",
        PREFIX + "not_before_raw": "Fri, 20 Nov 2026 11:15:00 GMT",
        PREFIX + "description": "Virtual machine is being paused because of a memory-preserving Live Migration \u2603.",
        PREFIX + "event_source": "Platform",
        PREFIX + "duration_seconds": 5,
    }


@pytest.mark.parametrize(("ids", "expected"), [(("A", "B"), ["A", "B"]), ((), []), (None, "absent")])
def test_empty_active_event_ids_are_sent_and_unknown_ones_are_omitted(ids, expected):
    found = attributes(log_record(sample_record(active_event_ids=ids)).attributes)
    assert found.get(f"{PREFIX}active_event_ids", "absent") == expected


@pytest.mark.parametrize(
    ("event_type", "number", "text"),
    [
        ("Freeze", 9, "INFO"),
        ("Reboot", 13, "WARN"),
        ("Redeploy", 13, "WARN"),
        ("SpotRebalanceRecommendation", 13, "WARN"),
        ("Preempt", 17, "ERROR"),
        ("Terminate", 17, "ERROR"),
        ("Defenestrate", 13, "WARN"),
        (None, 13, "WARN"),
    ],
)
def test_severity_of_an_active_event_follows_its_type(event_type, number, text):
    found = log_record(sample_record(event=sample_event(event_type=event_type)))
    assert (found.severity_number, found.severity_text) == (number, text)


@pytest.mark.parametrize("event_type", ["Freeze", "Preempt"])
@pytest.mark.parametrize(
    ("transition", "text"),
    [
        ("completed", "INFO"),
        ("canceled", "INFO"),
        ("ended", "INFO"),
        ("approved", "INFO"),
        ("approval_refused", "WARN"),
        ("approval_failed", "WARN"),
        ("test", "INFO"),
    ],
)
def test_severity_of_any_other_record_follows_its_transition(transition, event_type, text):
    event = sample_event(event_type=event_type)
    assert log_record(sample_record(transition=Transition(transition), event=event)).severity_text == text


def test_approval_outcome_contains_the_approvers_and_the_reason():
    approval = Approval(
        source="portal",
        decision_id="d-1",
        approvers=("alice",),
        reason="quiet hour",
        result="approved",
        http_status=200,
    )
    found = attributes(
        log_record(sample_record(transition=Transition.APPROVED, event=None, approval=approval)).attributes
    )
    approved = {key.removeprefix(PREFIX): value for key, value in found.items() if "approval." in key}
    assert approved == {
        "approval.source": "portal",
        "approval.decision_id": "d-1",
        "approval.approvers": ["alice"],
        "approval.reason": "quiet hour",
        "approval.result": "approved",
        "approval.http_status": 200,
    }


@pytest.mark.parametrize("incarnation", [3, "abc123", "3"])
def test_incarnation_is_always_a_string(incarnation):
    found = attributes(log_record(sample_record(incarnation=incarnation)).attributes)
    assert found[f"{PREFIX}incarnation"] == str(incarnation)


def test_labels_set_resource_attributes_except_the_vm_identity():
    labels = {"service.name": "web", "deployment.environment.name": "prod", "host.id": "forged", "cloud.region": "mars"}
    [found] = ExportLogsServiceRequest.FromString(encode_request([sample_record(labels=labels)])).resource_logs
    values = attributes(found.resource.attributes)
    assert (values["service.name"], values["deployment.environment.name"]) == ("web", "prod")
    assert (values["host.id"], values["cloud.region"]) == ("f2a1c5d0-3b7e-4c1a-9d2e-6b8f0a4c7e11", "westeurope")


def names_of_the_semantic_conventions():
    modules = [importlib.import_module(f"{semconv.__name__}.{each.name}") for each in iter_modules(semconv.__path__)]
    return {value for module in modules for value in vars(module).values() if isinstance(value, str)}


def test_attributes_outside_the_semantic_conventions_have_the_prefix(peer, sink):
    """Each field of the VM has a value, so that each attribute of the resource appears."""
    text = dict.fromkeys(("vm_id", "resource_id", "subscription_id", "resource_group", "location", "zone"), "x")
    vm = VmIdentity(name="a", scale_set="s", placement_group_id="5a7e", tags={"cost center": "47", "empty": ""}, **text)
    labels = {"team": "payments", "my.team": "sre", **dict.fromkeys(CONVENTIONAL_LABELS, "x")}
    sink.send([sample_record(vm=vm, labels=labels)])
    [found] = sent(peer).resource_logs
    resource = attributes(found.resource.attributes)
    names = {*resource, *attributes(found.scope_logs[0].log_records[0].attributes)}
    assert {name for name in names if not name.startswith(PREFIX)} <= names_of_the_semantic_conventions()
    assert {name.removeprefix(PREFIX): value for name, value in resource.items() if name.startswith(PREFIX)} == {
        "labels.team": "payments",
        "labels.my.team": "sre",
        "vm.scale_set": "s",
        "vm.placement_group_id": "5a7e",
        "vm.tags.cost center": "47",
    }


def test_batch_keeps_its_order():
    other = VmIdentity(name="renamed")
    batch = [sample_record(1), sample_record(2, vm=other), sample_record(3)]
    found = ExportLogsServiceRequest.FromString(encode_request(batch)).resource_logs
    sequences = [
        [attributes(record.attributes)[f"{PREFIX}sequence"] for record in group.scope_logs[0].log_records]
        for group in found
    ]
    assert sequences == [[1], [2], [3]]


# The request.


def test_gzip_is_used_if_configured(peer):
    raw = []
    peer.reply(lambda request: raw.append(request) or Answer(status=200))
    sink = OtlpSink(config(peer, compression="gzip"))
    sink.send([sample_record()])
    sink.close()
    assert raw[0].headers["content-encoding"] == "gzip"
    assert int(raw[0].headers["content-length"]) < len(raw[0].body)
    assert raw[0].body == encode_request([sample_record()])


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/logs"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/logs"),
        ("https://otlp.example.net/tenant", "https://otlp.example.net/tenant/v1/logs"),
        ("https://otlp.example.net/v1/logs", "https://otlp.example.net/v1/logs"),
        ("https://otlp.example.net/v1/logs/", "https://otlp.example.net/v1/logs"),
        ("https://otlp.example.net/otlp?tenant=1", "https://otlp.example.net/otlp/v1/logs?tenant=1"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/logs"),
    ],
)
def test_signal_path_is_added_once(endpoint, url):
    assert signal_url(endpoint, "logs") == url


def test_password_in_the_endpoint_is_rejected_and_is_not_in_the_error():
    with pytest.raises(ConfigurationError, match="headers_file") as caught:
        read({"sinks": [{"type": "otlp", "endpoint": "https://me:hunter2@otlp.example.net"}]})
    assert "hunter2" not in str(caught.value)


# The responses.


@pytest.mark.parametrize(
    "answer",
    [
        Answer(status=200),
        Answer(status=202),
        Answer(status=204),
        Answer(status=200, body=response(0, "please upgrade")),
        Answer(status=200, body=response(-1, "nonsense")),
        Answer(status=200, body=b"OK", content_type="text/plain"),
        Answer(status=200, body=b"\n\n", content_type="text/plain"),
        Answer(status=200, body=b"\xff\xfe no protobuf"),
        Answer(status=200, body=b'{"partialSuccess": {}}'),
        Answer(status=200, body=b'{"partialSuccess": {"errorMessage": "please upgrade"}}'),
        Answer(status=200, body=b'{"partialSuccess": {"rejectedLogRecords": "many"}}'),
        Answer(status=200, body=b'{"code": 200}'),
        Answer(status=200, body=b"[]"),
        Answer(status=200, body=b"[" * 20_000),
        Answer(status=200, body=b'{"partialSuccess": {"rejectedLogRecords": 1e999}}'),
    ],
    ids=lambda answer: f"{answer.status} {answer.body[:20]!r}",
)
def test_2xx_without_rejections_is_delivered(peer, sink, answer):
    peer.reply(lambda _: answer)
    sink.send([sample_record()])


def test_warning_of_the_receiver_is_logged_once(peer, sink, caplog):
    peer.say(200, body=response(0, "please upgrade"))
    for number in (1, 2):
        sink.send([sample_record(number)])
    assert [record.getMessage() for record in caplog.records] == [
        "The OTLP receiver accepted the records with a warning: please upgrade"
    ]


def test_partial_success_with_rejections_rejects_the_whole_batch(peer, sink):
    """The agent parks all records, because the response does not name the rejected records."""
    peer.say(200, body=response(1, "the record is too old"))
    batch = [sample_record(1), sample_record(2)]
    with pytest.raises(DeliveryRejected, match="rejected 1 of the log records: the record is too old") as caught:
        sink.send(batch)
    assert caught.value.records == tuple(batch)


def test_secret_echoed_by_the_receiver_is_masked_even_if_truncated(peer, tmp_path):
    (tmp_path / "token").write_text("secret-token-4711")
    sink = OtlpSink(config(peer, bearer_token_file=str(tmp_path / "token")))
    peer.say(200, body=response(1, "x" * 250 + "secret-token-4711"))
    with pytest.raises(DeliveryRejected) as caught:
        sink.send([sample_record()])
    sink.close()
    assert "secret" not in str(caught.value).replace("<secret>", "").replace("<secre", "")


def test_check_sends_an_empty_request(peer, sink):
    sink.check()
    [request] = peer.requests
    assert ExportLogsServiceRequest.FromString(request.body) == ExportLogsServiceRequest()
    assert (request.path, request.headers["content-length"]) == ("/v1/logs", "0")


def test_check_rejects_a_web_page(peer, sink):
    peer.reply(lambda _: Answer(status=200, body=b"<html>", content_type="text/html; charset=utf-8"))
    with pytest.raises(DeliveryFailed, match="web page"):
        sink.check()
