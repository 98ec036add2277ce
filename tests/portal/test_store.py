"""The database: the same events for any order of records and for concurrent writers, migrations, and the backup."""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from fleet_records import fleet_record, histories, stream_id_of
from fold_kit import add, all_events, received
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sqlalchemy import select

from bridge.errors import BridgeError
from bridge.events.record import Transition
from bridge.portal.fleet import State
from bridge.portal.schema import metadata
from bridge.portal.schema import records as records_table
from bridge.portal.store.database import Store, StoreUnavailable, epoch
from bridge.portal.store.events import EventFilter, events_over_since, list_events
from bridge.portal.store.ingest import ReceivedRecord, add_records
from bridge.portal.store.open_events import list_lines

AT = "2026-11-20T11:30:00.000Z"


@pytest.fixture
def file_store(tmp_path):
    store = Store.of_file(tmp_path / "portal.db")
    store.migrate()
    yield store
    store.close()


def events_in(store):
    return all_events(store, now=AT)


def batches(records, chance):
    rest = list(records)
    while rest:
        size = chance.randint(1, 12)
        yield rest[:size]
        rest = rest[size:]


def check_two_stores(new_database, records, chance):
    """Compare two stores with shuffled and duplicate records with one store that receives each record once."""
    with new_database() as database, new_database() as other:
        stores, in_order = [database.store(), database.store()], other.store()
        add(in_order, *records, at=AT)
        shuffled = [*records, *records]
        chance.shuffle(shuffled)
        for some in batches(shuffled, chance):
            add(chance.choice(stores), *some, at=AT)
        assert views_in(stores[0]) == views_in(in_order)


def views_in(store):
    """Return the values that must not depend on the order: the view of each VM, and the counts."""
    return {
        key: ({vm.vm_key: (vm.state, vm.digest, vm.record_id, vm.is_member) for vm in event.vms}, event.counts)
        for key, event in events_in(store).items()
    }


@given(histories(most_vms=12), st.randoms(use_true_random=False))
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_two_stores_with_shuffled_duplicates_have_the_same_events(new_database, records, chance):
    check_two_stores(new_database, records, chance)


@pytest.mark.long
@pytest.mark.timeout(1800)
@given(histories(most_vms=100), st.randoms(use_true_random=False))
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_two_stores_have_the_same_events_for_500_random_histories(new_database, records, chance):
    check_two_stores(new_database, records, chance)


def send(store, records):
    """Store *records* with retries while the store is unavailable, as an agent does."""
    for _ in range(100):
        with contextlib.suppress(StoreUnavailable):
            return store.write(add_records, records, AT)
    raise AssertionError("the database was never free")


def test_concurrent_stores_have_the_same_events_for_100_vms(database):
    records = [
        fleet_record(vm, sequence=sequence, event_id=event_id, transition=transition, seconds=sequence)
        for vm in range(100)
        for event_id in ("A", "B")
        for sequence, transition in enumerate(
            (Transition.SCHEDULED, Transition.STARTED, Transition.APPROVED), start=1 if event_id == "A" else 4
        )
    ]
    stores = [database.store() for _ in range(2)]

    def take_in(seed):
        chance = random.Random(seed)
        mine = list(records)
        chance.shuffle(mine)
        for start in range(0, len(mine), 40):
            send(stores[seed], received(mine[start : start + 40]))

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(take_in, range(len(stores))))
    assert {event.counts["started"] for event in events_in(stores[0]).values()} == {2}
    assert {sum(len(event.vms) for event in events_in(stores[0]).values())} == {200}
    stored = stores[0].read(lambda connection: connection.execute(select(records_table.c.record_id)).scalars().all())
    assert sorted(stored) == sorted(record.id for record in records)


def test_failed_batch_is_rolled_back(store):
    good = fleet_record(0)
    broken = ReceivedRecord(replace(fleet_record(1), id=None), "{}")  # an invalid ID
    with pytest.raises(StoreUnavailable):
        store.write(add_records, [*received([good]), broken], AT)
    assert events_in(store) == {}
    store.write(add_records, received([good]), AT)
    assert len(events_in(store)) == 1


