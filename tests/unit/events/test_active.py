"""The list of open events in every record, and the cases in which it is unknown."""

from datetime import timedelta

import pytest
from document_kit import NOW, Agent, at, document, event

A, B = event(event_id="A"), event("Started", event_id="B")


def listed(agent, seconds):
    return agent.tracker.active_event_ids(at(seconds))


def test_the_list_has_the_event_ids_of_the_tracked_document_sorted():
    agent = Agent(document())
    assert agent.observe(document(B, A), 0).active_event_ids == ("A", "B")
    assert listed(agent, 1) == ("A", "B")


def test_an_unconfirmed_absence_is_in_the_list_and_a_recorded_ending_is_not():
    agent = Agent(document())
    agent.observe(document(A, B), 0)
    for second in range(1, 5):
        assert agent.observe(document(A), second).active_event_ids == ("A", "B")
    assert agent.observe(document(A), 5).active_event_ids == ("A",)


def test_an_event_that_the_document_shows_as_completed_is_not_in_the_list():
    agent = Agent(document())
    assert agent.observe(document(A, event("Completed", event_id="B")), 0).active_event_ids == ("A",)


@pytest.mark.parametrize(("seconds", "wall_offset"), [(10.5, 0.0), (1.0, 10.0)], ids=["monotonic", "wall"])
def test_the_list_is_unknown_after_a_gap(seconds, wall_offset):
    agent = Agent(document())
    agent.observe(document(A), 0)
    assert listed(agent, 10) == ("A",)
    assert agent.tracker.active_event_ids(at(seconds, wall_offset=wall_offset)) is None
    assert agent.observe(document(A), 20).active_event_ids == ("A",)


def test_the_list_is_unknown_while_an_event_has_no_event_id():
    agent = Agent(document())
    assert agent.observe(document(A, event(event_id=None)), 0).active_event_ids is None


def test_the_list_is_unknown_above_200_events():
    events = [event(event_id=f"{number:03}") for number in range(201)]
    assert len(Agent(document()).observe(document(*events[1:]), 0).active_event_ids) == 200
    assert Agent(document()).observe(document(*events), 0).active_event_ids is None


def test_list_without_a_stored_document_is_known_while_responses_agree():
    agent = Agent(None)
    assert agent.observe(document(A), 0).active_event_ids == ("A",)
    assert agent.observe(document(event("Started", event_id="A")), 1).active_event_ids == ("A",)


def test_list_without_a_stored_document_needs_five_minutes_of_agreement():
    agent = Agent(None)
    agent.observe(document(A), 0)
    assert agent.observe(document(A, B), 60).active_event_ids is None
    for second in range(61, 360):
        agent.observe(document(A, B), second)
    assert listed(agent, 359) is None
    assert agent.observe(document(A, B), 360).active_event_ids == ("A", "B")


def test_after_five_minutes_of_agreement_the_list_stays_known():
    agent = Agent(None)
    for second in range(301):
        agent.observe(document(A), second)
    for second in range(301, 310):
        assert agent.observe(document(), second).active_event_ids in {("A",), ()}
    assert listed(agent, 310) == ()


def test_list_with_a_stored_document_is_known_immediately():
    agent = Agent(document(), last_good_at=NOW - timedelta(days=2))
    agent.observe(document(), 0)
    assert agent.observe(document(A), 1).active_event_ids == ("A",)
