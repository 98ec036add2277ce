"""A state volume of a few MiB: the outbox lives on it, and comes back to it."""

import sqlite3
from contextlib import closing

import pytest
from small_disk import small_disk

from bridge.events.event import Document

KIB = 1024
MIB = 1024 * KIB
ENDS = ("delivered", "pending", "parked", "evicted", "discarded", "expired")


@pytest.fixture(params=[3], ids="{} MiB".format)
def disk(request, tmp_path, kit):
    """Return a small volume with the outbox's directory on it."""
    with small_disk(tmp_path / "disk", request.param) as disk:
        kit.directory = disk.path / "state"
        yield disk
        kit.close()


def opened(kit):
    return kit.open(sinks=("a",), max_bytes=256 * MIB)


def deliver(kit, outbox, count, size):
    kit.settle(outbox, "a", *[record.sequence for record in kit.fill(outbox, count, size=size)])


def assert_totals_hold(kit, outbox, **expected):
    totals = kit.totals(outbox)["a"]
    assert totals["accepted"] == sum(totals[state] for state in ENDS), totals
    assert {name: totals[name] for name in expected} == expected


@pytest.mark.parametrize("disk", [2, 3, 4], indirect=True, ids="{} MiB".format)
@pytest.mark.usefixtures("disk")
def test_an_outbox_on_a_tiny_volume_stays_on_it(kit):
    outbox = opened(kit)
    for _ in range(40):
        deliver(kit, outbox, 20, 3000)
        outbox.tend().result()
        assert not outbox.in_memory
    assert_totals_hold(kit, outbox, accepted=800, delivered=800)
    for _ in range(20):
        kit.fill(outbox, 40, size=3000)
        assert not outbox.in_memory
    assert_totals_hold(kit, outbox, accepted=1600, delivered=800)
    due = kit.due(outbox)
    assert due[-100:] == list(range(1501, 1601))
    outbox.close()
    outbox = opened(kit)
    assert (outbox.in_memory, kit.due(outbox)) == (False, due)


def test_more_than_a_small_volume_holds_comes_back_to_it(kit, disk):
    outbox = opened(kit)
    deliver(kit, outbox, 100, 3000)
    disk.fill()
    while not outbox.in_memory:
        deliver(kit, outbox, 20, 3000)
    for _ in range(10):
        deliver(kit, outbox, 200, 3000)
    assert_totals_hold(kit, outbox, evicted=0)
    kit.fill(outbox, 30, size=3000)
    disk.free()
    outbox.tend().result()
    assert not outbox.in_memory
    assert_totals_hold(kit, outbox, evicted=0, pending=30)
    assert len(kit.due(outbox)) == 30


def test_what_is_pending_beyond_a_small_volume_is_evicted_as_it_would_be_there(kit, disk):
    outbox = opened(kit)
    kit.fill(outbox, 50, size=3000)
    bound = outbox.max_bytes
    disk.fill()
    while not outbox.in_memory:
        kit.fill(outbox, 20, size=3000)
    kit.fill(outbox, 1500, size=3000)
    newest = outbox.records.last_sequence
    assert kit.due(outbox) == list(range(1, newest + 1))
    disk.free()
    outbox.tend().result()
    assert not outbox.in_memory
    due = kit.due(outbox)
    assert due == list(range(newest - len(due) + 1, newest + 1))
    assert len(due) * 3000 > bound / 2
    assert (kit.directory / "outbox.db").stat().st_size < 2 * bound
    assert_totals_hold(kit, outbox, evicted=newest - len(due), accepted=newest)
    outbox.close()
    assert kit.due(opened(kit)) == due


@pytest.mark.usefixtures("disk")
def test_a_program_that_reads_for_long_does_not_leave_a_small_volume_full_for_good(kit):
    outbox = opened(kit)
    deliver(kit, outbox, 100, 3000)
    with closing(sqlite3.connect(kit.directory / "outbox.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM records").fetchone()
        while not outbox.in_memory:
            deliver(kit, outbox, 20, 3000)
        kit.fill(outbox, 30, size=3000)
    outbox.tend().result()
    assert not outbox.in_memory
    assert_totals_hold(kit, outbox, evicted=0, pending=30)


@pytest.mark.usefixtures("disk")
def test_a_damaged_outbox_on_a_small_volume_goes_on_there(kit):
    outbox = opened(kit)
    for _ in range(30):
        deliver(kit, outbox, 20, 3000)
    kit.fill(outbox, 30, size=3000)
    outbox.close()
    with (kit.directory / "outbox.db").open("r+b") as file:
        file.seek(20 * KIB)
        file.write(b"\xff" * 2 * KIB)
    outbox = opened(kit)
    for _ in range(10):
        deliver(kit, outbox, 20, 3000)
        outbox.tend().result()
    assert not outbox.in_memory
    assert kit.commit(outbox, kit.event("after"), document=Document())
    assert_totals_hold(kit, outbox)
