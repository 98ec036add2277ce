"""The tracker over histories of answers: when an absence is believed, and what a restart may not change."""

from datetime import timedelta

from document_kit import DOCUMENTS, NOW, VM, document, event
from hypothesis import given
from hypothesis import strategies as st

from bridge.clock import Instant
from bridge.events.record import Evidence
from bridge.events.tracker import DocumentTracker


@given(st.lists(DOCUMENTS, max_size=8), st.integers(0, 8))
def test_a_restart_at_any_point_neither_loses_nor_invents_a_record(history, stop_at):
    def run(*, restarted):
        tracker, keys = new_tracker(None), []
        for position, shown in enumerate(history):
            if restarted and position == stop_at:
                tracker = new_tracker(tracker.document)
            for _ in range(4):  # a fall of the incarnation has to be seen three times
                update = tracker.observe(shown, at(position * 10 + _))
                if update is not None:
                    tracker.commit(update)
                    keys += [(c.event.key, c.transition.is_ending) for c in update.changes]
        return keys

    assert run(restarted=True) == run(restarted=False)


def new_tracker(stored, *, last_good_at=NOW, booted=False):
    return DocumentTracker(stored, last_good_at=last_good_at, booted=booted, gap_seconds=10.0)


def at(seconds, *, wall_offset=0.0):
    return Instant(wall=NOW + timedelta(seconds=seconds + wall_offset), monotonic=1000.0 + seconds)


def feed(tracker, *answers):
    """Give one answer a second from second 1 on; None is a failed poll. Return (second, transition, evidence)."""
    seen = []
    for second, answer in enumerate(answers, start=1):
        if answer is None:
            tracker.poll_failed()
            continue
        update = tracker.observe(answer, at(second), vm_name=VM)
        if update is not None:
            tracker.commit(update)
            seen += [(second, c.transition.value, c.evidence.value) for c in update.changes]
    return seen


STARTED = event("Started", not_before=None)


def test_absence_is_believed_at_once():
    assert feed(new_tracker(None), document(STARTED), document(incarnation=2)) == [
        (1, "started", "observed"),
        (2, "completed", "observed"),
    ]


def test_after_a_restart_an_absence_is_inferred():
    assert feed(new_tracker(document(STARTED)), document(incarnation=2)) == [(1, "completed", "inferred")]


def test_one_good_answer_that_still_shows_the_event_ends_the_gap():
    tracker = new_tracker(document(STARTED))
    assert feed(tracker, document(STARTED), document(incarnation=2)) == [(2, "completed", "observed")]


def test_a_long_silence_is_a_gap_by_either_clock():
    for silence in (at(60), at(0, wall_offset=60)):
        tracker = new_tracker(None)
        tracker.commit(tracker.observe(document(STARTED), at(0)))
        update = tracker.observe(document(incarnation=2), silence)
        assert [c.evidence for c in update.changes] == [Evidence.INFERRED]


def test_a_fallen_incarnation_needs_three_agreeing_answers_in_a_row():
    empty = document(incarnation=0)
    assert feed(new_tracker(None), document(STARTED), empty, empty, empty)[1:] == [(4, "completed", "inferred")]
    broken = feed(new_tracker(None), document(STARTED), empty, empty, None, empty, empty, empty)
    assert broken[1:] == [(7, "completed", "inferred")]


def test_an_event_that_comes_back_after_the_fall_never_ended():
    low = document(STARTED, incarnation=1)
    shown = feed(new_tracker(None), document(STARTED, incarnation=9), document(), document(), low, low)
    assert shown == [(1, "started", "observed")]


def test_a_fall_is_still_doubted_after_a_restart():
    tracker = new_tracker(None)
    assert feed(tracker, document(STARTED, incarnation=9), document()) == [(1, "started", "observed")]
    assert feed(new_tracker(tracker.document), document(), document(), document()) == [(3, "completed", "inferred")]


def test_a_new_event_is_told_at_once_while_an_absence_is_in_doubt():
    other = document(event(event_id="B"), incarnation=0)
    shown = feed(new_tracker(None), document(STARTED), other, other, other)
    assert shown == [(1, "started", "observed"), (2, "scheduled", "observed"), (4, "completed", "inferred")]


def test_after_a_day_without_answers_an_empty_document_ends_nothing_for_five_minutes():
    tracker = new_tracker(document(STARTED), last_good_at=NOW - timedelta(days=2))
    shown = feed(tracker, *[document(incarnation=2)] * 310)
    assert shown == [(301, "completed", "inferred")]


def test_while_the_service_turns_on_failed_polls_do_not_count_as_good_time():
    tracker = new_tracker(document(STARTED), last_good_at=NOW - timedelta(days=2))
    empty = document(incarnation=2)
    assert feed(tracker, *[empty] * 100, *[None] * 5, *[empty] * 195) == []


def test_an_event_that_shows_up_late_after_a_day_never_ended():
    tracker = new_tracker(document(STARTED), last_good_at=NOW - timedelta(days=2))
    assert feed(tracker, *[document(incarnation=2)] * 200, document(STARTED, incarnation=3)) == []


def test_a_settling_step_may_not_be_stored_as_a_good_answer():
    tracker = new_tracker(document(STARTED), last_good_at=NOW - timedelta(days=2))
    update = tracker.observe(document(event(event_id="B"), incarnation=2), at(1))
    assert not update.is_settled
    assert [e.event_id for e in update.document.events] == ["B", "A-1"]


def test_a_step_that_could_not_be_stored_is_seen_again():
    tracker, shown = new_tracker(None), document(STARTED)
    first = tracker.observe(shown, at(1))
    tracker.invalidate()
    again = tracker.observe(shown, at(2))
    assert first.changes == again.changes != []
