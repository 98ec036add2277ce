"""The tracker over histories of answers: when an absence is believed, and what a restart may not change."""

import random
from datetime import timedelta

import pytest
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


def in_turn(*answers, times):
    return [answer for _ in range(times) for answer in answers]


HERE, GONE = document(STARTED, incarnation=4), document(incarnation=5)
FOR_GOOD = 600
"""More polls than the minutes in which a fall is remembered."""


@pytest.mark.parametrize(
    ("answers", "most_endings"),
    [((HERE, GONE), 1), ((GONE, HERE), 0), ((HERE, HERE, GONE, GONE), 1), ((HERE, GONE, GONE, GONE, GONE), 2)],
    ids=["stale-first", "stale-second", "two-by-two", "mostly-new"],
)
def test_a_stale_front_end_that_answers_in_turn_does_not_end_an_event_again_and_again(answers, most_endings):
    seen = feed(new_tracker(None), *in_turn(*answers, times=200))
    endings = [each for each in seen if each[1] == "completed"]
    assert len(endings) <= most_endings
    assert len(seen) <= most_endings * 2 + 1


def test_front_ends_in_any_turn_end_an_event_a_few_times_at_most():
    chance = random.Random(40)
    seen = feed(new_tracker(None), *(chance.choice((HERE, GONE)) for _ in range(3600)))
    assert len([each for each in seen if each[1] == "completed"]) <= 2


def test_an_event_of_the_newer_front_end_is_not_ended_by_the_older_one():
    older, newer = document(incarnation=4), document(STARTED, incarnation=5)
    assert feed(new_tracker(None), *in_turn(newer, older, times=200)) == [(1, "started", "observed")]


ANNOUNCED = document(event(), incarnation=4)
BEGUN = document(STARTED, incarnation=5)


@pytest.mark.parametrize(
    "stale",
    [ANNOUNCED, document(event("Started", not_before=None, description="older"), incarnation=4)],
    ids=["status", "field"],
)
def test_front_ends_that_differ_in_an_event_do_not_change_it_again_and_again(stale):
    seen = feed(new_tracker(None), *in_turn(stale, BEGUN, times=200))
    assert len(seen) <= 4
    assert feed(new_tracker(None), *in_turn(BEGUN, stale, times=200), *[BEGUN] * FOR_GOOD)[4:] == []


def test_a_start_is_told_at_once_also_by_a_front_end_with_a_lower_incarnation():
    seen = feed(new_tracker(None), *in_turn(document(event(), incarnation=9), ANNOUNCED, times=20), BEGUN)
    assert seen == [(1, "scheduled", "observed"), (41, "started", "observed")]


def test_what_only_a_stale_front_end_has_is_told_and_what_it_has_for_good_in_five_minutes():
    other = document(event(), event(event_id="B"), incarnation=4)
    turns = in_turn(document(event(), incarnation=9), ANNOUNCED, times=20)
    assert feed(new_tracker(None), *turns, other)[1:] == [(41, "scheduled", "observed")]
    postponed = document(event(not_before=NOW + timedelta(hours=3)), incarnation=5)
    assert feed(new_tracker(None), *turns, *[postponed] * FOR_GOOD)[1:] == [(40 + 300, "updated", "observed")]


def test_front_ends_that_differ_in_the_incarnation_alone_cost_no_write_each_poll():
    tracker, news = new_tracker(None), 0
    for second, answer in enumerate(in_turn(BEGUN, document(STARTED, incarnation=4), times=50), start=1):
        update = tracker.observe(answer, at(second), vm_name=VM)
        tracker.commit(update)
        news += update.is_news
    assert news <= 5


def test_when_the_stale_front_end_is_gone_the_ending_is_inferred_after_five_minutes():
    turns = in_turn(HERE, GONE, times=10)
    seen = feed(new_tracker(None), *turns, *[GONE] * FOR_GOOD)
    assert seen[-1] == (len(turns) - 1 + 300, "completed", "inferred")


