"""A sink with current_state_only gets the newest record of each event, and always gets an ending."""

import pytest
from delivery_kit import AlertSink
from outbox_kit import append
from waiting import until

from bridge.events.event import Document
from bridge.events.record import Approval


@pytest.fixture
def alerts(bench):
    return bench.sink(sink_class=AlertSink, max_age_seconds=600)


def change(bench, transition, event_id="E", *, status="Scheduled"):
    ending = transition in {"completed", "canceled", "ended"}
    document = {"document": Document(incarnation=9)} if ending else {}
    bench.outbox_kit.commit(bench.outbox, bench.event(event_id, status=status), transition=transition, **document)


def sent(box):
    return [record.transition.value for record in box.records]


def expired_by_reason(bench):
    """Return the expired records by reason, from one scrape."""
    bench.metrics.watch_outbox(bench.outbox, lambda: ["s"])
    found = {reason: bench.sample("sink_expired_by_reason_total", reason=reason) for reason in ("age", "event_over")}
    assert bench.sample("sink_expired_total") == sum(found.values())
    return found


def test_ending_of_an_event_that_was_never_sent_is_sent(bench, alerts):
    change(bench, "scheduled")
    change(bench, "canceled")
    bench.start()
    bench.until_totals(delivered=1, expired=1)
    assert sent(alerts) == ["canceled"]


def test_every_record_is_sent_while_the_sink_keeps_up(bench, alerts):
    bench.start()
    for count, transition in enumerate(("scheduled", "started", "completed"), start=1):
        change(bench, transition)
        bench.until_totals(delivered=count)
    assert sent(alerts) == ["scheduled", "started", "completed"]


def test_record_that_arrives_during_a_failing_send_replaces_the_failed_record(bench, alerts):
    def fail_after_the_next_record(_batch):
        change(bench, "canceled")
        raise OSError("reset")

    alerts.script(fail_after_the_next_record)
    change(bench, "scheduled")
    bench.start()
    bench.until_totals(delivered=1, expired=1)
    assert sent(alerts) == ["canceled"]


def test_outcome_of_an_approval_replaces_no_record_of_its_event(bench, alerts):
    change(bench, "scheduled")
    approval = Approval(source="cli", result="accepted")
    append(bench.outbox, "approved", event=bench.event("E"), approval=approval)
    bench.start()
    bench.until_totals(delivered=2)
    assert sent(alerts) == ["scheduled", "approved"]


def test_metric_separates_records_that_were_too_old_from_replaced_records(bench, alerts):
    alerts.script(*["fail"] * 1_000)
    assert expired_by_reason(bench) == {"age": 0, "event_over": 0}
    bench.add("old-1", "old-2", "old-3")
    bench.start()
    until(lambda: alerts.tries)
    bench.advance(601)
    bench.until_totals(expired=3)
    bench.stop()
    change(bench, "scheduled")
    change(bench, "canceled")
    assert expired_by_reason(bench) == {"age": 3, "event_over": 1}
    bench.restart()
    assert expired_by_reason(bench) == {"age": 3, "event_over": 1}
