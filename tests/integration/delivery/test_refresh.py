"""A sink that asks for it is told again what is active, under the same id: its destination forgets on a restart."""

from __future__ import annotations

from typing import Any

import pytest
from delivery_kit import DeliveryKit

from bridge.errors import DeliveryFailed, DeliveryRejected
from bridge.events.event import Document
from bridge.events.record import Approval, Transition
from bridge.outbox.rows import ApprovalRecord
from bridge.testing.sinks import Box, ScriptedSink

EVERY_SECONDS = 60.0


class Forgetful(ScriptedSink):
    """A sink whose destination forgets."""

    class Config(ScriptedSink.Config, frozen=True, kw_only=True):
        """The keys of this sink."""

        refresh_seconds: float | None = EVERY_SECONDS
        """How often to tell again."""

    @classmethod
    def refresh_seconds(cls, config: Any) -> float | None:
        seconds: float | None = config.refresh_seconds
        return seconds


@pytest.fixture
def box(bench: DeliveryKit) -> Box:
    return bench.sink(sink_class=Forgetful)


def show(bench: DeliveryKit, *event_ids: str, transition: str | None = None, changed: str = "", **fields: Any) -> None:
    """Commit a document with these events, and of *changed* a record of *transition*."""
    events = tuple(bench.event(each, **fields) for each in event_ids)
    named = [bench.event(changed, **fields)] if changed else []
    document = Document(incarnation=2, events=events)
    bench.outbox_kit.commit(bench.outbox, *named, transition=transition or "scheduled", document=document)
    bench.notify()


def approve(bench: DeliveryKit, event_id: str) -> None:
    approval = Approval(source="cli", result="sent")
    outcome = ApprovalRecord(transition=Transition.APPROVED, event=bench.event(event_id), approval=approval)
    bench.outbox.append_outcomes([outcome], incarnation=2)
    bench.outbox_kit.saved(bench.outbox)


def told(box: Box) -> list[tuple[str | None, str]]:
    found = []
    for (record,) in box.tries:
        assert record.event is not None
        found.append((record.event.event_id, record.transition.value))
    return found


def test_each_active_event_is_told_again_with_the_same_id_and_is_no_new_delivery(bench: DeliveryKit, box: Box) -> None:
    show(bench, "A", "B", changed="A")
    show(bench, "A", "B", changed="B")
    bench.start()
    bench.until_totals(delivered=2)
    changes = bench.outbox.read(lambda state: state.version)
    for number in (2, 3, 4):
        bench.advance(EVERY_SECONDS)
        bench.until(lambda: len(box.tries) >= 2 * number)  # noqa: B023
    assert {batch[0].id for batch in box.tries} == {batch[0].id for batch in box.tries[:2]}
    assert bench.totals() == {"delivered": 2}
    assert bench.outbox.read(lambda state: state.version) == changes


def test_it_is_the_last_record_of_the_events_life_that_is_told_again(bench: DeliveryKit, box: Box) -> None:
    show(bench, "A", changed="A")
    bench.start()
    show(bench, "A", changed="A", transition="started", status="Started")
    approve(bench, "A")
    bench.until_totals(delivered=3)
    bench.advance(EVERY_SECONDS)
    bench.until(lambda: len(box.tries) >= 4)
    assert told(box)[-1] == ("A", "started")


def test_an_event_that_ended_is_never_told_again(bench: DeliveryKit, box: Box) -> None:
    show(bench, "A", "B", changed="A")
    show(bench, "A", "B", changed="B")
    bench.start()
    bench.until_totals(delivered=2)
    show(bench, "B", changed="A", transition="canceled")
    bench.until_totals(delivered=3)
    for count in (4, 5):
        bench.advance(EVERY_SECONDS)
        bench.until(lambda: len(box.tries) >= count)  # noqa: B023
    assert set(told(box)[3:]) == {("B", "scheduled")}


def test_an_end_that_the_sink_does_not_take_ends_it_all_the_same(bench: DeliveryKit) -> None:
    bench.sink("s", sink_class=Forgetful, box="starts", transitions=("scheduled",))
    box = Box.named("starts")
    show(bench, "A", "B", changed="A")
    show(bench, "A", "B", changed="B")
    bench.start()
    bench.until_totals(delivered=2)
    show(bench, "B", changed="A", transition="canceled")
    bench.advance(EVERY_SECONDS)
    bench.until(lambda: len(box.tries) >= 3)
    Box.forget("starts")
    assert set(told(box)[2:]) == {("B", "scheduled")}


def test_nothing_is_told_again_while_something_newer_of_the_event_is_pending(bench: DeliveryKit, box: Box) -> None:
    show(bench, "A", changed="A")
    bench.start()
    bench.until_totals(delivered=1)
    box.script("fail:100000")
    show(bench, "A", changed="A", transition="started", status="Started")
    bench.until_failed(1)
    for _ in range(3):
        bench.advance(EVERY_SECONDS)
    while bench.totals() != {"delivered": 2}:
        bench.advance(3600)  # also once more after it was taken: then it is told again itself
    assert told(box)[:3] == [("A", "scheduled"), ("A", "started"), ("A", "started")]
    assert set(told(box)[3:]) <= {("A", "started")}


def test_after_a_restart_of_the_agent_what_is_due_is_told_at_once(bench: DeliveryKit, box: Box) -> None:
    show(bench, "A", changed="A")
    bench.start()
    bench.until_totals(delivered=1)
    bench.stop()
    bench.advance(EVERY_SECONDS + 1)
    bench.start()
    bench.until(lambda: len(box.tries) >= 2)
    assert set(told(box)) == {("A", "scheduled")}