def test_heartbeat_is_not_stored_but_its_active_event_ids_apply(store):
    store.write(add_records, received([fleet_record(0)]), AT)
    for sequence, active in ((2, ("A",)), (3, ())):
        life = fleet_record(0, sequence=sequence, transition=Transition.HEARTBEAT, seconds=5, active=active)
        store.write(add_records, received([life, life]), AT)
        [event] = events_in(store).values()
        assert event.is_open == (active == ("A",))
    assert store.read(lambda connection: connection.exec_driver_sql("SELECT count(*) FROM records").scalar()) == 1


def test_repeated_record_in_a_newer_stream_applies_its_active_event_ids(store):
    first = fleet_record(0, sequence=7, active=("A", "B"))
    other = fleet_record(0, sequence=8, event_id="B", active=("A", "B"))
    store.write(add_records, received([first, other]), AT)
    again = replace(first, stream_id=stream_id_of(0, 1), sequence=1, active_event_ids=("A",))
    store.write(add_records, received([again]), AT)
    assert {event.event.event_id: event.is_open for event in events_in(store).values()} == {"A": True, "B": False}


def test_ended_events_are_listed_by_their_end_and_not_by_their_announcement(store):
    over = {"transition": Transition.COMPLETED}
    store.write(
        add_records,
        received(
            [
                fleet_record(0, event_id="LONG", seconds=0),
                fleet_record(0, event_id="LONG", seconds=90, sequence=2, **over),
                *(fleet_record(vm, event_id=f"E-{vm}", seconds=10 + vm, **over) for vm in range(1, 9)),
            ]
        ),
        AT,
    )
    since = "2026-11-20T11:00:12.000Z"
    found = store.read(events_over_since, EventFilter(), since=since, now=AT, limit=3)
    assert [each.event.event.event_id for each in found] == ["LONG", "E-8", "E-7"]
    assert len(store.read(events_over_since, EventFilter(), since=since, now=AT, limit=30)) == 8


def test_events_are_listed_page_by_page_and_by_state_and_group(store):
    records = [
        fleet_record(
            number,
            event_id=f"E-{number}",
            seconds=number % 7,
            transition=Transition.STARTED if number % 2 else Transition.SCHEDULED,
            labels={"team": "payments" if number % 3 else "a%b_c"},
        )
        for number in range(50)
    ]
    store.write(add_records, received(records), AT)
    for listing in (list_events, partial(list_lines, has_waves=False)):
        seen, cursor = [], None
        while True:
            page = store.read(listing, EventFilter(), now=AT, limit=7, cursor=cursor)
            assert (page.total, page.first) == (50, len(seen) + 1)
            seen += [line.event.event.event_id for line in page.lines]
            cursor = page.cursor
            if cursor is None:
                break
        assert sorted(seen) == sorted(record.event.event_id for record in records)

    def total(**wanted):
        return store.read(list_lines, EventFilter(**wanted), now=AT, limit=1).events

    assert total(groups=("labels.team:a%b_c",)) == 17
    assert total(groups=("labels.team:a%",)) == 0
    assert total(scope=("labels.team:a%b_c", "labels.none:x")) == 17
    assert total(states=(State.COMPLETED,)) == 0
    assert total(text="e-4") == 11
    assert total(event_type="Freeze") == 50


def test_migrations_create_the_tables_of_the_code(store):
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, metadata)
    assert differences == []


def test_database_of_a_later_version_is_rejected(store):
    store.write(lambda connection: connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(BridgeError, match="'9999' of a later version"):
        store.migrate()


def test_backup_of_a_live_database_is_complete_and_has_a_new_epoch(file_store, tmp_path):
    store = file_store
    store.write(add_records, received([fleet_record(0)]), AT)
    store.kind.back_up(tmp_path / "copy.db")
    assert (tmp_path / "copy.db").stat().st_mode & 0o077 == 0
    copy = Store.of_file(tmp_path / "copy.db")
    try:
        assert copy.migrate() == ("0001", "0001")
        assert events_in(copy) == events_in(store)
        assert copy.read(epoch) != store.read(epoch)
    finally:
        copy.close()


def test_exhausted_connection_pool_is_unavailable(store):
    with contextlib.ExitStack() as held:
        for _ in range(store.engine.pool.size()):
            held.enter_context(store.engine.connect())
        with pytest.raises(StoreUnavailable, match="not available"):
            store.read(epoch)
