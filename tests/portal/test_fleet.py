"""How the portal combines the views of VMs into one event."""

from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record, vm_id_of
from fold_kit import ARRIVAL, add, all_events, only_event, received
from msgspec.structs import replace

from bridge.approval.digest import digest
from bridge.clock import format_time
from bridge.events.record import Evidence, Transition
from bridge.portal.fleet import State, event_key, key_of_event_id
from bridge.portal.inventory import InventoryEntry
from bridge.portal.settings import LimitSettings
from bridge.portal.store.database import Store
from bridge.portal.store.ingest import add_records
from bridge.portal.store.vms import bind_name, read_vms, store_inventory

LATER = format_time(NOW + timedelta(days=1))


@pytest.fixture
def store(tmp_path):
    store = Store.of_file(tmp_path / "portal.db")
    store.migrate()
    yield store
    store.close()


def test_summary_counts_the_members_in_each_state(store):
    event = only_event(store, fleet_record(0, transition=Transition.STARTED, seconds=1), fleet_record(1, seconds=5))
    assert (event.state, event.counts) == (State.SCHEDULED, {"scheduled": 1, "started": 1})
    assert event.too_late_because == "A hold might be too late, because vm_0 reports that the event started."


def test_complete_report_takes_precedence_over_a_report_without_details(store):
    limits = LimitSettings(open_events=20)
    for number in range(21):
        store.write(add_records, received([fleet_record(1, event_id=f"E-{number}")]), ARRIVAL, limits)
    for vm in (1, 0):
        store.write(add_records, received([fleet_record(vm)]), ARRIVAL, limits)
    event = all_events(store)[key_of_event_id("A")]
    assert (event.undecidable_because, event.unconfirmed) == (None, ())
    assert [vm.is_member for vm in event.vms] == [True, True]


def test_long_label_does_not_remove_other_groups(store):
    event = only_event(store, fleet_record(0, labels={"a": "x" * 2_100, "team": "payments"}))
    assert "labels.team:payments" in event.groups


def test_name_in_the_inventory_belongs_to_its_vm(store):
    add(store, fleet_record(3, event_id="earlier"))
    store.write(store_inventory, [InventoryEntry(vm_key=vm_id_of(0), name="vm_0", groups=())])
    for vm in (66, 0):
        record = fleet_record(vm)
        add(store, replace(record, vm=replace(record.vm, name="vm_0")))
    found = store.read(read_vms, [vm_id_of(66), vm_id_of(0)])
    assert {key: vm.is_conflict for key, vm in found.items()} == {vm_id_of(66): True, vm_id_of(0): False}


def test_event_shows_the_version_that_most_members_report(store):
    names = ("vm_0", "vm_1", "vm_2")
    records = [fleet_record(vm, resources=names) for vm in range(3)]
    event = only_event(store, *records, fleet_record(2, sequence=2, resources=names, not_before_raw="later"))
    assert event.digest == digest(records[0].event)
    assert [vm.agrees for vm in event.vms] == [True, True, False]
    assert event.differing == 1


def test_changed_version_of_a_member_wins_a_tie(store):
    add(store, fleet_record(0), fleet_record(1))
    changed = fleet_record(1, sequence=2, event_type="Reboot")
    assert only_event(store, changed).digest == digest(changed.event)


def test_without_members_the_version_with_the_most_reports_is_shown(store):
    real = [fleet_record(vm, resources=("real_1", "real_2")) for vm in range(6, 11)]
    event = only_event(store, fleet_record(5, resources=("zz",)), *real)
    assert event.event.resources == ("real_1", "real_2")


def test_event_missing_from_the_active_events_ended_without_evidence(store):
    listed = fleet_record(0, sequence=2, transition=Transition.HEARTBEAT, active=())
    event = only_event(store, fleet_record(0), replace(listed, event=None))
    assert [(vm.state, vm.evidence) for vm in event.vms] == [(State.ENDED, Evidence.UNKNOWN)]


def test_two_contents_of_one_record_do_not_change_the_event_of_other_vms(store):
    first, second = (fleet_record(66, description=text) for text in ("planned", "harmless"))
    add(store, first, second)
    event = only_event(store, *(fleet_record(vm, description="planned") for vm in (0, 1)))
    assert event.event.description == "planned"


