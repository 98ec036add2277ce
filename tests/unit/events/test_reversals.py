"""Front ends of which one is late, where no incarnation says so; and what is believed at once all the same."""

import random
from datetime import timedelta

import pytest
from document_kit import NOW, VM, document, event

from bridge.clock import Instant
from bridge.events.tracker import DocumentTracker

FOR_GOOD = 600
"""More answers than the minutes in which an event may go to and fro."""

INCARNATIONS = [(4, 5), (5, 5), (None, None), ("a", "a"), (None, 5)]
"""What the late front end says, and the other one."""


def feed(*answers, tracker=None):
    """Give one answer a second from second 1 on; return (second, transition, evidence)."""
    tracker = tracker or DocumentTracker(None, last_good_at=None, booted=False, gap_seconds=10.0)
    seen = []
    for second, answer in enumerate(answers, start=1):
        if answer is None:
            tracker.poll_failed()
            continue
        moment = Instant(wall=NOW + timedelta(seconds=second), monotonic=1000.0 + second)
        update = tracker.observe(answer, moment, vm_name=VM)
        if update is not None:
            tracker.commit(update)
            seen += [(second, c.transition.value, c.evidence.value) for c in update.changes]
    return seen


def told(*answers):
    return [transition for _, transition, _ in feed(*answers)]


def both(late, now, incarnations):
    return document(*late, incarnation=incarnations[0]), document(*now, incarnation=incarnations[1])


def in_turn(*answers, times=100):
    return [answer for _ in range(times) for answer in answers]


SCHEDULED, STARTED = event(), event("Started", not_before=None)
POSTPONED = event(not_before=NOW + timedelta(hours=3))


@pytest.mark.parametrize("incarnations", INCARNATIONS)
def test_a_started_event_is_not_scheduled_again_by_a_late_front_end(incarnations):
    late, now = both([SCHEDULED], [STARTED], incarnations)
    assert told(*in_turn(late, now)) == ["scheduled", "started"]
    assert told(*in_turn(now, late)) == ["started"]
    assert told(*in_turn(now, now, late, late)) == ["started"]


@pytest.mark.parametrize("incarnations", INCARNATIONS)
def test_front_ends_in_any_turn_start_an_event_a_few_times_at_most(incarnations):
    chance = random.Random(11)
    late, now = both([SCHEDULED], [STARTED], incarnations)
    assert told(*(chance.choice((late, now)) for _ in range(3600))).count("started") <= 3


@pytest.mark.parametrize("incarnations", INCARNATIONS)
def test_an_event_that_only_one_front_end_has_goes_to_and_fro_twice_at_most(incarnations):
    for with_it, without in ((0, 1), (1, 0)):
        answers = both([STARTED][:with_it], [STARTED][:without], incarnations)
        assert told(*in_turn(*answers)).count("completed") <= 2


@pytest.mark.parametrize("incarnations", INCARNATIONS)
def test_a_field_in_which_front_ends_differ_goes_to_and_fro_twice_at_most(incarnations):
    assert told(*in_turn(*both([SCHEDULED], [POSTPONED], incarnations))).count("updated") <= 3


@pytest.mark.parametrize("incarnations", [(5, 5), (None, None), (4, 5)])
def test_a_status_that_goes_back_is_believed_when_three_answers_in_a_row_agree(incarnations):
    back, begun = both([SCHEDULED], [STARTED], incarnations)
    assert feed(begun, back, back, back)[1:] == [(4, "scheduled", "observed")]
    assert feed(begun, back, back, None, back, back, back)[1:] == [(7, "scheduled", "observed")]


def test_a_status_that_goes_back_is_believed_at_once_where_the_incarnation_rose():
    rising = [document(SCHEDULED if n % 2 else STARTED, incarnation=n) for n in range(1, 9)]
    assert [second for second, _, _ in feed(*rising)] == list(range(1, 9))


def test_once_front_ends_were_seen_to_answer_in_turn_only_five_quiet_minutes_count():
    late, now = both([SCHEDULED], [STARTED], (5, 5))
    turns = in_turn(late, now, times=5)
    assert feed(*turns, *[late] * FOR_GOOD)[2:] == [(len(turns) + 300, "scheduled", "observed")]
    gone = document(incarnation=5)
    turns = in_turn(now, gone, times=5)
    assert feed(*turns, *[gone] * FOR_GOOD)[-1] == (len(turns) - 1 + 300, "completed", "inferred")


@pytest.mark.parametrize("incarnation", [5, None, "a"])
def test_what_an_event_goes_through_in_its_life_is_told_at_once(incarnation):
    life = [
        [SCHEDULED],
        [POSTPONED],
        [SCHEDULED],
        [STARTED],
        [],
        [event(event_id="B")],
        [],
        [event(event_id="B", not_before=NOW + timedelta(hours=1))],
        [event("Started", event_id="B", not_before=None)],
        [event("Completed", event_id="B", not_before=None)],
    ]
    seen = feed(*(document(*events, incarnation=incarnation) for events in life))
    assert [second for second, _, _ in seen] == list(range(1, len(life) + 1))


def test_a_start_is_never_delayed_and_neither_is_an_event_that_appears():
    start, gone = document(STARTED), document()
    chance = random.Random(5)
    answers = [chance.choice((document(SCHEDULED), start, gone)) for _ in range(2000)]
    tracker = DocumentTracker(None, last_good_at=None, booted=False, gap_seconds=10.0)
    for second, answer in enumerate(answers):
        moment = Instant(wall=NOW + timedelta(seconds=second), monotonic=1000.0 + second)
        update = tracker.observe(answer, moment, vm_name=VM)
        if update is not None:
            tracker.commit(update)
        shown = {each.event_id for each in answer.events}
        assert shown <= {each.event_id for each in tracker.document.events}
        if answer is start:
            assert tracker.document.events == (STARTED,)


def test_events_without_an_event_id_end_as_often_as_they_are_gone():
    pause = event("Started", event_id=None, event_type="Freeze", not_before=None)
    assert told(*in_turn(document(pause), document(), times=20)).count("completed") == 20


def test_events_that_share_an_event_id_are_taken_as_they_come():
    twins = document(STARTED, event("Started", not_before=None, event_type="Freeze"))
    back = document(SCHEDULED, event(event_type="Freeze"))
    assert told(*in_turn(twins, back, times=10)).count("scheduled") == 20


def test_what_is_doubted_keeps_its_form_over_a_restart():
    tracker = DocumentTracker(None, last_good_at=None, booted=False, gap_seconds=10.0)
    late, now = both([SCHEDULED], [STARTED], (4, 5))
    feed(*in_turn(late, now, times=5), late, tracker=tracker)
    again = DocumentTracker(tracker.document, last_good_at=NOW, booted=False, gap_seconds=10.0)
    assert feed(*in_turn(now, late, times=20), tracker=again) == []
