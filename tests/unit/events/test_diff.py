from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.clock import Instant
from bridge.events.diff import Change, Circumstances, diff, is_over, same_content
from bridge.events.event import Document, ScheduledEvent
from bridge.events.record import Evidence, Transition, record_id, transition_key
from bridge.events.tracker import DocumentTracker

NOW = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
SOON = NOW + timedelta(minutes=10)
PAST = NOW - timedelta(minutes=10)
VM = "vm_0"


def event(status="Scheduled", **fields):
    fields = {"event_id": "A-1", "event_type": "Reboot", "resources": (VM,), "not_before": SOON, **fields}
    return ScheduledEvent(event_status=status, **fields)


def document(*events, incarnation=1):
    return Document(incarnation=incarnation, events=events)


def the_change(before, after, **circumstances):
    changes = diff(before, after, Circumstances(**{"now": NOW, "vm_name": VM, **circumstances}))
    assert len(changes) == 1
    return changes[0].transition.value, changes[0].evidence.value


ABSENT = None


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (ABSENT, "Scheduled", "scheduled"),
        ("Started", "Scheduled", "scheduled"),
        (ABSENT, "Started", "started"),
        ("Scheduled", "Started", "started"),
        (ABSENT, "Completed", "completed"),
        ("Started", "Completed", "completed"),
        ("Scheduled", "Canceled", "canceled"),
        ("Scheduled", "Paused", "updated"),
        (ABSENT, "Paused", "updated"),
    ],
)
def test_a_status_that_the_document_shows_is_observed(before, after, expected):
    was = document() if before is ABSENT else document(event(before))
    assert the_change(was, document(event(after), incarnation=2)) == (expected, "observed")


def test_another_field_alone_is_an_update_that_names_it_and_its_old_value():
    before, after = document(event()), document(event(not_before=SOON + timedelta(minutes=5)), incarnation=2)
    (change,) = diff(before, after, Circumstances(now=NOW))
    assert (change.transition, change.changed) == (Transition.UPDATED, ("not_before",))
    assert change.previous == {"event_status": "Scheduled", "not_before": "2026-11-20T11:10:00Z"}


def test_an_unknown_field_alone_is_an_update():
    before, after = document(event(extra={"X": 1})), document(event(extra={"X": 2}))
    (change,) = diff(before, after, Circumstances(now=NOW))
    assert (change.changed, change.previous["extra"]) == (("extra",), {"X": 1})


def test_another_order_of_resources_and_another_spelling_of_a_time_are_no_change():
    before = document(event(resources=("a", "b"), not_before_raw="2026-11-20T11:10:00Z"))
    after = document(event(resources=("b", "a"), not_before_raw="Fri, 20 Nov 2026 11:10:00 GMT"), incarnation=2)
    assert diff(before, after, Circumstances(now=NOW)) == []


def test_another_unreadable_time_is_a_change():
    before, after = (document(event(not_before=None, not_before_raw=raw)) for raw in ("soon", "later"))
    (change,) = diff(before, after, Circumstances(now=NOW))
    assert change.changed == ("not_before_raw",)


@pytest.mark.parametrize(
    ("status", "incarnation", "circumstances", "expected"),
    [
        ("Started", 2, {}, ("completed", "observed")),
        ("Started", 2, {"gap": True}, ("completed", "inferred")),
        ("Started", 0, {}, ("completed", "inferred")),
        ("Scheduled", 2, {}, ("canceled", "inferred")),
        ("Scheduled", 2, {"gap": True}, ("canceled", "inferred")),
        ("Scheduled", 3, {}, ("ended", "unknown")),
        ("Scheduled", 1, {}, ("ended", "unknown")),
        ("Scheduled", 0, {}, ("ended", "unknown")),
        ("Scheduled", None, {}, ("canceled", "inferred")),
        ("Scheduled", "abc", {}, ("canceled", "inferred")),
        ("Scheduled", "2", {}, ("canceled", "inferred")),
        ("Scheduled", "3", {}, ("ended", "unknown")),
        ("Scheduled", "+2", {}, ("canceled", "inferred")),
        ("Scheduled", "-1", {}, ("ended", "unknown")),
        ("Started", "-1", {}, ("completed", "inferred")),
        ("Scheduled", "0" * 39 + "3", {}, ("ended", "unknown")),
        ("Scheduled", "0" * 40 + "3", {}, ("canceled", "inferred")),
        ("Scheduled", "\u0663", {}, ("canceled", "inferred")),
        ("Scheduled", "+-3", {}, ("canceled", "inferred")),
        ("Scheduled", None, {"gap": True}, ("ended", "unknown")),
        ("Scheduled", "2", {"gap": True}, ("ended", "unknown")),
        ("Scheduled", 2, {"approved": frozenset({"A-1"})}, ("ended", "unknown")),
        ("Scheduled", 2, {"now": SOON}, ("ended", "unknown")),
        ("Scheduled", 2, {"seconds_since_good": 86400.0, "gap": True}, ("ended", "unknown")),
        ("Scheduled", 2, {"booted": True, "gap": True}, ("completed", "boot_id")),
        ("Scheduled", 3, {"booted": True, "gap": True, "vm_name": "VM_0"}, ("completed", "boot_id")),
        ("Scheduled", 2, {"booted": True, "gap": True, "vm_name": "vm_00"}, ("ended", "unknown")),
        ("Paused", 2, {}, ("ended", "unknown")),
    ],
)
def test_an_absence_says_no_more_than_is_known(status, incarnation, circumstances, expected):
    assert the_change(document(event(status)), document(incarnation=incarnation), **circumstances) == expected


