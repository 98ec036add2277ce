"""The fold of records into events: the same in every order, with duplicates, and with lists of active events."""

from __future__ import annotations

from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record, histories
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bridge.approval.digest import digest
from bridge.clock import format_time
from bridge.events.record import Evidence, Transition
from bridge.portal.fleet import Fleet, State, event_key, key_of_event_id

LATER = format_time(NOW + timedelta(days=1))


def folded(records, *, received_at=LATER):
    fleet = Fleet()
    for record in records:
        fleet.add(record, received_at=received_at)
    return fleet


def event_of(*records):
    [event] = folded(records).events().values()
    return event


def everything(fleet):
    return fleet.events(), fleet.vms, fleet.views


@given(histories(), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_the_same_records_twice_and_in_any_order_are_the_same_events(records, chance):
    shuffled = [*records, *records]
    chance.shuffle(shuffled)
    assert everything(folded(shuffled)) == everything(folded(records))


def test_started_beats_scheduled_whoever_spoke_last():
    event = event_of(fleet_record(0, transition=Transition.STARTED, seconds=1), fleet_record(1, seconds=5))
    assert event.state is State.STARTED
    assert [(vm.vm.name, vm.agrees) for vm in event.vms] == [("vm_0", True), ("vm_1", False)]


def test_the_record_that_counts_is_the_newest_of_the_furthest_state():
    old, new = fleet_record(0, seconds=1), fleet_record(1, seconds=2, not_before_raw="later")
    event = event_of(new, old)
    assert (event.record_id, event.digest) == (new.id, digest(new.event))
    assert [(vm.vm.name, vm.agrees, vm.digest) for vm in event.vms] == [
        ("vm_0", False, digest(old.event)),
        ("vm_1", True, digest(new.event)),
    ]


@pytest.mark.parametrize(
    ("evidence", "seconds", "is_open"),
    [
        (Evidence.OBSERVED, 9, False),
        (Evidence.OBSERVED, 3, True),
        (Evidence.INFERRED, 9, True),
        (Evidence.UNKNOWN, 9, True),
        (Evidence.BOOT_ID, 9, True),
    ],
)
def test_an_ending_that_not_every_vm_saw_counts_when_it_was_observed_and_is_the_newest(evidence, seconds, is_open):
    event = event_of(
        fleet_record(0, transition=Transition.COMPLETED, evidence=evidence, seconds=seconds),
        fleet_record(1, transition=Transition.STARTED, seconds=5),
    )
    assert event.is_open is is_open
    assert [vm.vm.name for vm in event.vms if not vm.agrees] == ["vm_0" if is_open else "vm_1"]


def test_an_ending_of_every_vm_is_the_best_proven():
    event = event_of(
        fleet_record(0, transition=Transition.ENDED, evidence=Evidence.UNKNOWN, seconds=9),
        fleet_record(1, transition=Transition.CANCELED, evidence=Evidence.INFERRED, seconds=5),
        fleet_record(2, transition=Transition.COMPLETED, evidence=Evidence.BOOT_ID, seconds=1),
    )
    assert (event.state, event.evidence) == (State.COMPLETED, Evidence.BOOT_ID)


def states(*records, **options):
    return {event.event.event_id: event.state for event in folded(records, **options).events().values()}


def test_event_that_is_not_in_the_newest_list_has_ended_for_the_vm():
    announced = fleet_record(0, active=("A",))
    other = fleet_record(0, sequence=2, event_id="B", active=("B",), seconds=5)
    events = folded([announced, other]).events()
    old = events[key_of_event_id("A")]
    assert (old.state, old.evidence, old.is_open) == (State.ENDED, Evidence.UNKNOWN, False)
    assert events[key_of_event_id("B")].is_open


def test_new_stream_and_unknown_list_end_no_event():
    announced = fleet_record(0, active=("A",))
    restarted = fleet_record(0, stream=1, event_id="B")
    assert states(announced, restarted) == {"A": State.SCHEDULED, "B": State.SCHEDULED}


def test_both_events_are_open_after_the_agent_lost_its_state_and_another_event_came():
    announced = fleet_record(0, sequence=7, active=("A",))
    again = replace(announced, stream_id=fleet_record(0, stream=1).stream_id, sequence=1)
    second = fleet_record(0, stream=1, sequence=2, event_id="B", active=("A", "B"), seconds=60)
    for arrived in ((announced, again, second), (announced, second), (second, again, announced)):
        assert states(*arrived) == {"A": State.SCHEDULED, "B": State.SCHEDULED}


def test_heartbeat_with_a_list_ends_an_event_whose_ending_was_lost():
    life = fleet_record(0, sequence=9, transition=Transition.HEARTBEAT, active=())
    unknown = fleet_record(0, sequence=10, transition=Transition.HEARTBEAT)
    assert states(fleet_record(0), life, unknown) == {"A": State.ENDED}


def test_older_list_ends_no_newer_event():
    early = fleet_record(0, sequence=1, transition=Transition.HEARTBEAT, active=())
    assert states(fleet_record(0, sequence=2), early) == {"A": State.SCHEDULED}


def test_event_without_an_event_id_has_ended_once_a_list_is_known():
    life = fleet_record(0, sequence=2, transition=Transition.HEARTBEAT, active=())
    assert states(fleet_record(0, event_id=None), life) == {None: State.ENDED}


def test_list_of_one_vm_says_nothing_about_another():
    life = fleet_record(1, sequence=2, transition=Transition.HEARTBEAT, active=())
    assert states(fleet_record(0), life) == {"A": State.SCHEDULED}


def test_a_late_record_of_an_older_stream_opens_nothing_again():
    told = fleet_record(0, stream=0, seconds=1)
    ended = fleet_record(0, stream=1, transition=Transition.COMPLETED, seconds=5)
    late = fleet_record(0, stream=0, sequence=2, transition=Transition.STARTED, seconds=2)
    event = event_of(ended, told, late)
    assert (event.state, event.first_observed_at) == (State.COMPLETED, told.observed_at)


def test_stream_of_a_clock_that_was_ahead_does_not_outrank_later_streams():
    arrival = format_time(NOW + timedelta(seconds=1))
    fleet = folded([fleet_record(0, stream=600)], received_at=arrival)
    fleet.add(fleet_record(0, stream=5, transition=Transition.STARTED), received_at=LATER)
    [event] = fleet.events().values()
    assert event.state is State.STARTED


@pytest.mark.parametrize("stream_id", ["7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90", "no UUID"])
def test_stream_that_has_no_time_counts_from_its_first_arrival(stream_id):
    fleet = folded([replace(fleet_record(0), stream_id=stream_id)], received_at=format_time(NOW - timedelta(hours=1)))
    fleet.add(fleet_record(0, transition=Transition.STARTED), received_at=LATER)
    [event] = fleet.events().values()
    assert event.state is State.STARTED


@pytest.mark.parametrize("transition", [Transition.APPROVED, Transition.APPROVAL_FAILED, Transition.APPROVAL_REFUSED])
def test_what_became_of_an_approval_says_nothing_of_what_the_event_is(transition):
    outcome = fleet_record(0, sequence=3, transition=transition, seconds=3)
    event = event_of(fleet_record(0, sequence=2, transition=Transition.STARTED, seconds=2), outcome)
    assert event.state is State.STARTED


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"event_id": None}, "the event has no EventId"),
        ({"event_id": "x" * 257}, "the EventId is longer than 256 characters or not printable"),
        ({"event_id": "a\u2028b"}, "the EventId is longer than 256 characters or not printable"),
        ({"event_status": "Paused"}, "the event's status is Paused"),
        ({"transition": Transition.STARTED}, "the event has started"),
        ({"transition": Transition.CANCELED}, "the event is over"),
    ],
)
def test_what_nobody_can_decide_on_says_why(fields, why):
    assert event_of(fleet_record(0, **fields)).undecidable_because == why


def test_events_without_an_event_id_are_one_where_type_machines_and_group_are():
    one, other = fleet_record(0, event_id=None), fleet_record(1, event_id=None, resources=("vm_1", "VM_0"))
    assert event_key(one.event, one.vm) == event_key(other.event, other.vm)
    elsewhere = type(one.vm)(name="vm_0", vm_id="x", resource_group="east", subscription_id="s")
    assert event_key(one.event, elsewhere) != event_key(one.event, one.vm)
