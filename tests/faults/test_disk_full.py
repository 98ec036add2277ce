import os
import sqlite3
from contextlib import closing, contextmanager

import pytest
from small_disk import small_disk

from bridge.errors import OutboxReadOnly
from bridge.events.event import Document, VmIdentity
from bridge.outbox import deliveries, meta
from bridge.outbox.approvals import cli_decision, keep_decision, read_state
from bridge.outbox.reader import OutboxFile
from bridge.outbox.storage import MEMORY_BYTES

resource = pytest.importorskip("resource", reason="Windows sets no limits to files")

ENDS = ("delivered", "pending", "parked", "evicted", "discarded", "expired")
MIB = 1024 * 1024


@pytest.fixture
def disk(request, tmp_path, kit):
    """Return a small disk with the outbox's directory on it."""
    with small_disk(tmp_path / "disk", getattr(request, "param", 4)) as disk:
        kit.directory = disk.path / "state"
        yield disk
        kit.close()


@contextmanager
def no_file_may_grow():
    """Have the system refuse every write beyond a file's first bytes, as it does for a user over quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_totals_hold(kit, outbox, **expected):
    for totals in kit.totals(outbox).values():
        assert totals["accepted"] == sum(totals[state] for state in ENDS), totals
        assert {name: totals[name] for name in expected} == expected


def disk_counts(kit, sink="a"):
    connection = sqlite3.connect(kit.directory / "outbox.db")
    try:
        return dict(
            connection.execute(
                "SELECT state, COUNT(*) FROM deliveries WHERE sink = ? GROUP BY state", (sink,)
            ).fetchall()
        )
    finally:
        connection.close()


def fill_until_memory(kit, outbox, disk):
    """Fill the disk under a working outbox; return the number of the last record."""
    disk.fill()
    last = outbox.records.last_sequence
    while not outbox.in_memory:
        last = kit.commit(outbox, kit.event(f"M-{last}", description="x" * 4000), document=Document())[-1].sequence
    return last


def test_a_full_disk_loses_nothing_and_doubles_nothing(kit, disk, caplog):
    outbox, told = kit.open(), []
    outbox.on_memory = lambda: told.append(outbox.in_memory)
    kit.fill(outbox, 50, size=500)
    kit.settle(outbox, "a", 1, 2, 3)
    last = fill_until_memory(kit, outbox, disk)
    assert told == [True]
    assert "The disk under the outbox refuses" in caplog.text
    assert "Free the disk or make it writable" in caplog.text
    kit.fill(outbox, 30, size=500)
    last += 30
    assert kit.due(outbox, "a") == list(range(4, last + 1))
    assert kit.due(outbox, "b") == list(range(1, last + 1))
    kit.settle(outbox, "a", 4, 5, last)
    kit.settle(outbox, "a", 6, state="parked")
    outbox.tend().result()
    assert outbox.in_memory

    disk.free()
    outbox.tend().result()
    assert not outbox.in_memory
    assert "back on disk" in caplog.text
    assert kit.due(outbox, "a") == list(range(7, last))
    assert_totals_hold(kit, outbox, accepted=last)
    assert kit.totals(outbox)["a"]["delivered"] == 6
    outbox.close()

    outbox = kit.open()
    assert kit.due(outbox, "a") == list(range(7, last))
    assert kit.due(outbox, "b") == list(range(1, last + 1))
    assert disk_counts(kit) == {"delivered": 6, "parked": 1, "pending": last - 7}
    (record,) = kit.commit(outbox, kit.event("after"))
    assert record.sequence == last + 1
    assert list(kit.directory.glob("outbox.db.*")) == []


def test_an_agent_that_starts_on_a_full_disk_sends_what_it_owed(kit, disk):
    outbox = kit.open()
    kit.fill(outbox, 20)
    outbox.identify(VmIdentity(name="vm_0", vm_id="1")).result()
    stream_id = outbox.read(meta.load).result().stream_id
    outbox.close()
    disk.fill()
    outbox = kit.open()
    assert outbox.read(meta.load).result().stream_id == stream_id
    kit.settle(outbox, "a", *kit.due(outbox, "a"))
    last = fill_until_memory(kit, outbox, disk)
    assert outbox.read(meta.load).result().vm.vm_id == "1"
    disk.free()
    outbox.tend().result()
    assert kit.due(outbox, "a") == list(range(21, last + 1))
    assert_totals_hold(kit, outbox, accepted=last)


def test_an_agent_that_never_had_room_works_from_memory_and_moves_to_disk_later(kit, disk):
    disk.fill()
    outbox = kit.open()
    assert outbox.in_memory
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"))
    kit.settle(outbox, "a", 1)
    outbox.tend().result()
    disk.free()
    outbox.tend().result()
    assert not outbox.in_memory
    outbox.close()
    outbox = kit.open()
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == ([2], [1, 2])
    assert_totals_hold(kit, outbox, accepted=2)
    assert kit.commit(outbox, kit.event("E-3"))[0].sequence == 3


def test_what_was_on_disk_survives_an_agent_that_dies_while_it_works_from_memory(kit, disk):
    outbox = kit.open()
    kit.fill(outbox, 20)
    last = fill_until_memory(kit, outbox, disk)
    outbox.close()  # it tries the disk once more, in vain
    disk.free()
    outbox = kit.open()
    due = kit.due(outbox)
    assert due == list(range(1, len(due) + 1))
    assert 20 <= len(due) <= last


def test_an_agent_that_stops_brings_what_is_in_memory_to_a_disk_that_is_free_again(kit, disk):
    outbox = kit.open()
    last = fill_until_memory(kit, outbox, disk)
    disk.free()
    outbox.close()
    assert kit.due(kit.open()) == list(range(1, last + 1))


def test_commands_that_write_are_refused_while_the_disk_is_full(kit, disk):
    outbox = kit.open()
    kit.fill(outbox, 20)
    fill_until_memory(kit, outbox, disk)
    with pytest.raises(OutboxReadOnly):
        OutboxFile(kit.directory).discard("a")
    assert len(OutboxFile(kit.directory).records()) >= 20


def test_a_preemption_seen_in_memory_goes_after_its_own_older_records_and_before_all_others(kit, disk):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"), document=Document())
    fill_until_memory(kit, outbox, disk)
    (urgent,) = kit.commit(outbox, kit.event("E-2", event_type="Preempt"), document=Document())
    assert kit.due(outbox)[:3] == [2, urgent.sequence, 1]
    disk.free()
    outbox.tend().result()
    assert kit.due(outbox)[:3] == [2, urgent.sequence, 1]


def test_a_change_seen_again_in_memory_is_a_repeat(kit, disk):
    outbox = kit.open()
    (first,) = kit.commit(outbox, kit.event("E-1"), document=Document())
    kit.settle(outbox, "a", 1)
    kit.settle(outbox, "b", 1)
    fill_until_memory(kit, outbox, disk)
    (second,) = kit.commit(outbox, kit.event("E-1"), document=Document())
    disk.free()
    outbox.tend().result()
    (third,) = kit.commit(outbox, kit.event("E-1"), document=Document())
    assert len({first.id, second.id, third.id}) == 3


def test_a_sink_that_is_new_while_in_memory_gets_the_last_record_of_each_active_event(kit, disk):
    outbox = kit.open(sinks=("a",))
    active = Document(events=(kit.event("E-1"),))
    kit.commit(outbox, kit.event("E-1"), document=active)
    kit.settle(outbox, "a", 1)
    disk.fill()
    while not outbox.in_memory:
        kit.commit(outbox, kit.event("M", description="x" * 4000), document=active)
    outbox.write(outbox.records.configure, lambda _record, _name: ["a", "new"], ["a", "new"], labels={}).result()
    assert kit.due(outbox, "new") == [1]
    disk.free()
    outbox.tend().result()
    outbox.write(outbox.records.configure, lambda _record, _name: ["a", "new"], ["a", "new"], labels={}).result()
    assert kit.due(outbox, "new") == [1]
    assert_totals_hold(kit, outbox)


def test_records_that_wait_for_the_identity_wait_in_memory_too(kit, disk):
    outbox = kit.open()
    outbox.records.await_identity()
    kit.commit(outbox, kit.event("E-1"))
    last = fill_until_memory(kit, outbox, disk)
    assert kit.due(outbox) == []
    outbox.identify(VmIdentity(name="vm_0", vm_id="1")).result()
    assert kit.due(outbox) == list(range(1, last + 1))
    disk.free()
    outbox.tend().result()
    rows = outbox.read(deliveries.due, "a", limit=1000).result()
    assert {row.record.vm.vm_id for row in rows} == {"1"}
    assert [row.sequence for row in rows] == list(range(1, last + 1))


@pytest.mark.parametrize("disk", [64], indirect=True)
def test_memory_is_bounded_and_what_does_not_fit_is_counted(kit, disk):
    outbox = kit.open(sinks=("a",))
    kit.commit(outbox, kit.event("first"), document=Document())
    fill_until_memory(kit, outbox, disk)
    for _ in range(8):
        kit.fill(outbox, 500, size=5000)
        assert outbox.read(deliveries.totals).result().used_bytes <= MEMORY_BYTES
    due = kit.due(outbox)
    newest = outbox.records.last_sequence
    assert due[0] == 1
    assert due[-1000:] == list(range(newest - 999, newest + 1))
    totals = kit.totals(outbox)["a"]
    assert totals["evicted"] > 500
    assert_totals_hold(kit, outbox, accepted=newest)
    disk.free()
    outbox.tend().result()
    assert not outbox.in_memory
    assert kit.due(outbox) == due
    assert kit.totals(outbox)["a"] == totals
    assert disk_counts(kit) == {"pending": len(due)}


@pytest.mark.parametrize("disk", [64], indirect=True)
def test_a_backlog_that_memory_cannot_hold_waits_on_disk_in_order(kit, disk):
    outbox = kit.open(sinks=("a",))
    backlog = [record.sequence for record in kit.fill(outbox, 4000, events=4000, size=5000)]
    late, early = kit.event("F-3999", "Started"), kit.event("F-0", "Started")
    fill_until_memory(kit, outbox, disk)
    assert outbox.read(deliveries.totals).result().used_bytes < MEMORY_BYTES
    second_late, second_early, fresh = (
        record.sequence for record in kit.commit(outbox, late, early, kit.event("new"), document=Document())
    )
    # What is new goes out from memory, but for what may not overtake a record that waits on the disk.
    assert kit.due(outbox)[-1] == fresh
    assert not {*backlog, second_late, second_early} & set(kit.due(outbox))
    assert_totals_hold(kit, outbox, delivered=0, evicted=0, accepted=fresh)
    kit.settle(outbox, "a", fresh)
    disk.free()
    outbox.tend().result()
    due = kit.due(outbox)
    assert due[:4000] == backlog
    assert due[-2:] == [second_late, second_early]
    assert_totals_hold(kit, outbox, delivered=1, evicted=0, accepted=fresh)
    assert disk_counts(kit) == {"delivered": 1, "pending": fresh - 1}


def test_a_disk_that_fills_again_and_again_loses_nothing(kit, disk):
    outbox = kit.open(sinks=("a",))
    delivered = 0
    kit.fill(outbox, 20)
    for _ in range(5):
        last = fill_until_memory(kit, outbox, disk)
        due = kit.due(outbox)
        assert due == list(range(delivered + 1, last + 1))
        kit.settle(outbox, "a", *due[:3])
        delivered += 3
        disk.free()
        outbox.tend().result()
        assert not outbox.in_memory
        assert_totals_hold(kit, outbox, delivered=delivered, accepted=last)
    outbox.close()
    assert kit.due(kit.open(sinks=("a",))) == list(range(delivered + 1, last + 1))


def test_an_outcome_that_could_not_be_written_to_disk_is_not_forgotten(kit, disk):
    outbox = kit.open(sinks=("a",))
    kit.fill(outbox, 20)
    disk.fill()
    while not outbox.in_memory:
        kit.settle(outbox, "a", 20, state=None, error="x" * 4000)
    kit.settle(outbox, "a", *range(1, 20))
    disk.free()
    outbox.tend().result()
    assert kit.due(outbox) == [20]
    outbox.close()
    assert kit.due(kit.open(sinks=("a",))) == [20]


# Without root: no file may grow.


def test_a_file_size_limit_loses_nothing_and_doubles_nothing(kit):
    outbox = kit.open()
    kit.fill(outbox, 20)
    observations = [kit.observation(outbox, kit.event(f"E-{number}")) for number in range(10)]
    with no_file_may_grow():
        sequences = [
            outbox.write(outbox.records.append_observation, observation).result(60)[0].sequence
            for observation in observations
        ]
        in_memory = outbox.in_memory
        kit.settle(outbox, "a", 1, sequences[-1])
        outbox.tend().result()
        still_in_memory = outbox.in_memory
    assert (in_memory, still_in_memory) == (True, True)
    assert sequences == list(range(21, 31))
    outbox.tend().result()
    assert not outbox.in_memory
    outbox.close()
    outbox = kit.open()
    assert kit.due(outbox, "a") == list(range(2, 30))
    assert kit.due(outbox, "b") == list(range(1, 31))
    assert_totals_hold(kit, outbox, accepted=30)


def test_an_agent_that_starts_under_a_file_size_limit_works_from_memory(kit):
    kit.fill(kit.open(), 20)
    kit.close()
    with no_file_may_grow():
        outbox = kit.open()
        due = kit.due(outbox)
        kit.commit(outbox, kit.event("E-1"))
    assert due == list(range(1, 21))
    outbox.tend().result()
    assert not outbox.in_memory
    assert kit.due(outbox) == list(range(1, 22))


def test_what_a_command_commits_just_as_the_disk_is_left_is_kept(kit):
    """The agent copies the outbox into memory while another program has it locked, and that then commits."""
    outbox = kit.open()
    kit.fill(outbox, 3)
    kit.settle(outbox, "a", 1, state="parked")
    decision = cli_decision(
        approver="anne", decision_id="D-1", event=kit.event("F-1"), event_digest="d", valid_seconds=3600.0
    )
    with closing(sqlite3.connect(kit.directory / "outbox.db", isolation_level=None)) as command:
        command.execute("BEGIN IMMEDIATE")
        keep_decision(command, decision)
        assert deliveries.retry(command, "a", record_id=None, now=kit.time.timestamp() + 1) == 1
        outbox.exclusive(lambda storage: storage.recover(sqlite3.OperationalError("database is locked"))).result()
        command.execute("COMMIT")
    assert outbox.in_memory
    kit.commit(outbox, kit.event("N-1"))
    kit.settle(outbox, "a", 2)
    outbox.tend().result()
    assert not outbox.in_memory
    assert kit.due(outbox, "a") == [1, 3, 4]
    state = outbox.read(read_state).result()
    assert [kept.decision_id for kept in state.decisions] == ["D-1"]
    assert_totals_hold(kit, outbox, accepted=4)


def overwrite_middle(path):
    """Put garbage into one page."""
    with path.open("r+b") as file:
        page = int.from_bytes(file.read(18)[16:], "big")
        file.seek(path.stat().st_size // 2 // page * page)
        file.write(b"\xff" * page)


def set_aside(kit):
    return [path.name for path in kit.directory.glob("outbox.db.damaged-*Z")]


@pytest.mark.parametrize("disk", [16], indirect=True)
def test_a_checkpoint_that_a_full_disk_stops_is_no_damage(kit, disk):
    outbox = kit.open(sinks=("a",))
    kit.fill(outbox, 500, size=9000)
    # The -wal keeps the room it has: commits go on in it, while the file cannot grow.
    outbox.exclusive(lambda storage: storage.connection.execute("PRAGMA wal_checkpoint(FULL)").fetchall()).result()
    kit.commit(outbox, kit.event(), document=Document())
    disk.fill()
    last = 501
    while not outbox.in_memory:
        last = kit.commit(outbox, kit.event(f"M-{last}", description="x" * 3000), document=Document())[-1].sequence
        for _ in range(3):
            outbox.tend().result()
    disk.free()
    outbox.tend().result()
    assert not outbox.in_memory
    assert kit.due(outbox, "a") == list(range(1, last + 1))
    assert set_aside(kit) == []


@pytest.mark.parametrize("disk", [32], indirect=True)
def test_a_backlog_that_is_deleted_while_it_waits_on_disk_counts_as_evicted(kit, disk):
    outbox = kit.open(sinks=("a",))
    kit.fill(outbox, 1500, size=9000)
    last = fill_until_memory(kit, outbox, disk)
    for path in kit.directory.glob("outbox.db*"):
        path.unlink()
    disk.free()
    outbox.tend().result()
    assert not outbox.in_memory
    assert_totals_hold(kit, outbox, accepted=last, pending=1, evicted=last - 1)
    assert disk_counts(kit) == {"pending": 1}


@pytest.mark.parametrize("disk", [48], indirect=True)
def test_a_backlog_found_damaged_is_read_when_there_is_room_for_it(kit, disk):
    outbox = kit.open(sinks=("a",))
    kit.fill(outbox, 1500, size=9000)
    last = fill_until_memory(kit, outbox, disk)
    overwrite_middle(kit.directory / "outbox.db")
    for _ in range(2):
        outbox.tend().result()
        assert outbox.in_memory
    assert len(set_aside(kit)) == 1
    disk.free()
    outbox.tend().result()
    assert not outbox.in_memory
    evicted = kit.totals(outbox)["a"]["evicted"]
    assert evicted < 10
    assert_totals_hold(kit, outbox, accepted=last, pending=last - evicted)
    assert disk_counts(kit) == {"pending": last - evicted}


@pytest.mark.parametrize("disk", [48], indirect=True)
def test_a_large_outbox_damaged_on_a_full_disk_loses_nothing_that_can_be_read(kit, disk):
    outbox = kit.open(sinks=("a",))
    kit.fill(outbox, 1500, size=9000)
    kit.settle(outbox, "a", *range(1, 1491))
    disk.fill()
    outbox.exclusive(lambda storage: storage.replace_database("damaged", carry=True, why="a test")).result()
    assert outbox.in_memory
    (old,) = kit.commit(outbox, kit.event("F-1495"), document=Document())
    (new,) = kit.commit(outbox, kit.event("N-1"), document=Document())
    assert kit.due(outbox, "a") == [new.sequence]  # the other would overtake what its event has on disk
    disk.free()
    outbox.tend().result()
    assert not outbox.in_memory
    assert kit.due(outbox, "a") == [*range(1491, 1501), old.sequence, new.sequence]
    assert_totals_hold(kit, outbox, accepted=1502, delivered=1490, pending=12)
    assert len(set_aside(kit)) == 1


def test_an_agent_that_died_before_it_made_its_tables_does_not_keep_the_next_from_starting(kit):
    kit.directory.mkdir()
    with closing(sqlite3.connect(kit.directory / "outbox.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    with no_file_may_grow():
        outbox = kit.open(sinks=("a",))
        assert outbox.in_memory
        kit.commit(outbox, kit.event())
    outbox.tend().result()
    assert not outbox.in_memory
    assert kit.due(outbox, "a") == [1]


def test_records_keep_their_sequence_when_memory_moves_into_a_new_file(kit):
    kit.directory.mkdir()
    with no_file_may_grow():
        outbox = kit.open(sinks=("a",))
        assert outbox.in_memory
        kit.fill(outbox, 4000, size=4000)  # more than memory holds: the oldest are evicted
        due = kit.due(outbox, "a")
    outbox.tend().result()
    assert not outbox.in_memory
    assert due[0] > 1
    assert kit.due(outbox, "a") == due


# A volume that is smaller than the outbox may be.


@pytest.mark.parametrize("disk", [16], indirect=True)
@pytest.mark.usefixtures("disk")
def test_an_outbox_on_a_small_volume_does_not_fill_it_with_what_is_delivered(kit):
    outbox = kit.open(sinks=("a",), max_bytes=256 * MIB)
    for _ in range(30):
        sequences = [record.sequence for record in kit.fill(outbox, 100, size=5000)]
        kit.settle(outbox, "a", *sequences)
        assert not outbox.in_memory
    assert outbox.max_bytes < 16 * MIB
    assert_totals_hold(kit, outbox, delivered=3000, evicted=0, accepted=3000)
    outbox.close()
    assert kit.commit(kit.open(sinks=("a",)), kit.event("after"), document=Document())[0].sequence == 3001


@pytest.mark.parametrize("disk", [32], indirect=True)
def test_a_disk_that_others_fill_first_costs_what_is_delivered(kit, disk, caplog):
    outbox = kit.open(sinks=("a",))
    sequences = [record.sequence for record in kit.fill(outbox, 2000, size=5000)]
    kit.settle(outbox, "a", *sequences[:1900])
    disk.fill()
    os.truncate(disk.path / "ballast", (disk.path / "ballast").stat().st_size - MIB // 2)
    for number in range(60):
        outbox.tend().result()
        kit.commit(outbox, kit.event(f"M-{number}", description="x" * 20_000), document=Document())
    assert not outbox.in_memory
    assert "delivered records were given up" in caplog.text
    assert_totals_hold(kit, outbox, delivered=1900, evicted=0, pending=160, accepted=2060)
    kept = disk_counts(kit)
    assert kept["pending"] == 160
    assert 50 <= kept["delivered"] < 1900