def test_a_boot_explains_no_freeze():
    before = document(event(event_type="Freeze"))
    assert the_change(before, document(incarnation=2), booted=True, gap=True) == ("ended", "unknown")


def test_an_unknown_not_before_is_not_the_future():
    before = document(event(not_before=None, not_before_raw="soon"))
    assert the_change(before, document(incarnation=2)) == ("ended", "unknown")


@pytest.mark.parametrize("status", ["Completed", "Canceled"])
def test_the_absence_of_what_the_document_called_over_is_no_record(status):
    assert diff(document(event(status)), document(incarnation=2), Circumstances(now=NOW)) == []


def test_a_vanished_event_keeps_its_last_known_form():
    was = event("Started", not_before=None, not_before_raw="")
    (change,) = diff(document(was), document(incarnation=2), Circumstances(now=NOW))
    assert (change.event, change.changed) == (was, ())
    assert change.previous == {"event_status": "Started", "not_before": None}


def test_changes_come_in_the_order_of_the_document_then_the_vanished():
    before = document(event("Started", event_id="gone"), event("Scheduled", event_id="x"))
    after = document(event(event_id="new"), event("Started", event_id="x"), incarnation=2)
    changes = diff(before, after, Circumstances(now=NOW))
    assert [(c.event.event_id, c.transition.value) for c in changes] == [
        ("new", "scheduled"),
        ("x", "started"),
        ("gone", "completed"),
    ]


def test_an_event_without_an_id_is_known_by_type_and_resources():
    before = document(event(event_id=None, resources=("a", "b")))
    after = document(event("Started", event_id=None, resources=("b", "a")), incarnation=2)
    assert the_change(before, after) == ("started", "observed")
    other = document(event("Started", event_id=None, resources=("b", "a"), event_type="Freeze"), incarnation=2)
    assert [c.transition.value for c in diff(before, other, Circumstances(now=NOW))] == ["started", "ended"]


WITHOUT_ID = {"event_id": None, "resources": ("a", "b")}


@pytest.mark.parametrize(
    ("status", "shown", "expected"),
    [
        ("Scheduled", {"event_id": None, "resources": ("a",)}, ("ended", "unknown")),
        ("Scheduled", {"event_id": None, "event_type": "Redeploy"}, ("ended", "unknown")),
        ("Started", {"event_id": None, "resources": ("a",)}, ("completed", "inferred")),
        ("Scheduled", {"event_id": "B", "resources": ("a",)}, ("canceled", "inferred")),
        ("Started", {"event_id": "B", "resources": ("a",)}, ("completed", "observed")),
    ],
)
def test_an_event_without_an_id_may_go_on_as_a_new_one_without_an_id(status, shown, expected):
    before, after = document(event(status, **WITHOUT_ID)), document(event(**shown), incarnation=2)
    new, gone = diff(before, after, Circumstances(now=NOW, vm_name=VM))
    assert (new.transition, new.previous) == (Transition.SCHEDULED, None)
    assert (gone.transition.value, gone.evidence.value) == expected


def test_an_event_without_an_id_is_canceled_beside_others_that_stay_and_one_with_an_id_in_any_case():
    stays, new = event(event_id=None, resources=("z",)), event(event_id=None, resources=("y",))
    before = document(event(**WITHOUT_ID), stays)
    assert the_change(before, document(stays, incarnation=2)) == ("canceled", "inferred")
    changes = diff(document(event()), document(new, incarnation=2), Circumstances(now=NOW))
    assert [c.transition.value for c in changes] == ["scheduled", "canceled"]


