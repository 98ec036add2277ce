"""Retention and the storage limit of one VM, on each database."""

from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record, stream_id_of, vm_id_of
from fold_kit import ARRIVAL, add, all_events, received
from msgspec.structs import replace
from portal_databases import audit_fault
from sqlalchemy import func, select

from bridge.clock import format_time
from bridge.events.record import Impact, Transition
from bridge.portal.audit import Entry
from bridge.portal.fleet import key_of_event_id
from bridge.portal.schema import decisions, event_vms, metadata, records, verdicts, vms
from bridge.portal.settings import LimitSettings
from bridge.portal.store.audit import add_entries
from bridge.portal.store.decisions import NewDecision, insert_decisions
from bridge.portal.store.events import events_of
from bridge.portal.store.ingest import ReceivedRecord, add_records
from bridge.portal.store.retention import delete_old, trim_next_vm
from bridge.portal.store.vms import read_vms


def rows(store, table):
    return store.read(lambda connection: connection.execute(select(func.count()).select_from(table)).scalar_one())


def trim(store, limits):
    key = ""
    while key is not None:
        key = store.write(trim_next_vm, after=key, most_bytes=limits.vm_bytes)


def test_old_records_and_events_are_deleted_and_the_audit_still_verifies(store):
    old = format_time(NOW - timedelta(days=401))
    add(store, *(fleet_record(vm, event_id=f"E-{vm}", seconds=-401 * 86_400) for vm in range(600)), at=old)
    entry = Entry(actor="ann", action="held", subject="E", details={})
    store.write(add_entries, [entry], at=old)
    add(store, fleet_record(0, event_id="new"))
    rounds = 1
    while store.write(delete_old, before=format_time(NOW - timedelta(days=400))):
        rounds += 1
    assert rounds > 1
    assert [event.event.event_id for event in all_events(store).values()] == ["new"]
    assert (rows(store, records), rows(store, vms), rows(store, event_vms)) == (1, 1, 1)
    assert audit_fault(store) is None


def test_decisions_and_verdicts_of_deleted_events_are_deleted(store):
    add(store, fleet_record(0, event_id="open"))
    old = format_time(NOW - timedelta(days=401))
    for event_id in ("gone", "open"):
        ids = {"verdict_id": event_id, "event_key": key_of_event_id(event_id)}
        texts = dict.fromkeys(("choice", "digest", "person_key", "user_name", "reason", "lifts"), "x")
        verdict = {**texts, **ids, "made_at": old, "expires_at": old}
        store.write(lambda connection, row=verdict: connection.execute(verdicts.insert(), row))
        new = NewDecision(decision="x", vm_key="vm", jws=event_id, **ids, issued_at_seconds=1, expires_at_seconds=2)
        store.write(insert_decisions, [new], at=old)
    store.write(delete_old, before=format_time(NOW - timedelta(days=400)))
    assert (rows(store, decisions), rows(store, verdicts)) == (1, 1)


def test_invented_streams_of_a_vm_do_not_accumulate(store):
    for stream in range(40):
        at = format_time(NOW + timedelta(seconds=stream))
        add(store, fleet_record(0, stream=stream, transition=Transition.HEARTBEAT), at=at)
    [listed] = store.read(read_vms, [vm_id_of(0)]).values()
    assert list(listed.streams) == [stream_id_of(0, stream) for stream in range(24, 40)]


def test_vm_beyond_its_storage_loses_its_oldest_records_and_no_open_event(store):
    limits = LimitSettings(record_bytes=16_384, open_events=2)
    add(store, fleet_record(1, event_id="of another VM"), fleet_record(0, event_id="open", sequence=0))
    for number in range(200):
        for sequence, transition in ((1, Transition.SCHEDULED), (2, Transition.COMPLETED)):
            record = fleet_record(0, event_id=f"E-{number}", sequence=2 * number + sequence, transition=transition)
            store.write(add_records, [ReceivedRecord(record, "x" * 1_000)], ARRIVAL, limits)
        trim(store, limits)
    assert rows(store, records) < 2 * limits.vm_bytes / 2_000
    found = {event.event.event_id for event in all_events(store).values() if event.is_open}
    assert found == {"of another VM", "open"}


def test_vm_beyond_its_limits_still_confirms_events_of_other_vms(store):
    limits = LimitSettings(record_bytes=16_384, open_events=2)
    add(store, fleet_record(1, event_id="real"))
    for number in range(1, 4):
        invented = fleet_record(0, event_id=f"E-{number}", sequence=number)
        store.write(add_records, [ReceivedRecord(invented, "x" * limits.vm_bytes)], ARRIVAL, limits)
    real = fleet_record(0, event_id="real", sequence=4)
    store.write(add_records, [ReceivedRecord(real, "x")], ARRIVAL, limits)
    [event] = [each for each in all_events(store).values() if each.event.event_id == "real"]
    assert ({vm.name for vm in event.vms}, event.unconfirmed) == ({"vm_0", "vm_1"}, ())


def test_event_that_is_stored_completely_keeps_its_details_when_the_vm_is_full(store):
    limits = LimitSettings(record_bytes=16_384, open_events=20)
    real = [ReceivedRecord(fleet_record(0, event_id="real"), "x")]
    large = [ReceivedRecord(fleet_record(0, event_id="large", sequence=2), "x" * limits.vm_bytes)]
    for received_now in (real, large, real):
        store.write(add_records, received_now, ARRIVAL, limits)
    [event] = [each for each in all_events(store).values() if each.event.event_id == "real"]
    assert event.undecidable_because is None


