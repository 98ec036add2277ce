"""Events of one document that share a key: nothing ends while one of them is there, and thousands cost no more each."""

import gc
import time
from datetime import datetime, timedelta, timezone

import pytest
from document_kit import Agent, changes_between, same_content
from hypothesis import given
from hypothesis import strategies as st

from bridge.events.diff import match_events
from bridge.events.event import Document, ScheduledEvent

NOW = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
MANY = 20_000
MIB = 1024 * 1024


def event(status="Scheduled", **fields):
    return ScheduledEvent(
        event_status=status, **{"event_id": "A-1", "event_type": "Reboot", "resources": ("vm_0",), **fields}
    )


def document(*events, incarnation=1):
    return Document(incarnation=incarnation, events=events)


E, S = event(not_before=NOW + timedelta(minutes=10)), event("Started")


def test_one_of_two_that_is_missing_is_no_ending_and_no_second_start():
    agent = Agent(document())
    agent.feed(document(E), document(E, S, incarnation=2), document(S, incarnation=3), *[document(incarnation=4)] * 5)
    assert [transition for _, transition, _ in agent.seen] == ["scheduled", "started", "completed"]


def test_one_of_two_equal_events_leaves_without_a_record():
    agent = Agent(document())
    agent.feed(document(E, E), document(E, incarnation=2))
    assert [transition for _, transition, _ in agent.seen] == ["scheduled", "scheduled"]
    assert agent.tracker.document == agent.stored == document(E, incarnation=2)


def test_another_order_is_no_change():
    agent = Agent(document())
    agent.feed(document(E, S), document(S, E))
    assert [transition for _, transition, _ in agent.seen] == ["scheduled", "started"]
    assert same_content(agent.tracker.document, document(S, E))


def test_two_that_vanish_together_end_both():
    changes = changes_between(document(E, S), document(incarnation=2))
    assert [change.transition.value for change in changes] == ["canceled", "completed"]


def test_two_that_vanish_together_are_confirmed_together():
    agent, empty = Agent(document()), document(incarnation=2)
    agent.observe(document(E, S), 0)
    assert agent.feed(*[empty] * 5) == [(5, "completed", "observed"), (5, "completed", "observed")]


def test_a_step_back_of_one_of_two_leaves_the_other_unchanged():
    other = event("Started", resources=("vm_1",))
    agent = Agent(document())
    agent.observe(document(S, other), 0)
    assert agent.feed(*[document(E, other)] * 5) == [(5, "scheduled", "observed")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([E, event(description="x")], [event(description="x"), event("Started")]),
        ([event(), S], [event("Started", description="x"), event(description="x")]),
        ([event(), S], [event("Paused", resources=("b",)), event("Paused")]),
    ],
    ids=["content before position", "status before position", "shape before position"],
)
def test_the_two_that_are_most_alike_are_paired_first(before, after):
    assert [was for was, _ in match_events(before, after)[0]] == before[::-1]


shared = st.lists(
    st.builds(
        event,
        st.sampled_from(["Scheduled", "Started", "Completed"]),
        event_id=st.sampled_from(["A", "B", None]),
        resources=st.sampled_from([("a",), ("a", "b"), ("b", "a"), (), None]),
        extra=st.sampled_from([{}, {"X": [1, {"y": None}]}, {"X": [1.0, {"y": None}]}]),
    ),
    max_size=6,
)


@given(shared, st.randoms())
def test_any_order_of_any_events_tells_nothing(events, chance):
    mixed = list(events)
    chance.shuffle(mixed)
    assert changes_between(document(*events), document(*mixed)) == []


@given(shared, shared)
def test_an_event_ends_only_when_its_key_is_gone_and_each_is_paired_once(before, after):
    pairs, vanished = match_events(before, after)
    assert [now for _, now in pairs] == after
    assert {one.key for one in vanished} == {one.key for one in before} - {one.key for one in after}
    used = [id(was) for was, _ in pairs if was is not None]
    assert len(used) == len(set(used)) == sum(min(count(before, key), count(after, key)) for key in keys(before))


def count(events, key):
    return sum(one.key == key for one in events)


def keys(events):
    return {one.key for one in events}


def seconds_to_pair(number):
    """Return the CPU time of the worst case, where nothing is alike but the key; the best of three."""
    before = [event(resources=(f"old_{one}",)) for one in range(number)]
    after = [event(resources=(f"new_{one}",)) for one in range(number)]
    durations = []
    for _ in range(3):
        begun = time.thread_time()  # what else runs on the machine does not count
        pairs, vanished = match_events(before, after)
        durations.append(time.thread_time() - begun)
        assert (len(pairs), vanished) == (number, [])
    return min(durations)


@pytest.fixture
def no_garbage_collection():
    """The collector walks whatever thousands of other tests left: that is not what is timed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_many_events_that_share_a_key_are_paired_in_time_that_grows_with_their_number():
    assert seconds_to_pair(MANY) / seconds_to_pair(MANY // 8) < 30


def test_many_events_without_id_and_resources_are_paired_by_content():
    before = [event(event_id=None, resources=None, description=str(one)) for one in range(MANY)]
    pairs, _ = match_events(before, before[::-1])
    assert all(was is now for was, now in pairs)


def test_many_events_that_share_a_key_and_come_in_reverse_are_paired_by_content():
    before = [event(resources=(f"vm_{one}",)) for one in range(MANY)]
    pairs, _ = match_events(before, before[::-1])
    assert all(was is now for was, now in pairs)
