"""Records as alerts: constant labels during an event, an end time in every alert, and clock differences."""

import json
from datetime import datetime, timedelta, timezone

import msgspec
import pytest

from bridge.sink import DeliveryFailed, Transition, VmIdentity, parse_time
from bridge.testing.http_contract import HttpPeer
from bridge.testing.records import VM, sample_event, sample_record
from sinks.webhook.alertmanager import AlertmanagerFormat, alerts_url
from sinks.webhook.config import WebhookConfig
from sinks.webhook.sink import WebhookSink

NOW = datetime(2026, 11, 20, 11, 0, 2, tzinfo=timezone.utc)
NOT_BEFORE = NOW + timedelta(minutes=15)
ENDS = (Transition.COMPLETED, Transition.CANCELED, Transition.ENDED)


def alerts(made=None, *, now=NOW, **fields):
    message = (made or AlertmanagerFormat()).message("http://alerts:9093", sample_record(**fields), now)
    return json.loads(message.body)


def test_alert_contains_the_event_the_vm_and_the_times():
    (alert,) = alerts(event=sample_event(not_before=NOT_BEFORE))
    assert alert["labels"] == {
        "alertname": "AzureScheduledEvent",
        "event_id": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "event_type": "Freeze",
        "event_source": "Platform",
        "severity": "info",
        "vm_name": "WestNO_0",
        "region": "westeurope",
        "resource_group": "west",
        "subscription_id": VM.subscription_id,
        "team": "payments",
    }
    annotations = alert["annotations"]
    assert annotations["summary"] == (
        "Freeze of WestNO_0, WestNO_1 scheduled, not before 2026-11-20 11:15:02 UTC, reported by WestNO_0"
    )
    assert annotations["not_before"] == "2026-11-20T11:15:02.000Z"
    assert (annotations["transition"], annotations["evidence"]) == ("scheduled", "observed")
    assert all(isinstance(text, str) and text for text in annotations.values())
    assert alert["startsAt"] == sample_record().observed_at


@pytest.mark.parametrize(("event_type", "severity"), [("Freeze", "info"), ("Preempt", "critical")])
def test_labels_do_not_change_during_an_event(event_type, severity):
    scheduled = sample_event(event_type=event_type, not_before=NOT_BEFORE)
    started = sample_event(event_type=event_type, event_status="Started", not_before=None)
    postponed = sample_event(event_type=event_type, not_before=NOT_BEFORE + timedelta(hours=1))
    lives = [
        alerts(event=scheduled),
        alerts(transition=Transition.UPDATED, event=postponed),
        alerts(transition=Transition.STARTED, event=started),
        *(alerts(transition=each, event=started) for each in ENDS),
    ]
    assert lives[0][0]["labels"]["severity"] == severity
    assert all(life[0]["labels"] == lives[0][0]["labels"] for life in lives)
    assert all(len(life) == 1 for life in lives)


def test_alert_links_to_the_vm_in_the_azure_portal_of_its_cloud():
    hosts = {"westeurope": "portal.azure.com", "usgovvirginia": "portal.azure.us", "chinaeast2": "portal.azure.cn"}
    for location, host in hosts.items():
        vm = msgspec.structs.replace(VM, location=location, resource_id=f"{VM.resource_id}(1)")
        (alert,) = alerts(vm=vm)
        assert alert["generatorURL"] == f"https://{host}/#@/resource{VM.resource_id}%281%29"
    assert "generatorURL" not in alerts(vm=VmIdentity(name="WestNO_0"))[0]


def test_selected_tags_become_labels_without_replacing_built_in_labels():
    vm = msgspec.structs.replace(VM, tags={"Cost-Centre": "4711", "severity": "page", "secret": "s", "team": "web"})
    (alert,) = alerts(AlertmanagerFormat(tag_labels=("cost-centre", "severity", "absent", "team")), vm=vm)
    assert alert["labels"]["cost_centre"] == "4711"
    assert alert["labels"]["severity"] == "info"
    assert alert["labels"]["team"] == "payments"  # the label of the configuration takes precedence over the tag
    assert not {"secret", "absent"} & set(alert["labels"])


@pytest.mark.parametrize("transition", ENDS)
def test_ended_event_resolves_the_alert_immediately(transition):
    (alert,) = alerts(transition=transition, observed_at="2026-11-20T11:00:02.000Z")
    ends_at = parse_time(alert["endsAt"])
    assert ends_at == NOW - timedelta(seconds=10)
    assert parse_time(alert["startsAt"]) <= ends_at  # otherwise, Alertmanager rejects the alert


def test_changed_event_type_resolves_the_alert_with_the_old_labels():
    before, after = alerts(
        transition=Transition.UPDATED,
        event=sample_event(event_type="Freeze"),
        previous={"event_status": "Scheduled", "not_before": None, "event_type": "Reboot"},
        changed=("event_type",),
    )
    assert (before["labels"]["event_type"], before["labels"]["severity"]) == ("Reboot", "warning")
    assert parse_time(before["endsAt"]) < NOW
    assert (after["labels"]["event_type"], after["labels"]["severity"]) == ("Freeze", "info")
    assert parse_time(after["endsAt"]) > NOW


def test_configured_labels_are_sanitized_and_replace_no_built_in_labels():
    (alert,) = alerts(labels={"cost-centre": "12", "0day": "x", "severity": "page", "empty": ""})
    assert alert["labels"]["cost_centre"] == "12"
    assert alert["labels"]["_0day"] == "x"
    assert alert["labels"]["severity"] == "info"
    assert "empty" not in alert["labels"]


@pytest.mark.parametrize(
    "transition",
    [Transition.HEARTBEAT, Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED],
)
def test_heartbeats_and_approvals_are_delivered_without_a_request(transition):
    with HttpPeer() as peer:
        sink = WebhookSink(WebhookConfig(url=f"http://{peer.address.authority}", format="alertmanager"))
        for event in (None, sample_event()):
            sink.send([sample_record(transition=transition, event=event)])
        sink.close()
        assert peer.requests == ()


def test_alert_expires_after_five_minutes():
    (alert,) = alerts(transition=Transition.TEST)
    assert parse_time(alert["endsAt"]) == NOW + timedelta(minutes=5)
    assert "nothing happens" in alert["annotations"]["summary"]


@pytest.mark.parametrize("base", ["http://a:9093", "http://a:9093/", "http://a:9093/api/v2/alerts"])
def test_base_url_and_full_url_are_both_accepted(base):
    assert alerts_url(base) == "http://a:9093/api/v2/alerts"
    assert alerts_url("http://a/prefix") == "http://a/prefix/api/v2/alerts"


def test_check_requests_the_status_of_alertmanager(peer):
    sink = WebhookSink(WebhookConfig(url=f"http://{peer.address.authority}/", format="alertmanager"))
    peer.say(200, body=b'{"versionInfo": {"version": "0.25.0"}}')
    sink.check()
    assert [(request.method, request.path) for request in peer.requests] == [("GET", "/api/v2/status")]
    peer.say(200, body=b"<html>some other program</html>")
    with pytest.raises(DeliveryFailed, match="does not respond like Alertmanager"):
        sink.check()
    peer.say(404)
    with pytest.raises(DeliveryFailed, match="Check the URL"):
        sink.check()
    sink.close()