def test_what_is_not_believed_of_front_ends_in_turn_is_still_not_after_a_restart():
    tracker, turns = new_tracker(None), in_turn(HERE, GONE, times=10)
    told = len(feed(tracker, *turns))
    again = new_tracker(tracker.document)
    assert feed(again, *in_turn(GONE, HERE, times=20)) == []
    assert told <= 3


@pytest.mark.parametrize("seconds", [20, 400, 900])
@pytest.mark.parametrize("first", [BEGUN, ANNOUNCED], ids=["newer first", "stale first"])
def test_what_is_stored_of_front_ends_in_turn_keeps_a_restart_from_telling_a_start_again(seconds, first):
    tracker, writes, stored = new_tracker(None), 0, None
    for second, answer in enumerate([BEGUN, *in_turn(ANNOUNCED, BEGUN, times=seconds // 2)], start=1):
        update = tracker.observe(answer, at(second), vm_name=VM)
        tracker.commit(update)
        if update.is_news:
            stored, writes = update.document, writes + 1
    again, told = new_tracker(stored), []
    turns = in_turn(first, ANNOUNCED if first is BEGUN else BEGUN, times=20)
    for second, answer in enumerate(turns, start=seconds + 3):
        update = again.observe(answer, at(second), vm_name=VM)
        again.commit(update)
        told += update.changes
    assert told == []
    assert writes <= 5 + seconds // 100


def test_an_event_that_was_only_announced_is_not_called_off_by_front_ends_in_turn():
    announced = document(event(), incarnation=4)
    seen = feed(new_tracker(None), *in_turn(GONE, announced, times=10), *[GONE] * FOR_GOOD)
    assert [each[1:] for each in seen] == [("scheduled", "observed"), ("ended", "unknown")]


def test_after_one_fall_an_ending_on_the_way_back_up_needs_three_agreeing_answers_too():
    before, back = document(STARTED, incarnation=5), document(incarnation=6)
    seen = feed(new_tracker(None), before, HERE, back, back, HERE, GONE, GONE)
    assert seen == [(1, "started", "observed")]
    seen = feed(new_tracker(None), before, HERE, back, back, back)
    assert seen[1:] == [(5, "completed", "inferred")]


def test_a_service_that_started_over_and_counts_up_again_is_believed_at_once():
    low, up = document(STARTED, incarnation=1), document(incarnation=2)
    assert feed(new_tracker(None), BEGUN, low, up)[1:] == [(3, "completed", "observed")]
    twice = feed(new_tracker(None), BEGUN, low, document(STARTED, incarnation=2), low, up, up, up)
    assert twice[1:] == [(7, "completed", "inferred")]


def test_minutes_after_a_fall_absence_is_believed_at_once_again():
    low, back = document(STARTED, incarnation=1), document(incarnation=9)
    seen = feed(new_tracker(None), document(STARTED, incarnation=9), *[low] * 301, back)
    assert seen[1:] == [(303, "completed", "observed")]


def test_a_fall_is_remembered_without_another_write_for_each_answer():
    tracker, news = new_tracker(None), 0
    for second, answer in enumerate(in_turn(HERE, GONE, times=50), start=1):
        update = tracker.observe(answer, at(second), vm_name=VM)
        tracker.commit(update)
        news += update.is_news
    assert news <= 4


def test_a_boot_does_not_end_what_an_answer_showed_after_it():
    past = event(not_before=NOW - timedelta(hours=1))
    other = event("Started", event_id="B", not_before=None)
    tracker = new_tracker(document(past, other, incarnation=9), last_good_at=NOW - timedelta(hours=2), booted=True)
    low = document(past, incarnation=1)
    seen = feed(tracker, low, document(incarnation=1), document(incarnation=1), document(incarnation=1))
    assert [each[1:] for each in seen] == [("completed", "inferred"), ("ended", "unknown")]


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
