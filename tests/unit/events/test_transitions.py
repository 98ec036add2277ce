"""The transition table, row by row, and over any two documents."""

from datetime import timedelta

import pytest
from document_kit import DOCUMENTS, NOW, SOON, VM, changes_between, document, event, same_content
from hypothesis import given
from hypothesis import strategies as st

from bridge.events.event import Document
from bridge.events.record import Transition
from bridge.events.transitions import is_over


def the_change(before, after, **known):
    changes = changes_between(before, after, **known)
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


def test_change_of_another_field_is_an_update_with_its_old_value():
    before, after = document(event()), document(event(not_before=SOON + timedelta(minutes=5)), incarnation=2)
    (change,) = changes_between(before, after)
    assert (change.transition, change.changed) == (Transition.UPDATED, ("not_before",))
    assert change.previous == {"event_status": "Scheduled", "not_before": "2026-11-20T11:10:00Z"}


def test_change_of_an_unknown_field_is_an_update():
    before, after = document(event(extra={"X": 1})), document(event(extra={"X": 2}))
    (change,) = changes_between(before, after)
    assert (change.changed, change.previous["extra"]) == (("extra",), {"X": 1})


def test_order_of_resources_and_format_of_times_are_not_a_change():
    before = document(event(resources=("a", "b"), not_before_raw="2026-11-20T11:10:00Z"))
    after = document(event(resources=("b", "a"), not_before_raw="Fri, 20 Nov 2026 11:10:00 GMT"), incarnation=2)
    assert changes_between(before, after) == []


@pytest.mark.parametrize(
    ("status", "incarnation", "known", "expected"),
    [
        ("Started", 2, {}, ("completed", "observed")),
        ("Started", 2, {"has_gap": True}, ("completed", "inferred")),
        ("Started", 0, {}, ("completed", "observed")),
        ("Started", 2, {"came_back": True}, ("completed", "inferred")),
        ("Scheduled", 2, {"was_started": True}, ("completed", "observed")),
        ("Paused", 2, {"was_started": True}, ("completed", "observed")),
        ("Scheduled", 2, {}, ("canceled", "inferred")),
        ("Scheduled", 2, {"has_gap": True}, ("canceled", "inferred")),
        ("Scheduled", 3, {}, ("ended", "unknown")),
        ("Scheduled", 1, {}, ("canceled", "inferred")),
        ("Scheduled", 0, {}, ("ended", "unknown")),
        ("Scheduled", None, {}, ("canceled", "inferred")),
        ("Scheduled", "abc", {}, ("canceled", "inferred")),
        ("Scheduled", "2", {}, ("canceled", "inferred")),
        ("Scheduled", "3", {}, ("ended", "unknown")),
        ("Scheduled", None, {"has_gap": True}, ("ended", "unknown")),
        ("Scheduled", 2, {"approved": frozenset({"A-1"})}, ("ended", "unknown")),
        ("Scheduled", 2, {"observed_at": SOON}, ("ended", "unknown")),
        ("Scheduled", 2, {"booted_at": NOW}, ("ended", "unknown")),
        ("Scheduled", 2, {"seconds_since_good": 86399.0, "has_gap": True}, ("canceled", "inferred")),
        ("Scheduled", 2, {"seconds_since_good": 86400.0, "has_gap": True}, ("ended", "unknown")),
        ("Paused", 2, {}, ("ended", "unknown")),
    ],
)
def test_an_absence_is_classified_by_the_known_facts(status, incarnation, known, expected):
    assert the_change(document(event(status)), document(incarnation=incarnation), **known) == expected


@pytest.mark.parametrize(
    ("fields", "known", "expected"),
    [
        ({}, {}, ("completed", "boot_id")),
        ({"event_type": "Redeploy"}, {"vm_name": "VM_0"}, ("completed", "boot_id")),
        ({}, {"vm_name": "vm_00"}, ("ended", "unknown")),
        ({"event_type": "Freeze"}, {}, ("ended", "unknown")),
        ({"event_type": "Preempt"}, {}, ("ended", "unknown")),
        ({"event_type": "Preempt"}, {"approved": frozenset({"A-1"})}, ("ended", "unknown")),
        ({"not_before": None, "not_before_raw": "soon"}, {}, ("ended", "unknown")),
    ],
)
def test_boot_proves_only_a_reboot_or_redeploy_of_this_vm(fields, known, expected):
    before = document(event(**fields))
    known = {"has_gap": True, "observed_at": SOON + timedelta(hours=1), "booted_at": SOON, **known}
    assert the_change(before, document(incarnation=3), **known) == expected


