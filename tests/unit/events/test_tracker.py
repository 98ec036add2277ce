"""When a change counts: at once, after five responses in a row, or after five minutes."""

import random
from datetime import timedelta

import msgspec
import pytest
from document_kit import DOCUMENTS, NOW, SOON, STALE_PATTERNS, Agent, at, document, event, same_content
from hypothesis import given
from hypothesis import strategies as st

from bridge.clock import parse_time
from bridge.events.event import Document

ANNOUNCED, STARTED = event(), event("Started", not_before=None)
GONE = document(incarnation=2)


def started(**fields):
    """Return an agent that has recorded a started event in second 0."""
    agent = Agent(document(), **fields)
    agent.observe(document(STARTED), 0)
    return agent


def announced():
    agent = Agent(document())
    agent.observe(document(ANNOUNCED), 0)
    return agent


# Changes that count at once.


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({"event_status": "Started"}, "started"),
        ({"not_before": SOON - timedelta(minutes=5)}, "updated"),
        ({"not_before": SOON + timedelta(minutes=5)}, "updated"),
        ({"event_type": "Redeploy"}, "updated"),
        ({"duration_seconds": 9}, "updated"),
        ({"extra": {"X": 1}}, "updated"),
        ({"event_status": "Completed"}, "completed"),
    ],
)
@pytest.mark.parametrize("incarnation", [0, 1, 2, None], ids=["lower", "same", "higher", "null"])
def test_first_response_with_a_more_severe_change_counts(shown, expected, incarnation):
    changed = msgspec.structs.replace(ANNOUNCED, **shown)
    assert announced().feed(document(changed, incarnation=incarnation)) == [(1, expected, "observed")]


def test_new_event_counts_immediately_while_an_absence_is_unconfirmed():
    other = document(event(event_id="B"), incarnation=2)
    assert started().feed(*[other] * 5) == [(1, "scheduled", "observed"), (5, "completed", "observed")]


# Absences.


def test_the_fifth_response_in_a_row_confirms_an_absence():
    agent = started()
    assert agent.feed(*[GONE] * 4) == []
    assert agent.feed(GONE, start=5) == [(5, "completed", "observed")]
    assert agent.tracker.document == GONE


def test_a_failed_poll_does_not_reset_the_count():
    assert started().feed(GONE, None, GONE, None, None, GONE, GONE, None, GONE) == [(9, "completed", "observed")]


def test_a_response_that_shows_the_event_resets_the_count():
    agent = started()
    assert agent.feed(*[GONE] * 4, document(STARTED), *[GONE] * 4) == []
    assert agent.tracker.unconfirmed


def test_a_restart_resets_the_count():
    agent = started()
    agent.feed(*[GONE] * 4)
    agent.restart()
    assert agent.feed(*[GONE] * 5, start=5) == [(9, "completed", "inferred")]


def test_absences_are_counted_per_event():
    one, two = event("Started", event_id="1"), event("Started", event_id="2")
    agent = Agent(document())
    agent.observe(document(one, two), 0)
    responses = [document(two), document(two), GONE, GONE, GONE, GONE, GONE]
    agent.feed(*responses)
    endings = agent.changes[2:]
    assert [(one.event.event_id, parse_time(one.observed_at)) for one in endings] == [
        ("1", NOW + timedelta(seconds=1)),
        ("2", NOW + timedelta(seconds=3)),
    ]
    assert [second for second, *_ in agent.seen[2:]] == [5, 7]


def test_an_event_whose_absence_is_unconfirmed_stays_in_the_tracked_document():
    agent = started()
    other = event(event_id="B")
    agent.feed(document(other, incarnation=2))
    tracked = agent.tracker.document
    assert [one.event_id for one in tracked.events] == ["B", "A-1"]
    assert tracked.incarnation == 1
    assert agent.tracker.unconfirmed == {"A-1"}
    assert agent.stored == tracked


