"""A sink whose destination loses its alerts on a restart gets the active events again, under the same id."""

import pytest
from outbox_kit import append
from scripted_sink import ScriptedSink
from waiting import until

from bridge.events.event import Document
from bridge.events.record import Approval

EVERY_SECONDS = 60.0


class Forgetful(ScriptedSink):
    """A sink whose destination loses its alerts on a restart."""

    class Config(ScriptedSink.Config, frozen=True, kw_only=True):
        """The keys of this sink."""

        refresh_seconds: float | None = EVERY_SECONDS
        """The interval."""

    @classmethod
    def refresh_seconds(cls, config):
        return config.refresh_seconds


@pytest.fixture
def box(bench):
    return bench.sink(sink_class=Forgetful)


def show(bench, *event_ids, transition=None, changed="", **fields):
    """Commit a document with these events, and of *changed* a record of *transition*."""
    events = tuple(bench.event(each, **fields) for each in event_ids)
    named = [bench.event(changed, **fields)] if changed else []
    document = Document(incarnation=2, events=events)
    bench.outbox_kit.commit(bench.outbox, *named, transition=transition or "scheduled", document=document)
    bench.notify()


def approve(bench, event_id):
    approval = Approval(source="cli", result="sent")
    append(bench.outbox, "approved", event=bench.event(event_id), approval=approval)
    bench.outbox_kit.saved(bench.outbox)


def told(box):
    found = []
    for (record,) in box.tries:
        found.append((record.event.event_id, record.transition.value))
    return found


def test_each_active_event_is_sent_again_with_the_same_id(bench, box):
    show(bench, "A", "B", changed="A")
    show(bench, "A", "B", changed="B")
    bench.start()
    bench.until_totals(delivered=2)
    for number in (2, 3, 4):
        bench.advance(EVERY_SECONDS)
        bench.until_totals(delivered=2 * number)
    assert {batch[0].id for batch in box.tries} == {batch[0].id for batch in box.tries[:2]}


def test_newest_record_caused_by_azure_is_sent_again(bench, box):
    show(bench, "A", changed="A")
    bench.start()
    show(bench, "A", changed="A", transition="started", status="Started")
    approve(bench, "A")
    bench.until_totals(delivered=3)
    bench.advance(EVERY_SECONDS)
    bench.until_totals(delivered=4)
    assert told(box)[-1] == ("A", "started")


def test_event_that_ended_is_not_sent_again(bench, box):
    show(bench, "A", "B", changed="A")
    show(bench, "A", "B", changed="B")
    bench.start()
    bench.until_totals(delivered=2)
    show(bench, "B", changed="A", transition="canceled")
    bench.until_totals(delivered=3)
    bench.advance(EVERY_SECONDS)
    bench.until_totals(delivered=4)
    assert told(box)[3:] == [("B", "scheduled")]


def test_nothing_is_sent_again_while_a_newer_record_of_the_event_is_pending(bench, box):
    show(bench, "A", changed="A")
    bench.start()
    bench.until_totals(delivered=1)
    box.script("fail:100000")
    show(bench, "A", changed="A", transition="started", status="Started")
    bench.until_failed(1)
    for _ in range(3):
        bench.advance(EVERY_SECONDS)
    assert bench.totals() == {"delivered": 1, "pending": 1}


def test_refresh_waits_for_the_first_document_after_a_restart(bench, box):
    show(bench, "A", "B", changed="A")
    show(bench, "A", "B", changed="B")
    bench.start()
    bench.until_totals(delivered=2)
    bench.stop()
    bench.advance(EVERY_SECONDS + 1)
    bench.has_seen_document = False
    bench.start()
    until(lambda: bench.time.readings > 0)
    show(bench, "B", changed="A", transition="completed")
    bench.until_totals(delivered=3)
    bench.has_seen_document = True
    bench.until_totals(delivered=4)
    assert told(box)[2:] == [("A", "completed"), ("B", "scheduled")]


def test_refresh_is_retried_like_any_record(bench, box):
    show(bench, "A", changed="A")
    bench.start()
    bench.until_totals(delivered=1)
    box.script("fail", "fail")
    bench.advance(EVERY_SECONDS)
    bench.until_failed(2)
    bench.until_totals(delivered=2)


def test_refresh_does_not_expire_by_the_age_of_its_record(bench):
    bench.sink("aged", sink_class=Forgetful, max_age_seconds=EVERY_SECONDS / 2)
    show(bench, "A", changed="A")
    bench.start("aged")
    bench.until_totals("aged", delivered=1)
    bench.advance(EVERY_SECONDS)
    bench.until_totals("aged", delivered=2)


def test_refresh_times_differ_between_vms(bench):
    bench.sink("first", sink_class=Forgetful)
    bench.sink("second", sink_class=Forgetful)
    show(bench, "A", changed="A")
    bench.start("first", chance=0.0)
    bench.start("second", chance=1.0)
    bench.until_totals("first", delivered=1)
    bench.until_totals("second", delivered=1)
    bench.advance(EVERY_SECONDS * 0.95)
    bench.until_totals("second", delivered=2)
    assert bench.totals("first") == {"delivered": 1}


def test_sink_without_an_interval_gets_each_record_once(bench):
    bench.sink("plain")
    show(bench, "A", changed="A")
    bench.start("plain")
    bench.until_totals("plain", delivered=1)
    bench.advance(10 * EVERY_SECONDS)
    show(bench, "A", changed="A", transition="started", status="Started")
    bench.until_totals("plain", delivered=2)