def test_events_that_share_an_id_are_paired_by_shape_then_by_position():
    one, two = event(resources=("a",)), event(resources=("b",))
    moved = event("Started", resources=("b",))
    assert [c.event for c in diff(document(one, two), document(moved, one), Circumstances(now=NOW))] == [moved]
    renamed = event(resources=("c",))
    (change,) = diff(document(one, two), document(two, renamed), Circumstances(now=NOW))
    assert (change.event, change.changed) == (renamed, ("resources",))


# --- whole histories ---

statuses = st.sampled_from(["Scheduled", "Started", "Completed", "Canceled", "Paused"])
events = st.builds(
    ScheduledEvent,
    event_id=st.sampled_from(["A", "B", "C", None]),
    event_status=statuses,
    event_type=st.sampled_from(["Freeze", "Reboot", None]),
    resources=st.sampled_from([(VM,), ("x", VM), (VM, "x"), (), None]),
    not_before=st.sampled_from([SOON, PAST, None]),
    duration_seconds=st.sampled_from([None, 0, 5]),
    extra=st.sampled_from([{}, {"X": 1}]),
)
documents = st.builds(
    Document,
    incarnation=st.one_of(st.none(), st.integers(0, 5), st.sampled_from(["1", "2", "abc"])),
    events=st.lists(events, max_size=4, unique_by=lambda e: e.key).map(tuple),
)
ENDS = {Transition.COMPLETED, Transition.CANCELED, Transition.ENDED}


def replay(changes: list[Change]) -> dict[str, ScheduledEvent]:
    world: dict[str, ScheduledEvent] = {}
    for change in changes:
        if change.transition in ENDS or is_over(change.event):
            world.pop(change.event.key, None)
        else:
            world[change.event.key] = change.event
    return world


@given(st.lists(documents, max_size=8))
def test_replaying_the_records_of_any_history_gives_back_the_last_document(history):
    before, changes = None, []
    for after in history:
        changes += diff(before, after, Circumstances(now=NOW, vm_name=VM))
        before = after
    still_on = tuple(e for e in (before.events if before else ()) if not is_over(e))
    assert same_content(Document(events=tuple(replay(changes).values())), Document(events=still_on))


@given(documents, documents)
def test_there_is_a_record_exactly_when_the_content_changed(before, after):
    changes = diff(before, after, Circumstances(now=NOW))
    over = {e.key for e in before.events if is_over(e)} - {e.key for e in after.events}
    left = Document(events=tuple(e for e in before.events if e.key not in over))
    assert bool(changes) == (not same_content(left, after))


@given(documents, documents)
def test_a_change_that_is_seen_again_gets_the_same_ids(before, after):
    def ids(gap):
        changes = diff(before, after, Circumstances(now=NOW + timedelta(hours=gap), gap=bool(gap)))
        return {
            (c.event.key, c.transition): record_id(
                vm_key="v",
                event_key=c.event.key,
                transition=c.transition,
                incarnation=after.incarnation,
                event=c.event,
            )
            for c in changes
        }

    first, again = ids(0), ids(1)
    assert all(first[key] == again[key] for key in first.keys() & again.keys())
    assert len(set(first.values())) == len(first)


@given(st.lists(documents, max_size=8), st.integers(0, 8))
def test_a_restart_at_any_point_neither_loses_nor_invents_a_record(history, stop_at):
    def run(*, restarted):
        belief, keys = new_belief(None), []
        for position, shown in enumerate(history):
            if restarted and position == stop_at:
                belief = new_belief(belief.document)
            for _ in range(4):  # a fall of the incarnation has to be seen three times
                step = belief.answer(shown, at(position * 10 + _))
                if step is not None:
                    belief.accept(step)
                    keys += [(c.event.key, c.transition in ENDS) for c in step.changes]
        return keys

    assert run(restarted=True) == run(restarted=False)


def new_belief(stored, *, last_good_at=NOW, booted=False):
    return DocumentTracker(stored, last_good_at=last_good_at, booted=booted, gap_seconds=10.0)


def at(seconds, *, wall_offset=0.0):
    return Instant(wall=NOW + timedelta(seconds=seconds + wall_offset), monotonic=1000.0 + seconds)


