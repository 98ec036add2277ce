"""The fold of records into events: the same in every order, however often, and however they are split."""

from __future__ import annotations

import random

import pytest
from fleet_records import fleet_record, histories, vm_id_of
from hypothesis import given
from hypothesis import strategies as st

from bridge.approval.digest import digest
from bridge.events.record import Evidence, Transition
from bridge.portal.fleet import Fleet, State, event_key, key_of_event_id


def folded(records):
    fleet = Fleet()
    for record in records:
        fleet.add(record)
    return fleet


def event_of(*records):
    [event] = folded(records).events().values()
    return event


def everything(fleet):
    return fleet.events(), fleet.vms(), fleet.ends, fleet.views


@given(histories(), st.randoms(use_true_random=False))
def test_the_same_records_twice_and_in_any_order_are_the_same_events(records, chance):
    shuffled = [*records, *records]
    chance.shuffle(shuffled)
    assert everything(folded(shuffled)) == everything(folded(records))


@given(histories(), st.randoms(use_true_random=False))
def test_two_processes_that_each_took_some_and_some_twice_come_to_the_same(records, chance):
    one, other = ([record for record in records if chance.random() < 0.7] for _ in range(2))
    seen = {record.id for record in (*one, *other)}
    other += [record for record in records if record.id not in seen]
    chance.shuffle(one)
    chance.shuffle(other)
    left, right = folded(one), folded(other)
    left.merge(right)
    assert everything(left) == everything(folded(records))
    right.merge(folded(one))
    assert everything(right) == everything(left)


def test_a_hundred_vms_in_random_order_are_one_event():
    records = [
        fleet_record(vm, sequence=sequence, transition=transition, seconds=sequence)
        for vm in range(100)
        for sequence, transition in enumerate((Transition.SCHEDULED, Transition.STARTED, Transition.COMPLETED), start=1)
    ]
    chance = random.Random(7)
    for _ in range(5):
        chance.shuffle(records)
        event = event_of(*records, *records[:50])
        assert (event.state, event.is_open, len(event.vms)) == (State.COMPLETED, False, 100)
        assert all(vm.agrees for vm in event.vms)


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


def test_an_event_that_a_vm_told_of_only_in_an_older_stream_is_over_for_it():
    told = fleet_record(0, stream=0, seconds=1)
    anew = fleet_record(0, stream=1, event_id="B", seconds=5)
    events = folded([told, anew]).events()
    old = events[key_of_event_id("A")]
    assert (old.state, old.evidence, old.is_open) == (State.ENDED, Evidence.UNKNOWN, False)
    assert events[key_of_event_id("B")].is_open


def test_a_late_record_of_an_older_stream_opens_nothing_again():
    told = fleet_record(0, stream=0, seconds=1)
    ended = fleet_record(0, stream=1, transition=Transition.COMPLETED, seconds=5)
    late = fleet_record(0, stream=0, sequence=2, transition=Transition.STARTED, seconds=2)
    event = event_of(ended, told, late)
    assert (event.state, event.first_observed_at) == (State.COMPLETED, told.observed_at)


@pytest.mark.parametrize("transition", [Transition.APPROVED, Transition.APPROVAL_FAILED, Transition.APPROVAL_REFUSED])
def test_what_became_of_an_approval_says_nothing_of_what_the_event_is(transition):
    outcome = fleet_record(0, sequence=3, transition=transition, seconds=3)
    event = event_of(fleet_record(0, sequence=2, transition=Transition.STARTED, seconds=2), outcome)
    assert event.state is State.STARTED


def test_a_test_record_says_nothing_at_all():
    fleet = folded([fleet_record(0, transition=Transition.TEST)])
    assert everything(fleet) == everything(Fleet())


def test_names_that_no_record_came_from_are_told():
    event = event_of(fleet_record(0, resources=("_VM_0", "vm_7", "vm_7")))
    assert event.unheard == ("vm_7",)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"event_id": None}, "it has no EventId"),
        ({"event_id": "x" * 257}, "its EventId is longer than 256 characters, or cannot be printed"),
        ({"event_id": "a\u2028b"}, "its EventId is longer than 256 characters, or cannot be printed"),
        ({"event_status": "Paused"}, "its status is Paused"),
        ({"transition": Transition.STARTED}, "it has started"),
        ({"transition": Transition.CANCELED}, "it is over"),
    ],
)
def test_what_nobody_can_decide_on_says_why(fields, why):
    assert event_of(fleet_record(0, **fields)).undecidable_because == why


def test_vms_are_told_apart_by_their_vm_id_in_any_case():
    upper = fleet_record(0, sequence=2, transition=Transition.STARTED, seconds=2)
    upper = type(upper)(**{**_fields(upper), "vm": type(upper.vm)(name="vm_0", vm_id=vm_id_of(0).upper())})
    event = event_of(fleet_record(0), upper)
    assert [vm.vm_key for vm in event.vms] == [vm_id_of(0)]


def test_events_without_an_event_id_are_one_where_type_machines_and_group_are():
    one, other = fleet_record(0, event_id=None), fleet_record(1, event_id=None, resources=("vm_1", "VM_0"))
    assert event_key(one.event, one.vm) == event_key(other.event, other.vm)
    elsewhere = type(one.vm)(name="vm_0", vm_id="x", resource_group="east", subscription_id="s")
    assert event_key(one.event, elsewhere) != event_key(one.event, one.vm)


def test_groups_are_those_of_all_vms():
    event = event_of(fleet_record(0), fleet_record(1, labels={"team": "search"}))
    assert event.groups == ("labels.team:payments", "labels.team:search", "resource_group:west")


def _fields(record):
    return {name: getattr(record, name) for name in record.__struct_fields__}
