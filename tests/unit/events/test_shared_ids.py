"""Events of one document that share a key: an event ends only when its key is absent, in linear time."""

import time

from document_kit import Agent, changes_between, document, event
from hypothesis import given
from hypothesis import strategies as st

from bridge.events.transitions import match_events

ONE, OTHER = event(), event("Started", not_before=None, resources=("vm_1",))
MANY = 4_000


def test_absence_of_one_of_two_events_produces_no_record():
    agent = Agent(document())
    agent.feed(document(ONE, OTHER), document(OTHER, incarnation=2), *[document(incarnation=3)] * 5)
    assert [transition for _, transition, _ in agent.seen] == ["scheduled", "started", "completed"]


def test_absence_of_both_events_ends_both_together():
    agent = Agent(document())
    agent.observe(document(ONE, OTHER), 0)
    assert agent.feed(*[document(incarnation=2)] * 5) == [(5, "completed", "observed")] * 2


def test_order_of_events_is_not_a_change():
    assert changes_between(document(ONE, OTHER), document(OTHER, ONE)) == []


shared = st.lists(
    st.builds(
        event,
        st.sampled_from(["Scheduled", "Started", "Completed"]),
        event_id=st.sampled_from(["A", "B", None]),
        resources=st.sampled_from([("a",), ("a", "b"), ("b", "a"), (), None]),
    ),
    max_size=6,
)


@given(shared, shared)
def test_event_ends_only_if_its_key_is_absent_and_is_paired_once(before, after):
    pairs, vanished = match_events(before, after)
    assert [now for _, now in pairs] == after
    assert {one.key for one in vanished} == {one.key for one in before} - {one.key for one in after}
    used = [id(was) for was, _ in pairs if was is not None]
    assert len(used) == len(set(used)) == sum(min(count(before, key), count(after, key)) for key in keys(before))


def count(events, key):
    return sum(one.key == key for one in events)


def keys(events):
    return {one.key for one in events}


def test_many_events_that_share_a_key_take_linear_time():
    def seconds(number):
        before = [event(resources=(f"old_{one}",)) for one in range(number)]
        after = [event(resources=(f"new_{one}",)) for one in range(number)]
        began_at = time.thread_time()
        match_events(before, after)
        return time.thread_time() - began_at

    assert min(seconds(MANY) for _ in range(5)) / min(seconds(MANY // 8) for _ in range(5)) < 30