def test_different_description_of_an_outsider_is_only_in_its_own_view(store):
    event = only_event(
        store, fleet_record(0, description="a"), fleet_record(1, description="a"), fleet_record(2, description="b")
    )
    assert (event.event.description, event.differing) == ("a", 1)
    assert [vm.description for vm in event.vms] == ["a", "a", "b"]


def test_different_descriptions_of_members_are_not_shown(store):
    event = only_event(store, fleet_record(0, description="a"), fleet_record(1, description="b"))
    assert event.event.description is None
    assert [vm.description for vm in event.vms] == ["a", "b"]


def test_event_is_over_when_every_member_reports_its_end(store):
    event = only_event(store, fleet_record(0, transition=Transition.COMPLETED, seconds=9), fleet_record(1, seconds=5))
    assert (event.is_open, event.counts) == (True, {"scheduled": 1, "completed": 1})
    end = fleet_record(1, sequence=2, transition=Transition.CANCELED, evidence=Evidence.UNKNOWN, seconds=9)
    assert only_event(store, end).state is State.COMPLETED


@pytest.mark.parametrize(("minutes", "unconfirmed"), [(9, ()), (11, ("vm_0", "vm_1"))])
def test_name_is_confirmed_for_ten_minutes_without_heartbeats(store, minutes, unconfirmed):
    add(store, fleet_record(0), fleet_record(1), at=format_time(NOW))
    [event] = all_events(store, now=format_time(NOW + timedelta(minutes=minutes))).values()
    assert event.unconfirmed == unconfirmed


def test_name_is_confirmed_for_two_heartbeats(store):
    for sequence, minutes in ((1, 0), (2, 20), (3, 40)):
        heartbeat = fleet_record(0, sequence=sequence, transition=Transition.HEARTBEAT, seconds=60 * minutes)
        add(store, heartbeat, at=format_time(NOW + timedelta(minutes=minutes)))
    add(store, fleet_record(0, sequence=4, resources=("vm_0",)), at=format_time(NOW + timedelta(minutes=41)))
    for minutes, unconfirmed in ((80, ()), (82, ("vm_0",))):
        [event] = all_events(store, now=format_time(NOW + timedelta(minutes=minutes))).values()
        assert event.unconfirmed == unconfirmed


def test_second_vm_with_a_name_confirms_nothing_until_a_person_resolves_the_conflict(store):
    add(store, fleet_record(1, event_id="earlier"))
    impostor = fleet_record(7)
    impostor = replace(impostor, vm=replace(impostor.vm, name="vm_1"), labels={"team": "search"})
    event = only_event_named(store, fleet_record(0), impostor)
    assert (event.unconfirmed, [vm.is_member for vm in event.vms]) == (("vm_1",), [True, False])
    assert "labels.team:search" not in event.groups
    assert store.write(bind_name, vm_id_of(7), by="ann", at=ARRIVAL)
    event = only_event_named(store)
    assert (event.unconfirmed, "labels.team:search" in event.groups) == ((), True)


def only_event_named(store, *records):
    if records:
        add(store, *records)
    return all_events(store)[key_of_event_id("A")]


def test_vm_of_another_resource_group_confirms_no_name(store):
    impostor = fleet_record(7, resources=("vm_0", "vm_1", "vm_7"))
    impostor = replace(impostor, vm=replace(impostor.vm, name="vm_7", resource_group="mine"))
    names = ("vm_0", "vm_1", "vm_7")
    event = only_event(store, fleet_record(0, resources=names), fleet_record(1, resources=names), impostor)
    assert event.unconfirmed == ("vm_7",)


def states(store, *records, **options):
    add(store, *records, **options)
    return {event.event.event_id: event.state for event in all_events(store).values()}


def test_event_missing_from_the_newest_active_event_ids_has_ended_for_the_vm(store):
    announced = fleet_record(0, active=("A",))
    other = fleet_record(0, sequence=2, event_id="B", active=("B",), seconds=5)
    assert states(store, announced, other) == {"A": State.ENDED, "B": State.SCHEDULED}


def test_new_stream_or_unknown_list_ends_no_event(store):
    announced = fleet_record(0, active=("A",))
    restarted = fleet_record(0, stream=1, event_id="B")
    assert states(store, announced, restarted) == {"A": State.SCHEDULED, "B": State.SCHEDULED}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2), (2, 1, 0)])