def test_ending_has_time_and_incarnations_of_the_first_response_without_it():
    agent = announced()
    agent.feed(*[document(incarnation=number) for number in (2, 5, 6, 7, 9)])
    ending = agent.changes[-1]
    assert (ending.transition.value, ending.evidence.value) == ("canceled", "inferred")
    assert parse_time(ending.observed_at) == NOW + timedelta(seconds=1)
    assert (ending.incarnation, ending.previous_incarnation) == (2, 1)


def test_confirmed_endings_come_first_then_the_document_in_its_order():
    gone, kept = event("Started", event_id="gone"), event(event_id="kept")
    agent = Agent(document())
    agent.observe(document(gone, kept), 0)
    agent.feed(*[document(kept, incarnation=2)] * 4)
    update = agent.observe(document(event(event_id="new"), event("Started", event_id="kept"), incarnation=3), 5)
    assert [(one.event.event_id, one.transition.value) for one in update.changes] == [
        ("gone", "completed"),
        ("new", "scheduled"),
        ("kept", "started"),
    ]


def test_the_absence_of_a_completed_event_is_confirmed_without_a_record():
    agent = announced()
    completed = document(event("Completed"))
    assert agent.feed(completed, GONE, completed, GONE) == [(1, "completed", "observed")]
    assert agent.feed(*[GONE] * 301, start=5) == []
    assert agent.tracker.document == GONE


# Steps back.


def test_step_back_is_ignored_with_all_fields_until_five_responses():
    agent = started()
    back = document(event(description="other"), incarnation=0)
    assert agent.feed(*[back] * 4) == []
    assert agent.tracker.document.events == (STARTED,)
    assert agent.tracker.unconfirmed == {"A-1"}
    assert agent.feed(back, start=5) == [(5, "scheduled", "observed")]
    assert agent.tracker.document == back


def test_an_absence_does_not_confirm_a_step_back_or_the_reverse():
    back = document(event())
    assert started().feed(*[back, GONE] * 20) == []
    assert started().feed(back, back, back, GONE, GONE, GONE, GONE) == []


# Repeated updates.


def test_an_update_that_repeats_an_earlier_one_needs_five_responses():
    one, two = document(event(description="1")), document(event(description="2"), incarnation=2)
    agent = Agent(document())
    assert agent.feed(one, two, one) == [
        (1, "scheduled", "observed"),
        (2, "updated", "observed"),
        (3, "updated", "observed"),
    ]
    assert agent.feed(*[two] * 4, start=4) == []
    assert agent.tracker.document == one
    assert agent.feed(two, start=8) == [(8, "updated", "observed")]


# Five minutes.


def test_absence_of_an_event_that_returned_needs_five_minutes():
    agent = started()
    agent.feed(GONE, document(STARTED))
    assert agent.feed(*[GONE] * 400, start=3) == [(303, "completed", "inferred")]


def test_event_that_reappears_after_its_ending_and_a_restart_has_returned():
    agent = started()
    agent.feed(*[GONE] * 5)
    agent.restart()
    agent.feed(document(STARTED, incarnation=3), start=6)
    assert agent.feed(*[GONE] * 400, start=7) == [(307, "completed", "inferred")]


def test_step_back_of_an_event_that_returned_needs_five_minutes():
    agent = started()
    agent.feed(GONE, document(STARTED))
    assert agent.feed(*[document(event())] * 400, start=3) == [(303, "scheduled", "observed")]


def test_absence_after_a_day_without_a_response_needs_five_minutes():
    agent = Agent(document(STARTED), last_good_at=NOW - timedelta(days=2))
    assert agent.feed(*[GONE] * 310) == [(301, "completed", "inferred")]