def test_labels_that_change_later_stay_below_the_limit(store):
    limits = LimitSettings(record_bytes=16_384, open_events=20)
    before = bytes_of_texts(store)
    for number in range(100):
        record = fleet_record(0, event_id=f"E-{number}", sequence=number, labels={})
        store.write(add_records, received([record]), ARRIVAL, limits)
    labels = {f"{number}": "\N{GRINNING FACE}" * 240 for number in range(64)}
    store.write(add_records, received([fleet_record(0, sequence=100, labels=labels)]), ARRIVAL, limits)
    vm_row = 3 * 64 * 4 * 240
    assert bytes_of_texts(store) - before < limits.vm_bytes + vm_row


def test_vm_with_many_events_in_its_life_keeps_the_details_of_new_events(store):
    limits = LimitSettings(record_bytes=65_536, open_events=20)
    for number in range(400):
        fields = {"event_id": f"E-{number}", "resources": tuple(f"vm_{each}" for each in range(50))}
        new = fleet_record(0, sequence=2 * number, seconds=number, **fields)
        store.write(add_records, received([new]), ARRIVAL, limits)
        [event] = store.read(events_of, [key_of_event_id(f"E-{number}")], now=ARRIVAL).values()
        assert event.undecidable_because is None
        ended = fleet_record(0, sequence=2 * number + 1, seconds=number, transition=Transition.COMPLETED, **fields)
        store.write(add_records, received([ended]), ARRIVAL, limits)
        if number % 10 == 0:
            trim(store, limits)
    assert rows(store, event_vms) < 300


def test_deleted_open_event_does_not_count_as_open(store):
    old = format_time(NOW - timedelta(days=401))
    add(store, fleet_record(0, event_id="old", seconds=-401 * 86_400), at=old)
    add(store, fleet_record(0, event_id="new", sequence=2))
    store.write(delete_old, before=format_time(NOW - timedelta(days=400)))
    add(store, fleet_record(0, event_id="newer", sequence=3))
    [vm] = store.read(read_vms, [vm_id_of(0)]).values()
    assert vm.open_events == 2


def test_vm_with_three_times_its_open_events_adds_no_event_that_only_it_reports(store):
    limits = LimitSettings(open_events=20)
    for number in range(70):
        record = fleet_record(0, event_id=f"E-{number}", sequence=number)
        store.write(add_records, received([record]), ARRIVAL, limits)
    assert len(all_events(store)) == 60


def test_heartbeats_do_not_use_the_storage_of_a_vm(store):
    add(store, fleet_record(0, event_id="A"))
    [before] = store.read(read_vms, [vm_id_of(0)]).values()
    for sequence in range(2, 12):
        active = ("A",) if sequence % 2 else ()
        beat = fleet_record(0, sequence=sequence, transition=Transition.HEARTBEAT, active=active)
        add(store, replace(beat, event=None))
    [after] = store.read(read_vms, [vm_id_of(0)]).values()
    assert (before.open_events, after.open_events) == (1, 1)
    assert after.stored_bytes == before.stored_bytes


def bytes_of_texts(store):
    """Return the size of all texts in the database."""
    found = 0
    for table in metadata.sorted_tables:
        for row in store.read(lambda connection, table=table: connection.execute(select(table)).all()):
            found += sum(len(value.encode()) for value in row if isinstance(value, str))
    return found


LARGE = {
    "names": {"resources": tuple(f"\N{GRINNING FACE}{number}" for number in range(1_500))},
    "a description": {"description": "\N{GRINNING FACE}" * 3_500},
    "labels": {"labels": {f"{number}": "\N{GRINNING FACE}" * 60 for number in range(64)}},
}


@pytest.mark.parametrize("large", [*LARGE.values(), {}], ids=[*LARGE, "an impact"])
def test_data_of_one_vm_stays_below_its_limit_in_bytes(store, large):
    impact = None if large else Impact(reason="\N{GRINNING FACE}" * 3_500)
    limits = LimitSettings(record_bytes=16_384, open_events=20)
    add(store, fleet_record(0, event_id="first", sequence=0, **large))
    before, most = bytes_of_texts(store), 0
    for number in range(100):
        for sequence, transition in ((1, Transition.SCHEDULED), (2, Transition.COMPLETED)):
            fields = {"sequence": 2 * number + sequence, "transition": transition, **large}
            record = replace(fleet_record(0, event_id=f"E-{number}", **fields), impact=impact)
            store.write(add_records, received([record]), ARRIVAL, limits)
        if number % 5 == 0:
            most = max(most, bytes_of_texts(store) - before)
            trim(store, limits)
    assert limits.vm_bytes / 4 < most < limits.vm_bytes


def test_trim_keeps_the_newest_records_and_new_records_are_stored_again(store):
    limits = LimitSettings(record_bytes=16_384, open_events=4)
    for number in range(40):
        at = format_time(NOW + timedelta(seconds=number))
        store.write(add_records, [ReceivedRecord(fleet_record(0, sequence=number), "x" * 1_000)], at, limits)
    stored = rows(store, records)
    assert stored < 40  # full
    trim(store, limits)
    left = store.read(lambda connection: sorted(connection.execute(select(records.c.sequence)).scalars()))
    assert 0 < len(left) < stored
    assert left == list(range(stored - len(left), stored))
    store.write(add_records, [ReceivedRecord(fleet_record(0, sequence=99), "x")], ARRIVAL, limits)
    assert rows(store, records) == len(left) + 1


def test_full_vm_with_many_open_events_adds_no_event_that_only_it_reports(store):
    limits = LimitSettings(record_bytes=16_384, open_events=2)
    for number in range(5):
        invented = fleet_record(0, event_id=f"E-{number}", sequence=number)
        store.write(add_records, [ReceivedRecord(invented, "x" * limits.vm_bytes)], ARRIVAL, limits)
    assert len(all_events(store)) == 2
