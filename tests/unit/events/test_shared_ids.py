"""Events of one document that share a key: nothing ends while one of them is there, and thousands cost no more each."""

import gc
import time
from datetime import datetime, timedelta, timezone

import pytest
from document_kit import same_content
from hypothesis import given
from hypothesis import strategies as st

from bridge.clock import Instant
from bridge.events.diff import DiffContext, diff, match_events
from bridge.events.event import Document, ScheduledEvent
from bridge.events.tracker import DocumentTracker

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


def told(*documents):
    """Return what a tracker that starts empty finds in *documents*, one a second, and the tracker."""
    tracker, seen = DocumentTracker(None, last_good_at=NOW, booted=False, gap_seconds=10.0), []
    for second, shown in enumerate(documents):
        update = tracker.observe(shown, Instant(wall=NOW + timedelta(seconds=second), monotonic=float(second)))
        if update is not None:
            tracker.commit(update)
            seen.append([change.transition.value for change in update.changes])
    return seen, tracker


def test_the_older_of_two_that_leaves_is_no_ending_and_no_second_start():
    seen, _ = told(document(E), document(E, S, incarnation=2), document(S, incarnation=3), document(incarnation=4))
    assert seen == [["scheduled"], ["started"], [], ["completed"]]


def test_one_of_two_that_are_alike_leaves_without_a_record():
    seen, _ = told(document(E, E), document(E, incarnation=2), document(incarnation=3))
    assert seen == [["scheduled", "scheduled"], [], ["canceled"]]


def test_another_order_is_no_change():
    seen, tracker = told(document(E, S), document(S, E))
    assert seen == [["scheduled", "started"], []]
    assert same_content(tracker.document, document(S, E))


def test_two_that_vanish_together_end_both():
    changes = diff(document(E, S), document(incarnation=2), DiffContext(now=NOW))
    assert [change.transition.value for change in changes] == ["canceled", "completed"]


def test_the_smaller_document_is_stored_though_nothing_is_told():
    tracker = told(document(E, E))[1]
    update = tracker.observe(document(E), Instant(wall=NOW + timedelta(seconds=1), monotonic=1.0))
    assert (update.changes, update.is_news, update.document) == ([], True, document(E))
    assert not same_content(document(E, E), document(E))
    assert not same_content(document(E), document(E, E))


def test_a_fall_of_the_incarnation_holds_no_event_of_which_one_is_there():
    seen, tracker = told(document(E, S, incarnation=9), document(S, incarnation=1))
    assert seen == [["scheduled", "started"], []]
    assert tracker.document == document(S, incarnation=1)


def test_a_fall_of_the_incarnation_holds_all_of_an_event_that_is_gone():
    empty = document(incarnation=1)
    seen, _ = told(document(E, S, incarnation=9), empty, empty, empty)
    assert seen[1:] == [[], [], ["ended", "completed"]]


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
    assert diff(document(*events), document(*mixed), DiffContext(now=NOW)) == []


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
