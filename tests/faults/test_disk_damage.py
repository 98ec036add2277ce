import random
import shutil
import sqlite3
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from damage_kit import (
    COUNT,
    DELIVERED,
    assert_totals_hold,
    checkpoint,
    damage,
    keep_working,
    prepared,
    set_aside,
    whole_due,
)

from bridge.events.event import Document
from bridge.outbox import deliveries, meta

resource = pytest.importorskip("resource", reason="Windows sets no limits to files")

#: Seeds by which this damage once cost everything, among those that are tried.
SEEDS = [*range(12), 55, 60, 83]

#: What another program does to a file; run in a process of its own, as closing a file drops this process's locks on it.
DAMAGES = {
    "cut to nothing": "os.truncate(path, 0)",
    "cut to half": "os.truncate(path, size // 2)",
    "cut within a page": "os.truncate(path, size // 3 * 2 + 1234)",
    "header overwritten": "write(0, garbage(100))",
    "first page overwritten": "write(0, garbage(page))",
    "middle overwritten": "write(size // 3 // page * page, garbage(size // 4))",
    "one page of garbage": "write(size // 2 // page * page, garbage(page))",
    "one page of zeros": "write(size // 2 // page * page, bytes(page))",
    "everything overwritten": "write(0, garbage(size))",
    "deleted": "os.unlink(path)",
    "deleted with its -wal": "[os.unlink(name) for name in glob.glob(path + '*')]",
}
#: What a working agent does not see of its file, but the next start does, and how many records it saves at least.
SEEN_AT_THE_START = {
    "middle overwritten": COUNT // 3,
    "one page of garbage": COUNT - 20,
    "one page of zeros": COUNT - 20,
}


@contextmanager
def no_file_may_grow():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# While the agent runs.


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("is_in_file", [False, True], ids=["in the wal", "in the file"])
def test_a_file_damaged_under_a_working_agent_is_survived(kit, caplog, how, is_in_file):
    outbox = prepared(kit)
    stream_id = outbox.read(meta.load).result().stream_id
    if is_in_file:
        checkpoint(outbox)
    damage(kit, DAMAGES[how])
    new = keep_working(kit, outbox)
    assert new == [COUNT + 1, COUNT + 2, COUNT + 3]
    old = list(range(1, COUNT + 1))
    assert whole_due(outbox, kit, new) == old
    is_seen = not is_in_file or how not in SEEN_AT_THE_START
    if is_seen:
        assert_totals_hold(outbox, kit)
    outbox.close()

    outbox = kit.open()
    if not is_seen:
        assert set(whole_due(outbox, kit, new)) <= set(old)
        assert len(whole_due(outbox, kit, new)) > SEEN_AT_THE_START[how]
    else:
        assert whole_due(outbox, kit, new) == old
        assert kit.due(outbox, "a") == list(range(DELIVERED + 2, COUNT + 4))
        assert kit.totals(outbox)["a"]["delivered"] == DELIVERED
    assert (outbox.read(meta.load).result().stream_id, outbox.read(meta.load).result().vm.vm_id) == (stream_id, "1")
    assert_totals_hold(outbox, kit)
    if not how.startswith("deleted") and is_in_file:
        assert len(set_aside(kit)) == 1
    if set_aside(kit):
        assert "The outbox is damaged or gone" in caplog.text
        assert "look after the disk" in caplog.text


@pytest.mark.parametrize("how", ["cut to half", "cut within a page", "middle overwritten", "one page of garbage"])
def test_damage_that_the_agent_had_not_read_costs_only_what_was_there(kit, how):
    outbox = prepared(kit)
    checkpoint(outbox, forget=True)
    damage(kit, DAMAGES[how])
    new = keep_working(kit, outbox)
    whole_due(outbox, kit, new)
    assert_totals_hold(outbox, kit)
    outbox.close()
    outbox = kit.open()
    whole_due(outbox, kit, new)
    totals = kit.totals(outbox)["b"]
    assert totals["accepted"] == COUNT + 3
    assert totals["pending"] + totals["evicted"] == COUNT + 3
    assert_totals_hold(outbox, kit)


@pytest.mark.parametrize("index", ["records_by_first_id", "records_by_age", "deliveries_by_record", "deliveries_due"])
def test_damage_that_shows_only_at_a_write_costs_nothing(kit, index):
    outbox = prepared(kit)
    checkpoint(outbox, forget=True)
    connection = sqlite3.connect(kit.directory / "outbox.db")
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (index,)).fetchone()
    connection.close()
    damage(kit, f"write({root - 1} * page, b'\\xff' * page)")
    new = keep_working(kit, outbox)
    assert whole_due(outbox, kit, new) == list(range(1, COUNT + 1))
    assert len(set_aside(kit)) == 1
    assert_totals_hold(outbox, kit)