def test_a_day_of_silence_while_the_agent_runs_counts_by_either_clock():
    for silence in ({"seconds": 90000}, {"seconds": 60, "wall_offset": 90000.0}):
        agent = started()
        agent.observe(GONE, **silence)
        for second in range(1, 300):
            agent.observe(GONE, silence["seconds"] + second, wall_offset=silence.get("wall_offset", 0.0))
        assert len(agent.seen) == 1
        agent.observe(GONE, silence["seconds"] + 300, wall_offset=silence.get("wall_offset", 0.0))
        assert [one[1:] for one in agent.seen[1:]] == [("completed", "inferred")]


def test_absence_during_service_activation_needs_five_minutes():
    agent = Agent(document(STARTED), last_good_at=NOW - timedelta(days=2))
    assert agent.feed(*[document(STARTED)] * 100, *[GONE] * 310) == [(401, "completed", "observed")]


# Gaps.


def test_an_absence_after_a_silence_is_inferred_by_either_clock():
    for silence in ({"seconds": 60}, {"seconds": 1, "wall_offset": 60.0}):
        agent = started()
        agent.observe(GONE, **silence)
        for second in range(1, 5):
            agent.observe(GONE, silence["seconds"] + second, wall_offset=silence.get("wall_offset", 0.0))
        assert [one[1:] for one in agent.seen[1:]] == [("completed", "inferred")]


def test_boot_ends_only_events_absent_from_every_later_response():
    past = event(not_before=NOW - timedelta(hours=1))
    known = {"last_good_at": NOW - timedelta(hours=2), "booted_at": NOW}
    assert Agent(document(past), **known).feed(*[GONE] * 5) == [(5, "completed", "boot_id")]
    assert Agent(document(past), **known).feed(document(past), *[GONE] * 5) == [(6, "ended", "unknown")]


def test_boot_is_still_proven_if_the_agent_stops_before_confirmation():
    past = event(not_before=NOW - timedelta(hours=1))
    known = {"last_good_at": NOW - timedelta(hours=2), "booted_at": NOW}
    agent = Agent(document(past), **known)
    agent.feed(GONE, GONE)
    assert not agent.tracker.is_settled(at(2))
    agent.restart(**known)
    assert agent.feed(*[GONE] * 5, start=3) == [(7, "completed", "boot_id")]


# Storing.


def test_liveness_is_stored_only_without_unconfirmed_absences():
    agent = started()
    assert agent.tracker.is_settled(at(0))
    agent.feed(GONE)
    assert not agent.tracker.is_settled(at(1))
    agent.feed(*[GONE] * 4, start=2)
    assert agent.tracker.is_settled(at(5))


def test_liveness_is_not_stored_for_five_minutes_while_the_service_is_turned_on():
    agent = Agent(document(STARTED), last_good_at=NOW - timedelta(days=2))
    agent.observe(document(STARTED), 0)
    assert not agent.tracker.is_settled(at(299))
    assert agent.tracker.is_settled(at(300))


def test_an_update_that_is_not_committed_is_returned_again():
    agent = Agent(document())
    shown = document(STARTED)
    first = agent.tracker.observe(shown, at(1))
    again = agent.tracker.observe(shown, at(2))
    assert [one.transition for one in first.changes] == [one.transition for one in again.changes] != []


def test_repeated_response_causes_no_update_and_no_write():
    agent, shown = Agent(document()), document(STARTED)
    agent.observe(shown, 1)
    assert [agent.observe(shown, second) for second in range(2, 100)] == [None] * 98
    assert agent.writes == 1


def test_equal_responses_and_empty_incarnations_cause_no_update():
    agent = Agent(document())
    for second in range(100):
        assert not agent.observe(document(incarnation=second % 2), second).is_news
    assert agent.observe(document(STARTED), 100).is_news
    assert not agent.observe(document(STARTED), 101).is_news
    assert agent.observe(document(STARTED, incarnation=7), 102).is_news


def test_front_ends_with_different_incarnations_cause_no_write_for_each_poll():
    agent = started()
    for second in range(1, 100):
        agent.observe(document(STARTED, incarnation=second % 2), second)
    assert agent.writes == 1
    assert agent.observe(document(STARTED, incarnation=2), 100).is_news


