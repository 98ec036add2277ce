"""The otlp sink with signal = "traces": one trace per event, with IDs that never change."""

import hashlib

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bridge.config.loader import read
from bridge.delivery.router import Router
from bridge.errors import ConfigurationError
from bridge.sink import DeliveryRejected, Impact, Pause, TimelineEntry, Transition, VmIdentity
from bridge.testing.http_contract import Answer
from bridge.testing.records import VM, sample_event, sample_record
from sinks.otlp.sink import OtlpConfig, OtlpSink

PREFIX = "azure.scheduled_event."
ANNOUNCED, APPROVED, STARTED, ENDED = (f"2026-11-20T11:{minute}:00.000Z" for minute in ("00", "05", "10", "12"))
SECOND = 1_000_000_000
TIMELINE = (
    TimelineEntry(transition=Transition.SCHEDULED, observed_at=ANNOUNCED),
    TimelineEntry(transition=Transition.APPROVED, observed_at=APPROVED, decision_id="d-1"),
    TimelineEntry(transition=Transition.STARTED, observed_at=STARTED),
)
PAUSE = Pause(at="2026-11-20T11:11:00.000Z", seconds=3.5, late_seconds=3.5, step_seconds=0.0, source="timer")


def ending(**fields):
    values = {"transition": Transition.COMPLETED, "observed_at": ENDED, "timeline": TIMELINE, "notice_seconds": None}
    return sample_record(**{**values, **fields})


@pytest.fixture
def send(peer):
    sink = OtlpSink(OtlpConfig(name="traces", endpoint=f"http://{peer.address.authority}", signal="traces"))

    def sent(*batch):
        sink.send(batch)
        assert sink.sent_nothing is (not peer.requests)
        found = [ExportTraceServiceRequest.FromString(each.body) for each in peer.requests]
        return [
            (span, {each.key: each.value.string_value for each in resource.resource.attributes})
            for request in found
            for resource in request.resource_spans
            for span in resource.scope_spans[0].spans
        ]

    yield sent
    sink.close()


def attributes(of):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


def test_span_starts_at_started_and_ends_with_the_event(send, peer):
    [(span, resource)] = send(ending())
    assert peer.requests[0].path == "/v1/traces"
    assert span.name == "Freeze"
    assert span.end_time_unix_nano - span.start_time_unix_nano == 120 * SECOND
    found = attributes(span)
    assert (found[PREFIX + "announced_at"], found[PREFIX + "notice_seconds"]) == (ANNOUNCED, 600.0)
    assert found[PREFIX + "transition"] == "completed"
    assert PREFIX + "timeline" not in found
    [event] = span.events
    assert (event.name, attributes(event)) == ("approved", {PREFIX + "approval.decision_id": "d-1"})
    assert span.start_time_unix_nano - event.time_unix_nano == 300 * SECOND
    assert (resource["host.name"], resource["service.instance.id"]) == ("WestNO_0", ending().stream_id)


def test_pause_of_known_length_is_a_child_span(send):
    unknown = Pause(at=STARTED, seconds=None, late_seconds=9.0, step_seconds=0.0, source="timer", reason="ambiguous")
    (parent, _), (child, _) = send(ending(impact=Impact(pauses=(PAUSE, unknown), longest_seconds=3.5)))
    assert (child.name, child.parent_span_id, child.trace_id) == ("pause", parent.span_id, parent.trace_id)
    assert child.end_time_unix_nano - child.start_time_unix_nano == 3.5 * SECOND
    assert attributes(child)[PREFIX + "pause.source"] == "timer"
    assert attributes(parent)[PREFIX + "impact.longest_seconds"] == 3.5


def test_ids_are_hashes_of_the_event_and_the_vm(send):
    [(span, _)] = send(ending())
    record = ending()
    assert span.trace_id == hashlib.sha256(record.event_key.encode()).digest()[:16]
    name = b"\0".join((span.trace_id, record.vm.vm_id.lower().encode(), b"event"))
    assert span.span_id == hashlib.sha256(name).digest()[:8]


def test_vms_of_an_event_share_one_trace(send):
    vms = [VmIdentity(name=f"vm_{number}", vm_id=f"00000000-0000-4000-8000-{number:012}") for number in range(20)]
    spans = [span for span, _ in send(*(ending(vm=vm) for vm in vms))]
    assert len({span.trace_id for span in spans}) == 1
    assert len({span.span_id for span in spans}) == 20
    assert all(span.span_id != bytes(8) for span in spans)


def test_log_records_of_the_event_carry_its_trace_id(peer):
    sink = OtlpSink(OtlpConfig(name="logs", endpoint=f"http://{peer.address.authority}"))
    sink.send([sample_record()])
    sink.close()
    logs = ExportLogsServiceRequest.FromString(peer.requests[0].body).resource_logs[0].scope_logs[0].log_records
    assert logs[0].trace_id == hashlib.sha256(sample_record().event_key.encode()).digest()[:16]


@pytest.mark.parametrize(
    "fields",
    [
        {"event": sample_event(event_type="Preempt")},
        {"event": sample_event(event_type="Terminate")},
        {"timeline": TIMELINE[:1], "transition": Transition.CANCELED},
        {"timeline": None},
    ],
)
def test_event_without_an_observed_start_or_without_its_vm_has_no_span(send, peer, fields):
    assert send(ending(**fields)) == []
    assert not peer.requests


def test_send_test_sends_a_span(send):
    [(span, _)] = send(sample_record(transition=Transition.TEST))
    assert span.start_time_unix_nano == span.end_time_unix_nano


def test_clock_set_back_creates_no_negative_span(send):
    [(span, _)] = send(ending(observed_at=ANNOUNCED))
    assert span.start_time_unix_nano == span.end_time_unix_nano


def test_sink_receives_only_endings():
    [sink] = read({"sinks": [{"type": "otlp", "signal": "traces"}]}).sinks
    route = Router([sink.config])
    assert [route(sample_record(transition=each), VM.name, {"otlp"}) for each in Transition if each.is_ending] == [
        ["otlp"]
    ] * 3
    assert not any(
        route(sample_record(transition=each), VM.name, {"otlp"}) for each in Transition if not each.is_ending
    )


def test_transitions_without_an_ending_are_rejected():
    with pytest.raises(ConfigurationError, match="needs a transition that ends an event: completed, canceled, ended"):
        read({"sinks": [{"type": "otlp", "signal": "traces", "transitions": ["started"]}]})


def test_rejected_spans_are_parked(send, peer):
    peer.reply(lambda _request: Answer(status=200, body=b"\x0a\x02\x08\x01"))  # partial_success: rejected_spans = 1
    with pytest.raises(DeliveryRejected, match="rejected 1 of the spans"):
        send(ending())