def test_after_a_restart_of_the_agent_nothing_is_told_again_before_the_document_was_seen(
    bench: DeliveryKit, box: Box
) -> None:
    show(bench, "A", "B", changed="A")
    show(bench, "A", "B", changed="B")
    bench.start()
    bench.until_totals(delivered=2)
    bench.stop()
    bench.advance(EVERY_SECONDS + 1)
    bench.has_seen_document = False
    bench.start()
    bench.until(lambda: bench.time.readings > 0)
    show(bench, "B", changed="A", transition="completed")
    bench.until_totals(delivered=3)
    assert told(box)[2:] == [("A", "completed")]
    bench.has_seen_document = True
    bench.until(lambda: len(box.tries) >= 4)
    assert set(told(box)[3:]) == {("B", "scheduled")}


def test_a_failed_refresh_is_tried_again_with_growing_gaps_and_counted(bench: DeliveryKit, box: Box) -> None:
    show(bench, "A", changed="A")
    bench.start()
    bench.until_totals(delivered=1)
    box.script("fail", "fail")
    bench.advance(EVERY_SECONDS)
    bench.until_failed(2)
    bench.until(lambda: len(box.tries) >= 4)
    assert bench.totals() == {"delivered": 1}


def test_vms_that_saw_an_event_in_the_same_second_tell_it_again_at_times_of_their_own(bench: DeliveryKit) -> None:
    bench.sink("first", sink_class=Forgetful, box="first of two")
    bench.sink("second", sink_class=Forgetful, box="second of two")
    show(bench, "A", changed="A")
    bench.start("first", chance=0.0)
    bench.start("second", chance=1.0)
    bench.until_totals("first", delivered=1)
    bench.until_totals("second", delivered=1)
    first, second = Box.named("first of two"), Box.named("second of two")
    bench.advance(EVERY_SECONDS * 0.95)
    bench.until(lambda: len(second.tries) == 2)
    assert len(first.tries) == 1
    bench.advance(EVERY_SECONDS * 0.05)
    bench.until(lambda: len(first.tries) == 2)
    Box.forget("first of two")
    Box.forget("second of two")


def test_a_refused_refresh_parks_nothing_and_holds_up_no_other(bench: DeliveryKit, box: Box) -> None:
    show(bench, "A", "B", changed="A")
    show(bench, "A", "B", changed="B")
    bench.start()
    bench.until_totals(delivered=2)
    box.script("reject")
    bench.advance(EVERY_SECONDS)
    bench.until(lambda: len(box.tries) >= 4)
    assert told(box)[2:4] == [("A", "scheduled"), ("B", "scheduled")]
    assert bench.totals() == {"delivered": 2}


def test_what_was_parked_comes_back_when_a_refused_refresh_shows_that_it_is_the_endpoint(
    bench: DeliveryKit, box: Box
) -> None:
    def bad_request(_batch: Any) -> None:
        raise DeliveryRejected("400", may_be_endpoint=True)

    show(bench, "A", changed="A")
    bench.start()
    bench.until_totals(delivered=1)
    box.script(bad_request, bad_request, bad_request)
    show(bench, "A", "B", changed="B")
    bench.until_totals(delivered=1, parked=1)
    bench.advance(EVERY_SECONDS)
    bench.until_totals(delivered=2)
    assert told(box)[1:3] == [("B", "scheduled"), ("A", "scheduled")]
    assert ("B", "scheduled") in told(box)[3:]


def test_a_refresh_that_needs_a_person_says_so_until_one_succeeds(bench: DeliveryKit, box: Box) -> None:
    def unauthorized(_batch: Any) -> None:
        raise DeliveryFailed("401", needs_attention=True)

    show(bench, "A", changed="A")
    bench.start(chance=1.0)
    bench.until_totals(delivered=1)
    box.script(unauthorized)
    bench.advance(EVERY_SECONDS)
    bench.until(lambda: bench.sample("sink_needs_attention") == 1)
    bench.until_failed(1)
    bench.advance(EVERY_SECONDS)
    bench.until(lambda: bench.sample("sink_needs_attention") == 0)
    assert len(box.tries) >= 3


def test_a_retry_after_to_a_refresh_binds_it(bench: DeliveryKit, box: Box) -> None:
    show(bench, "A", changed="A")
    bench.start()
    bench.until_totals(delivered=1)
    box.script("fail:600")
    bench.advance(EVERY_SECONDS)
    bench.until_failed(1)
    bench.advance(EVERY_SECONDS)
    bench.advance(300)
    assert len(box.tries) == 2
    while len(box.tries) < 3:
        bench.advance(300)


def test_a_sink_that_does_not_ask_is_told_once(bench: DeliveryKit) -> None:
    box = bench.sink("plain")
    show(bench, "A", changed="A")
    bench.start("plain")
    bench.until_totals("plain", delivered=1)
    bench.advance(10 * EVERY_SECONDS)
    show(bench, "A", changed="A", transition="started", status="Started")
    bench.until_totals("plain", delivered=2)
    assert told(box) == [("A", "scheduled"), ("A", "started")]


def test_a_record_told_again_outlives_the_time_that_delivered_ones_are_kept(bench: DeliveryKit, box: Box) -> None:
    show(bench, "A", changed="A")
    bench.start()
    approve(bench, "A")
    bench.until_totals(delivered=2)
    bench.outbox_kit.wait(7200)
    bench.advance(EVERY_SECONDS)
    bench.until(lambda: len(box.tries) >= 3)
    assert told(box)[-1] == ("A", "scheduled")