@pytest.mark.parametrize(
    ("booted_before_not_before", "approved", "expected"),
    [
        (timedelta(0), frozenset(), ("completed", "boot_id")),
        (timedelta(seconds=60), frozenset(), ("completed", "boot_id")),
        (timedelta(seconds=61), frozenset(), ("ended", "unknown")),
        (timedelta(minutes=9), frozenset(), ("ended", "unknown")),
        (timedelta(minutes=9), frozenset({"A-1"}), ("completed", "boot_id")),
        (timedelta(minutes=9), frozenset({"B-2"}), ("ended", "unknown")),
    ],
)
def test_boot_before_not_before_is_no_proof_without_an_approval_by_this_agent(
    booted_before_not_before, approved, expected
):
    """If the user reboots during the notice period, the event is still scheduled or was canceled."""
    known = {"has_gap": True, "booted_at": SOON - booted_before_not_before, "approved": approved}
    for observed_at in (SOON - timedelta(minutes=1), SOON + timedelta(hours=1)):
        assert the_change(document(event()), document(incarnation=2), observed_at=observed_at, **known) == expected


RENAMED = {"event_id": "NEW", "not_before": None, "not_before_raw": ""}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (event("Started", **RENAMED), ("ended", "unknown")),
        (event(event_id="NEW"), ("ended", "unknown")),
        (event("Started", **{**RENAMED, "event_id": None}), ("ended", "unknown")),
        (event("Started", **RENAMED, resources=("VM_0",)), ("ended", "unknown")),
        (event("Started", **RENAMED, event_type="Freeze"), ("canceled", "inferred")),
        (event("Started", **RENAMED, event_source="User"), ("canceled", "inferred")),
        (event("Started", **RENAMED, resources=(VM, "vm_1")), ("canceled", "inferred")),
    ],
)
def test_event_replaced_by_a_similar_event_ends_first_and_is_not_canceled(shown, expected):
    gone, new = changes_between(document(event()), document(shown, incarnation=2))
    assert (gone.event.event_id, gone.transition.value, gone.evidence.value) == ("A-1", *expected)
    assert new.event is shown


def test_event_is_not_canceled_while_a_similar_event_remains():
    other = event(event_id="B")
    assert the_change(document(event(), other), document(other, incarnation=2)) == ("ended", "unknown")


@pytest.mark.parametrize(
    ("rise", "expected"), [(-1, "ended"), (0, "canceled"), (1, "canceled"), (3, "canceled"), (4, "ended")]
)
@pytest.mark.parametrize("has_gap", [False, True])
def test_incarnation_can_increase_by_the_number_of_changed_events(rise, expected, has_gap):
    same = event(event_id="same", event_type="Freeze")
    before = document(event(), event(event_id="B", event_type="Redeploy"), same, incarnation=5)
    after = document(
        event("Started", event_id="B", event_type="Redeploy"),
        same,
        event(event_id="C", event_type="Preempt"),
        incarnation=5 + rise,
    )
    assert changes_between(before, after, has_gap=has_gap)[0].transition.value == expected


def test_ended_event_keeps_its_last_known_fields():
    was = event("Started", not_before=None, not_before_raw="")
    (change,) = changes_between(document(was), document(incarnation=2))
    assert (change.event, change.changed) == (was, ())
    assert change.previous == {"event_status": "Started", "not_before": None}


def test_events_that_share_an_id_are_paired_by_shape_then_by_position():
    one, two = event(resources=("a",)), event(resources=("b",))
    moved = event("Started", resources=("b",))
    assert [c.event for c in changes_between(document(one, two), document(moved, one))] == [moved]
    renamed = event(resources=("c",))
    (change,) = changes_between(document(one, two), document(two, renamed))
    assert (change.event, change.changed) == (renamed, ("resources",))


# Complete histories.


def replay(changes):
    world = {}
    for change in changes:
        if change.transition.is_ending or is_over(change.event):
            world.pop(change.event.key, None)
        else:
            world[change.event.key] = change.event
    return world


@given(st.lists(DOCUMENTS, max_size=8))
def test_replay_of_all_records_reproduces_the_last_document(history):
    before, changes = None, []
    for after in history:
        changes += changes_between(before or Document(), after)
        before = after
    still_on = tuple(e for e in (before.events if before else ()) if not is_over(e))
    assert same_content(Document(events=tuple(replay(changes).values())), Document(events=still_on))


@given(DOCUMENTS, DOCUMENTS)
def test_record_is_produced_exactly_when_the_content_changes(before, after):
    changes = changes_between(before, after)
    over = {e.key for e in before.events if is_over(e)} - {e.key for e in after.events}
    left = Document(events=tuple(e for e in before.events if e.key not in over))
    assert bool(changes) == (not same_content(left, after))
