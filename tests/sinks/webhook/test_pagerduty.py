"""Records as PagerDuty events: one incident per event, and change events for events without a possible action."""

import json
from datetime import datetime, timezone

import msgspec
import pytest

from bridge.sink import DeliveryFailed, DeliveryRejected, Secret, Transition, encode
from bridge.testing.http_contract import HttpPeer
from bridge.testing.records import VM, sample_event, sample_record
from sinks.webhook.config import WebhookConfig
from sinks.webhook.pagerduty import DEFAULT_URL, PagerDutyFormat
from sinks.webhook.sink import WebhookSink

ROUTING_KEY = "R0123456789ABCDEFGHIJKLMNOPQRSTU"
CHANGE_URL = "https://events.pagerduty.com/v2/change/enqueue"
NOW = datetime(2026, 11, 20, 11, 0, 2, tzinfo=timezone.utc)


def message(urgent_as="change", **fields):
    """Return the URL and the body for a record with *fields*."""
    made = PagerDutyFormat(Secret(key="routing_key", env="K", environ={"K": ROUTING_KEY}), urgent_as=urgent_as)
    sent = made.message(DEFAULT_URL, sample_record(**fields), NOW)
    body = json.loads(sent.body)
    assert body["routing_key"] == ROUTING_KEY
    return sent.url, body


@pytest.mark.parametrize("transition", [Transition.SCHEDULED, Transition.STARTED, Transition.UPDATED])
def test_open_event_triggers_an_incident(transition):
    record = sample_record(transition=transition)
    url, body = message(transition=transition)
    assert (url, body["event_action"]) == (DEFAULT_URL, "trigger")
    assert body["dedup_key"] == "azure-scheduled-event/C7061BAC-AFDC-4513-B24B-AA5F13A16123"
    assert body["payload"]["severity"] == "info"
    assert body["payload"]["source"] == VM.resource_id
    assert body["payload"]["timestamp"] == record.observed_at
    assert body["payload"]["custom_details"] == msgspec.json.decode(encode(record))
    assert body["payload"]["summary"].startswith("Freeze of WestNO_0, WestNO_1")


@pytest.mark.parametrize("transition", [Transition.COMPLETED, Transition.CANCELED, Transition.ENDED])
def test_ended_event_resolves_the_same_incident(transition):
    url, body = message(transition=transition)
    assert (url, body["event_action"]) == (DEFAULT_URL, "resolve")
    assert body["dedup_key"] == message()[1]["dedup_key"]


@pytest.mark.parametrize("event_type", ["Preempt", "Terminate"])
@pytest.mark.parametrize("transition", [Transition.SCHEDULED, Transition.STARTED, Transition.COMPLETED])
def test_preempt_and_terminate_are_change_events_by_default(event_type, transition):
    event = sample_event(event_type=event_type)
    url, body = message(event=event, transition=transition)
    assert url == CHANGE_URL
    assert set(body) == {"routing_key", "payload"}
    url, body = message("alert", event=event, transition=transition)
    assert (url, "event_action" in body) == (DEFAULT_URL, True)


def test_event_that_becomes_a_change_event_resolves_its_incident():
    url, body = message(
        transition=Transition.UPDATED,
        event=sample_event(event_type="Terminate"),
        previous={"event_type": "Redeploy"},
        changed=("event_type",),
    )
    assert (url, body["event_action"]) == (DEFAULT_URL, "resolve")


def test_record_triggers_no_incident():
    assert message("alert", transition=Transition.TEST)[0] == CHANGE_URL


@pytest.mark.parametrize(
    "transition",
    [Transition.HEARTBEAT, Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED],
)
def test_heartbeats_and_approvals_cause_no_request(transition):
    made = PagerDutyFormat(Secret(key="routing_key", env="K", environ={"K": ROUTING_KEY}), urgent_as="change")
    for event in (None, sample_event()):
        record = sample_record(transition=transition, event=event)
        assert made.message(DEFAULT_URL, record, NOW) is None


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (202, b'{"status":"success"}', None),
        (400, b'{"status":"invalid event","errors":["summary is missing"]}', DeliveryRejected),
        (400, b'{"status":"invalid event","errors":["Length of \'routing_key\' is incorrect"]}', DeliveryFailed),
        (400, b'{"status":"Invalid routing key"}', DeliveryFailed),
        (429, b"", DeliveryFailed),
        (500, b"", DeliveryFailed),
    ],
)
def test_responses_of_pagerduty_determine_the_outcome(monkeypatch, status, body, error):
    monkeypatch.setenv("ROUTING_KEY", ROUTING_KEY)
    with HttpPeer() as peer:
        url = f"http://{peer.address.authority}/v2/enqueue"
        sink = WebhookSink(WebhookConfig(url=url, format="pagerduty", routing_key_env="ROUTING_KEY"))
        peer.say(status, body=body)
        if error is None:
            sink.send([sample_record()])
        else:
            with pytest.raises(error) as raised:
                sink.send([sample_record()])
            assert getattr(raised.value, "needs_attention", False) == (b"outing" in body)
            assert ROUTING_KEY not in str(raised.value)
        sink.send([sample_record(transition=Transition.HEARTBEAT, event=None)])
        sink.close()
        assert [request.path for request in peer.requests] == ["/v2/enqueue"]
