"""Metrics: consistent in every scrape, cheap on every poll, and never labeled by event ID."""

import re
from datetime import datetime, timezone

import pytest
from listed_outbox import CLOCK, NOW, ListedOutbox
from prometheus_client.parser import text_string_to_metric_families

from bridge.events.event import Document, ScheduledEvent
from bridge.metrics.metrics import PREFIX, Metrics

LABELS = {"sink", "reason", "transition", "event_type", "event_status", "result", "version", "python", "le"}


def samples(metrics):
    """Return every sample of one scrape, as ``name{label="value"}`` without the prefix."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix(PREFIX) + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def event(event_type="Freeze", event_status="Scheduled", event_id=None):
    return ScheduledEvent(event_type=event_type, event_status=event_status, event_id=event_id)


@pytest.fixture
def metrics():
    return Metrics(CLOCK)


def test_polls_are_counted_by_result(metrics):
    for result in ("ok", "unreachable", "ok"):
        metrics.polled(result, duration_seconds=0.5)
    metrics.good_poll(1_800_000_000.5, Document(incarnation=7))
    seen = samples(metrics)
    assert (seen['polls_total{result="ok"}'], seen['polls_total{result="unreachable"}']) == (2, 1)
    assert (seen["poll_duration_seconds_count"], seen["poll_duration_seconds_sum"]) == (3, 1.5)
    assert (seen["last_good_poll_timestamp_seconds"], seen["document_incarnation"]) == (1_800_000_000.5, 7)


def test_active_events_are_those_of_the_last_document(metrics):
    metrics.good_poll(1.0, Document(events=(event(), event(), event(event_type="Reboot", event_status="Started"))))
    seen = samples(metrics)
    assert seen['active_events{event_status="Scheduled",event_type="Freeze"}'] == 2
    assert seen['active_events{event_status="Started",event_type="Reboot"}'] == 1
    metrics.good_poll(2.0, Document())
    assert not [name for name in samples(metrics) if name.startswith("active_events")]


def test_non_numeric_incarnation_has_no_sample(metrics):
    metrics.good_poll(1.0, Document(incarnation="abc123"))
    assert "document_incarnation" not in samples(metrics)
    metrics.good_poll(1.0, Document(incarnation=10**400))
    assert "document_incarnation" not in samples(metrics)
    metrics.good_poll(1.0, Document(incarnation="12"))
    assert samples(metrics)["document_incarnation"] == 12


def test_sink_is_measured_under_its_name(metrics):
    sink = metrics.sink("sre")
    assert metrics.sink("sre") is sink
    sink.sent(0.25)
    sink.delivered(-3.0)
    sink.retried("timeout")
    sink.retried("timeout")
    sink.set_needs_attention(needed=True)
    seen = samples(metrics)
    assert seen['sink_send_duration_seconds_sum{sink="sre"}'] == 0.25
    assert seen['sink_delivery_latency_seconds_sum{sink="sre"}'] == 0
    assert seen['sink_retries_total{reason="timeout",sink="sre"}'] == 2
    assert seen['sink_needs_attention{sink="sre"}'] == 1
    sink.set_needs_attention(needed=False)
    assert samples(metrics)['sink_needs_attention{sink="sre"}'] == 0


def test_removed_sink_has_no_series(metrics):
    sink = metrics.sink("old")
    sink.retried("timeout")
    sink.set_needs_attention(needed=True)
    metrics.forget_sink("old")
    metrics.forget_sink("never known")
    assert not [name for name in samples(metrics) if "old" in name]


def test_removed_portal_has_no_series_and_can_be_added_again(metrics):
    metrics.forget_approval_channel()
    metrics.approval_channel().failed()
    assert samples(metrics)["approval_channel_up"] == 0
    metrics.forget_approval_channel()
    assert not [name for name in samples(metrics) if name.startswith("approval_channel")]
    metrics.approval_channel().answered(5.0)
    assert samples(metrics)["approval_channel_up"] == 1


def test_totals_of_one_scrape_come_from_one_snapshot(metrics):
    outbox = ListedOutbox(delivered=1, pending=2, parked=3, evicted=4, discarded=5, expired=6)
    metrics.watch_outbox(outbox, tuple)
    for scrape in (1, 2):
        seen = samples(metrics)
        assert outbox.reads == scrape
        states = (
            "delivered_total",
            "pending_records",
            "parked_records",
            "evicted_total",
            "discarded_total",
            "expired_total",
        )
        assert seen['sink_accepted_total{sink="a"}'] == sum(seen[f'sink_{state}{{sink="a"}}'] for state in states)
        assert seen['sink_oldest_pending_age_seconds{sink="a"}'] == 1.5


def test_expired_records_are_counted_by_reason(metrics):
    metrics.watch_outbox(ListedOutbox(expired=3, event_over=1), tuple)
    seen = samples(metrics)
    assert seen['sink_expired_by_reason_total{reason="age",sink="a"}'] == 2
    assert seen['sink_expired_by_reason_total{reason="event_over",sink="a"}'] == 1


def test_next_not_before_counts_down_to_the_next_event_of_this_vm():
    metrics = Metrics(CLOCK)

    def ahead(seconds, event_type, *resources, status="Scheduled"):
        moment = datetime.fromtimestamp(NOW + seconds, timezone.utc)
        return ScheduledEvent(event_type=event_type, event_status=status, resources=resources, not_before=moment)

    metrics.good_poll(
        NOW,
        Document(
            events=(
                ahead(90, "Reboot", "vm1"),
                ahead(60, "Reboot", "vm1", "vm2"),
                ahead(-5, "Freeze"),
                ahead(10, "Preempt", "vm10"),
                ahead(20, "Redeploy", "vm1", status="Started"),
                ScheduledEvent(event_type="Terminate", event_status="Scheduled", resources=("vm1",)),
            )
        ),
    )

    def shown():
        found = samples(metrics)
        return {name.split('"')[1]: value for name, value in found.items() if name.startswith("next_not_before")}

    assert shown() == {"Reboot": 60, "Freeze": -5, "Preempt": 10}
    assert samples(metrics)["identity_known"] == 0
    metrics.watch_vm(lambda: "vm1")
    assert shown() == {"Reboot": 60, "Freeze": -5}
    assert samples(metrics)["identity_known"] == 1


def test_names_and_labels_follow_the_conventions(metrics):
    metrics.good_poll(1.0, Document(events=(event(event_id="C7061BAC"),)))
    metrics.sink("a").retried("timeout")
    metrics.watch_outbox(ListedOutbox(), tuple)
    text = metrics.exposition().decode()
    assert "C7061BAC" not in text
    assert "_created" not in text
    for family in metrics.registry.collect():
        assert family.documentation
        assert family.name.startswith((PREFIX, "process_"))
        assert {label for sample in family.samples for label in sample.labels} <= LABELS
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
    assert re.search(rf'^{PREFIX}build_info{{python="3\.\d+\.\d+.*",version=".+"}} 1\.0$', text, re.MULTILINE)