def test_a_record_whose_text_is_garbage_costs_only_itself(kit):
    outbox = prepared(kit)
    checkpoint(outbox, forget=True)
    marker = f'"description":"{COUNT // 2} '
    damage(kit, f"data = open(path, 'rb').read(); write(data.index({marker.encode()!r}), bytes([0xff] * 20))")
    new = keep_working(kit, outbox)
    old = whole_due(outbox, kit, new)
    assert set(range(1, COUNT + 1)) - set(old) == {COUNT // 2 + 1}
    assert kit.totals(outbox)["b"]["evicted"] == 1
    assert_totals_hold(outbox, kit)


def test_a_file_put_in_place_of_the_outbox_is_set_aside_unread(kit, tmp_path, caplog):
    outbox = prepared(kit)
    checkpoint(outbox)
    shutil.copy(kit.directory / "outbox.db", tmp_path / "backup")
    kit.settle(outbox, "b", *range(1, 11))
    (tmp_path / "backup").replace(kit.directory / "outbox.db")
    outbox.tend().result()
    assert "deleted or replaced" in caplog.records[-1].why
    new = keep_working(kit, outbox)
    assert whole_due(outbox, kit, new) == list(range(11, COUNT + 1))
    assert len(set_aside(kit)) == 1
    outbox.close()
    assert whole_due(kit.open(), kit, new) == list(range(11, COUNT + 1))


def test_a_wal_deleted_under_a_working_agent_costs_nothing_when_it_is_killed(kit):
    outbox = prepared(kit)
    (kit.directory / "outbox.db-wal").unlink()
    outbox.tend().result()
    new = keep_working(kit, outbox)
    copy = kit.directory.parent / "as after a kill"
    shutil.copytree(kit.directory, copy)
    kit.directory = copy
    assert whole_due(kit.open(), kit, new) == list(range(1, COUNT + 1))


def test_a_new_file_holds_what_is_committed_at_once(kit):
    """The old connection is closed after the new is open: it may not take the new -wal with it."""
    outbox = prepared(kit)
    damage(kit, DAMAGES["everything overwritten"])
    outbox.tend().result()
    new = keep_working(kit, outbox)
    copy = kit.directory.parent / "as after a kill"
    shutil.copytree(kit.directory, copy)
    kit.directory = copy
    assert whole_due(kit.open(), kit, new) == list(range(1, COUNT + 1))


def test_a_directory_deleted_under_a_working_agent_is_made_again(kit):
    outbox = prepared(kit)
    shutil.rmtree(kit.directory)
    outbox.tend().result()
    outbox.tend().result()
    assert not outbox.in_memory
    new = keep_working(kit, outbox)
    outbox.close()
    assert whole_due(kit.open(), kit, new) == list(range(1, COUNT + 1))


def test_damage_again_and_again_is_mended_again_and_again(kit):
    outbox = prepared(kit)
    for number in range(4):
        checkpoint(outbox)
        damage(kit, DAMAGES["everything overwritten"])
        outbox.tend().result()
        assert len(set_aside(kit)) == number + 1
    new = keep_working(kit, outbox)
    assert whole_due(outbox, kit, new) == list(range(1, COUNT + 1))


def test_a_commit_that_no_mend_helps_fails_without_filling_the_directory(kit):
    outbox = kit.open()

    def broken(connection):
        connection.execute("SELECT * FROM no_such_table")

    future = outbox.write(broken)
    with pytest.raises(Exception, match="no such table"):
        future.result(60)
    assert len(set_aside(kit)) <= 3
    kit.commit(outbox, kit.event())
    assert kit.due(outbox) == [1]


# When the agent starts.


@pytest.mark.parametrize("how", [how for how in DAMAGES if not how.startswith("deleted")])
def test_a_file_damaged_before_the_start_costs_only_what_was_there(kit, caplog, how):
    prepared(kit).close()
    size = (kit.directory / "outbox.db").stat().st_size
    damage(kit, DAMAGES[how])
    outbox = kit.open()
    assert not outbox.in_memory
    (aside,) = set_aside(kit)
    assert (kit.directory / aside).stat().st_size <= size
    assert "The outbox is damaged or gone" in caplog.text
    assert "look after the disk" in caplog.text
    new = keep_working(kit, outbox)
    old = whole_due(outbox, kit, new)
    assert_totals_hold(outbox, kit)
    assert len(old) >= SEEN_AT_THE_START.get(how, 0)
    outbox.close()
    assert whole_due(kit.open(), kit, new) == old
    assert len(set_aside(kit)) == 1


def test_a_file_cut_to_nothing_does_not_cost_its_wal(kit):
    """SQLite deletes the -wal of an empty file: it is set aside before SQLite sees it."""
    prepared(kit)
    copy = kit.directory.parent / "as after a kill"
    shutil.copytree(kit.directory, copy)
    size = (copy / "outbox.db-wal").stat().st_size
    kit.directory = copy
    damage(kit, DAMAGES["cut to nothing"])
    outbox = kit.open()
    (aside,) = set_aside(kit)
    assert (copy / f"{aside}-wal").stat().st_size == size
    assert kit.commit(outbox, kit.event("N-1"))[0].sequence >= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_random_damage_never_stops_the_agent_and_never_breaks_its_accounts(kit, seed):
    chance = random.Random(seed)
    outbox = prepared(kit)
    if chance.random() < 0.5:
        checkpoint(outbox, forget=chance.random() < 0.5)
    is_running = chance.random() < 0.5
    if not is_running:
        outbox.close()
    for _ in range(chance.randint(1, 6)):
        where, length = chance.random(), chance.randint(1, 9000)
        damage(kit, f"write(int({where} * size), garbage({length}))", seed=chance.random())
    if not is_running:
        outbox = kit.open()
    new = keep_working(kit, outbox)
    whole_due(outbox, kit, new)
    assert_totals_hold(outbox, kit)
    outbox.close()
    outbox = kit.open()
    whole_due(outbox, kit, new)
    assert_totals_hold(outbox, kit)


# Damage and a full disk at once.


def test_damage_on_a_disk_that_refuses_is_mended_when_the_disk_takes_writes_again(kit):
    outbox = prepared(kit)
    damage(kit, DAMAGES["everything overwritten"])
    with no_file_may_grow():
        outbox.tend().result()
        in_memory = outbox.in_memory
        (first,) = kit.commit(outbox, kit.event("N-0"), document=Document())
        kit.settle(outbox, "b", 1)
        due = kit.due(outbox, "b")
    assert in_memory
    assert due == [*range(2, COUNT + 1), first.sequence]
    outbox.tend().result()
    assert not outbox.in_memory
    new = keep_working(kit, outbox)
    assert whole_due(outbox, kit, new) == due
    assert kit.totals(outbox)["a"]["delivered"] == DELIVERED
    assert kit.totals(outbox)["a"]["parked"] == 1
    assert_totals_hold(outbox, kit)
    outbox.close()
    assert whole_due(kit.open(), kit, new) == due


def test_damage_found_at_the_start_on_a_disk_that_refuses_is_mended_later(kit):
    prepared(kit).close()
    damage(kit, DAMAGES["one page of garbage"])
    with no_file_may_grow():
        outbox = kit.open()
        in_memory, due = outbox.in_memory, kit.due(outbox, "b")
        kit.commit(outbox, kit.event("N-0"), document=Document())
    assert in_memory
    outbox.tend().result()
    assert not outbox.in_memory
    new = keep_working(kit, outbox)
    old = whole_due(outbox, kit, new)
    assert set(due) <= set(old)
    assert len(old) > COUNT - 20
    assert_totals_hold(outbox, kit)


def test_records_that_are_found_without_the_state_they_belong_to_are_joined_by_the_new(kit):
    """The page of meta is gone and the disk refuses: what is seen meanwhile may not write over what is saved later."""
    prepared(kit).close()
    connection = sqlite3.connect(kit.directory / "outbox.db")
    pages = dict(connection.execute("SELECT name, rootpage FROM sqlite_master WHERE name IN ('meta', 'records')"))
    connection.close()
    for root in pages.values():
        shutil.copy(kit.directory / "outbox.db", kit.directory.parent / "whole")
        damage(kit, f"write({root - 1} * page, bytes(page))")
        with no_file_may_grow():
            outbox = kit.open()
            assert outbox.in_memory
            kit.commit(outbox, kit.event("N-0"), document=Document())
        outbox.tend().result()
        assert not outbox.in_memory
        rows = outbox.read(deliveries.due, "b", limit=9999).result()
        assert [row.record.event.event_id for row in rows] == [*(f"F-{n}" for n in range(COUNT)), "N-0"]
        assert len({row.sequence for row in rows}) == len(rows)
        assert_totals_hold(outbox, kit)
        outbox.close()
        shutil.move(kit.directory.parent / "whole", kit.directory / "outbox.db")


def test_a_damaged_file_is_replaced_on_windows_by_way_of_memory(kit, monkeypatch):
    outbox = prepared(kit)
    checkpoint(outbox, forget=True)
    damage(kit, DAMAGES["one page of garbage"])
    monkeypatch.setattr("bridge.outbox.storage.sys", SimpleNamespace(platform="win32"))
    outbox.exclusive(lambda storage: storage.replace_database("damaged", carry=True, why="a test")).result()
    assert len(kit.due(outbox, "b")) > COUNT - 20
    assert_totals_hold(outbox, kit)
    assert len(set_aside(kit)) == 1


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_large_damaged_file_is_salvaged_beside_the_work(kit):
    outbox = kit.open(sinks=("a",), max_bytes=256 * 1024 * 1024)
    last = kit.fill(outbox, 60_000, size=2000)[-1].sequence
    checkpoint(outbox, forget=True)
    salvage = outbox.exclusive(lambda storage: storage.replace_database("damaged", carry=True, why="a test"))
    longest, began = 0.0, time.monotonic()
    while not salvage.done() or (outbox.in_memory and time.monotonic() - began < 120):
        started = time.monotonic()
        last = kit.commit(outbox, kit.event(f"N-{last}"), document=Document())[0].sequence
        longest = max(longest, time.monotonic() - started)
        outbox.tend()
        time.sleep(0.1)
    print(f"\nbench: longest commit while a large outbox is salvaged: {longest:.1f} s")  # noqa: T201
    assert longest < 10
    assert not outbox.in_memory
    assert kit.due(outbox, "a") == list(range(1, last + 1))
    assert_totals_hold(outbox, kit)