# Stale responses: a started event with responses from a front end that is behind.


TRUE = document(STARTED, incarnation=5)
POLL_SECONDS = (1, 60)


STALE_DOCUMENTS = [
    pytest.param(document(*events, incarnation=incarnation), id=f"{name}-{incarnation}")
    for name, events in (("absent", ()), ("scheduled", (event(),)))
    for incarnation in (4, 5, None)
]


@pytest.mark.parametrize("interval", POLL_SECONDS)
@pytest.mark.parametrize("is_stale", STALE_PATTERNS)
@pytest.mark.parametrize("stale", STALE_DOCUMENTS)
def test_stale_responses_end_no_event_and_the_real_ending_is_recorded(stale, is_stale, interval):
    chance = random.Random(24)
    agent = Agent(document())
    seconds = position = 0
    while seconds < 600:
        agent.observe(stale if position and is_stale(position, chance) else TRUE, seconds)
        seconds += 1 if agent.tracker.unconfirmed else interval
        position += 1
    agent.observe(TRUE, seconds)
    assert agent.writes == 1
    assert [transition for _, transition, _ in agent.seen] == ["started"]
    ended_at = seconds = seconds + 1
    while len(agent.seen) == 1 and seconds < ended_at + 600:
        agent.observe(document(incarnation=6), seconds)
        seconds += 1 if agent.tracker.unconfirmed else interval
    (second, transition, evidence) = agent.seen[-1]
    came_back = not stale.events
    assert (transition, evidence) == ("completed", "inferred" if came_back else "observed")
    assert second - ended_at <= (300 if came_back else 6)


EVENTS = st.sampled_from(
    [event(), STARTED, event(description="2"), event(event_id="B"), event("Started", event_id="B")]
)


@given(st.lists(st.lists(EVENTS, max_size=2, unique_by=lambda one: one.key), max_size=60), st.data())
def test_ending_or_step_back_is_recorded_after_five_agreeing_responses(history, data):
    agent, shown = Agent(document()), []
    for second, events in enumerate(history, start=1):
        if data.draw(st.booleans()):
            continue  # a failed poll
        first = len(agent.changes)
        before = {one.key: one for one in (agent.tracker.document or Document()).events}
        agent.observe(document(*events, incarnation=second), second)
        shown.append({one.key: one for one in events})
        for change in agent.changes[first:]:
            key = change.event.key
            if change.transition.is_ending:
                assert all(key not in response for response in shown[-5:])
                assert len(shown) >= 5
            if change.transition.value == "scheduled" and key in before:
                assert all(response[key].event_status == "Scheduled" for response in shown[-5:])
        tracked = {one.key: one for one in agent.tracker.document.events}
        assert {one.key for one in events} <= tracked.keys()
        for one in events:
            assert tracked[one.key] == one or one.key in agent.tracker.unconfirmed


@given(st.lists(DOCUMENTS, max_size=6), st.integers(0, 6))
def test_restart_at_any_point_neither_loses_nor_adds_a_record(history, stop_at):
    def run(*, restarted):
        agent = Agent(document())
        for position, shown in enumerate(history):
            if restarted and position == stop_at:
                agent.restart(last_good_at=NOW + timedelta(seconds=position * 1000))
            for second in range(310):  # longer than the longest confirmation
                agent.observe(shown, position * 1000 + second)
        return [(change.event.key, change.transition.is_ending) for change in agent.changes]

    assert run(restarted=True) == run(restarted=False)


@given(st.lists(DOCUMENTS, max_size=6))
def test_tracked_document_converges_to_a_stable_document(history):
    agent = Agent(document())
    for position, shown in enumerate(history):
        for second in range(310):
            agent.observe(shown, position * 400 + second)
        assert same_content(agent.tracker.document, shown)
        assert not agent.tracker.unconfirmed