def test_both_events_are_open_after_state_loss_and_a_new_event(store, order):
    announced = fleet_record(0, sequence=7, active=("A",))
    again = replace(announced, stream_id=fleet_record(0, stream=1).stream_id, sequence=1)
    second = fleet_record(0, stream=1, sequence=2, event_id="B", active=("A", "B"), seconds=60)
    for number in order:
        add(store, (announced, again, second)[number])
    assert states(store, second) == {"A": State.SCHEDULED, "B": State.SCHEDULED}


def test_heartbeat_with_a_list_ends_an_event_whose_ending_was_lost(store):
    life = fleet_record(0, sequence=9, transition=Transition.HEARTBEAT, active=())
    unknown = fleet_record(0, sequence=10, transition=Transition.HEARTBEAT)
    assert states(store, fleet_record(0), life, unknown) == {"A": State.ENDED}


def test_list_applies_to_older_records_that_arrive_later(store):
    add(store, fleet_record(0, sequence=5, transition=Transition.HEARTBEAT, active=()))
    assert states(store, fleet_record(0, sequence=3)) == {"A": State.ENDED}
    assert states(store, fleet_record(0, sequence=6, transition=Transition.HEARTBEAT, active=("A",))) == {
        "A": State.SCHEDULED
    }


def test_older_list_ends_no_newer_event(store):
    early = fleet_record(0, sequence=1, transition=Transition.HEARTBEAT, active=())
    assert states(store, fleet_record(0, sequence=2), early) == {"A": State.SCHEDULED}


def test_event_without_an_event_id_ends_with_the_first_list(store):
    life = fleet_record(0, sequence=2, transition=Transition.HEARTBEAT, active=())
    assert states(store, fleet_record(0, event_id=None), life) == {None: State.ENDED}


def test_list_of_one_vm_does_not_end_the_event_of_another_vm(store):
    life = fleet_record(1, sequence=2, transition=Transition.HEARTBEAT, active=())
    assert states(store, fleet_record(0), life) == {"A": State.SCHEDULED}


def test_late_record_of_an_older_stream_does_not_reopen_the_event(store):
    told = fleet_record(0, stream=0, seconds=1)
    ended = fleet_record(0, stream=1, transition=Transition.COMPLETED, seconds=5)
    late = fleet_record(0, stream=0, sequence=2, transition=Transition.STARTED, seconds=2)
    event = only_event(store, ended, told, late)
    assert (event.state, event.first_observed_at) == (State.COMPLETED, told.observed_at)


@pytest.mark.parametrize("stream_id", ["7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90", "no UUID"])
def test_stream_without_a_time_is_ordered_by_its_first_arrival(store, stream_id):
    add(store, replace(fleet_record(0), stream_id=stream_id), at=format_time(NOW - timedelta(hours=1)))
    assert only_event(store, fleet_record(0, transition=Transition.STARTED), at=LATER).state is State.STARTED


def test_future_time_is_replaced_by_the_arrival_and_a_past_time_is_kept(store):
    ahead = only_event(store, fleet_record(0, seconds=300 * 86_400))
    assert (ahead.first_observed_at, ahead.observed_at) == (ARRIVAL, ARRIVAL)
    assert only_event(store, fleet_record(1, seconds=-7_200)).first_observed_at == format_time(NOW - timedelta(hours=2))


@pytest.mark.parametrize("transition", [Transition.APPROVED, Transition.APPROVAL_FAILED, Transition.APPROVAL_REFUSED])
def test_outcome_of_an_approval_does_not_change_the_state(store, transition):
    outcome = fleet_record(0, sequence=3, transition=transition, seconds=3)
    event = only_event(store, fleet_record(0, sequence=2, transition=Transition.STARTED, seconds=2), outcome)
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
def test_undecidable_event_has_a_reason(store, fields, why):
    assert only_event(store, fleet_record(0, **fields)).undecidable_because == why


def test_events_without_an_event_id_match_by_type_vms_and_group():
    one, other = fleet_record(0, event_id=None), fleet_record(1, event_id=None, resources=("vm_1", "VM_0"))
    assert event_key(one.event, one.vm) == event_key(other.event, other.vm)
    elsewhere = type(one.vm)(name="vm_0", vm_id="x", resource_group="east", subscription_id="s")
    assert event_key(one.event, elsewhere) != event_key(one.event, one.vm)