def feed(belief, *answers):
    """Give one answer a second from second 1 on; null is a failed poll. Return (second, transition, evidence)."""
    seen = []
    for second, answer in enumerate(answers, start=1):
        if answer is None:
            belief.failed()
            continue
        step = belief.answer(answer, at(second), vm_name=VM)
        if step is not None:
            belief.accept(step)
            seen += [(second, c.transition.value, c.evidence.value) for c in step.changes]
    return seen


STARTED = event("Started", not_before=None)


def test_absence_is_believed_at_once():
    assert feed(new_belief(None), document(STARTED), document(incarnation=2)) == [
        (1, "started", "observed"),
        (2, "completed", "observed"),
    ]


def test_after_a_restart_an_absence_is_inferred():
    assert feed(new_belief(document(STARTED)), document(incarnation=2)) == [(1, "completed", "inferred")]


def test_one_good_answer_that_still_shows_the_event_ends_the_gap():
    belief = new_belief(document(STARTED))
    assert feed(belief, document(STARTED), document(incarnation=2)) == [(2, "completed", "observed")]


def test_a_long_silence_is_a_gap_by_either_clock():
    for silence in (at(60), at(0, wall_offset=60)):
        belief = new_belief(None)
        belief.accept(belief.answer(document(STARTED), at(0)))
        step = belief.answer(document(incarnation=2), silence)
        assert [c.evidence for c in step.changes] == [Evidence.INFERRED]


def test_a_fallen_incarnation_needs_three_agreeing_answers_in_a_row():
    empty = document(incarnation=0)
    assert feed(new_belief(None), document(STARTED), empty, empty, empty)[1:] == [(4, "completed", "inferred")]
    broken = feed(new_belief(None), document(STARTED), empty, empty, None, empty, empty, empty)
    assert broken[1:] == [(7, "completed", "inferred")]


def test_an_event_that_comes_back_after_the_fall_never_ended():
    low = document(STARTED, incarnation=1)
    shown = feed(new_belief(None), document(STARTED, incarnation=9), document(), document(), low, low)
    assert shown == [(1, "started", "observed")]


def test_a_fall_is_still_doubted_after_a_restart():
    belief = new_belief(None)
    assert feed(belief, document(STARTED, incarnation=9), document()) == [(1, "started", "observed")]
    assert feed(new_belief(belief.document), document(), document(), document()) == [(3, "completed", "inferred")]


def test_a_new_event_is_told_at_once_while_an_absence_is_in_doubt():
    other = document(event(event_id="B"), incarnation=0)
    shown = feed(new_belief(None), document(STARTED), other, other, other)
    assert shown == [(1, "started", "observed"), (2, "scheduled", "observed"), (4, "completed", "inferred")]


def test_after_a_day_without_answers_an_empty_document_ends_nothing_for_five_minutes():
    belief = new_belief(document(STARTED), last_good_at=NOW - timedelta(days=2))
    shown = feed(belief, *[document(incarnation=2)] * 310)
    assert shown == [(301, "completed", "inferred")]


def test_while_the_service_turns_on_failed_polls_do_not_count_as_good_time():
    belief = new_belief(document(STARTED), last_good_at=NOW - timedelta(days=2))
    empty = document(incarnation=2)
    assert feed(belief, *[empty] * 100, *[None] * 5, *[empty] * 195) == []


def test_an_event_that_shows_up_late_after_a_day_never_ended():
    belief = new_belief(document(STARTED), last_good_at=NOW - timedelta(days=2))
    assert feed(belief, *[document(incarnation=2)] * 200, document(STARTED, incarnation=3)) == []


def test_a_settling_step_may_not_be_stored_as_a_good_answer():
    belief = new_belief(document(STARTED), last_good_at=NOW - timedelta(days=2))
    step = belief.answer(document(event(event_id="B"), incarnation=2), at(1))
    assert not step.is_settled
    assert [e.event_id for e in step.document.events] == ["B", "A-1"]


def test_a_step_that_could_not_be_stored_is_seen_again():
    belief, shown = new_belief(None), document(STARTED)
    first = belief.answer(shown, at(1))
    belief.doubt()
    again = belief.answer(shown, at(2))
    assert first.changes == again.changes != []


def test_the_keys_are_the_same_whatever_the_order_of_resources():
    one, other = event(resources=("a", "b")), event(resources=("b", "a"))
    keys = {transition_key("A-1", Transition.SCHEDULED, e) for e in (one, other)}
    ids = {
        record_id(vm_key="v", event_key="A-1", transition=Transition.SCHEDULED, incarnation=1, event=e)
        for e in (one, other)
    }
    assert len(keys) == len(ids) == 1
