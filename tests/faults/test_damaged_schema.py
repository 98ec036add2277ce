"""Damage where SQLite finds its tables, in the first pages of the file: the rows are elsewhere, and are saved."""

import shutil
import sqlite3
from contextlib import closing

import pytest
from damage_kit import (
    COUNT,
    DELIVERED,
    assert_totals_hold,
    checkpoint,
    damage,
    keep_working,
    prepared,
    root_pages,
    set_aside,
    strike,
    whole_due,
)

from bridge.events.event import Document
from bridge.outbox import meta

PAGE = 1024
#: Where the file is struck, and over how many bytes. The second page is the first of the pointer map.
STRIKES = {
    "header": (0, 100),
    "first page": (0, PAGE),
    "first two pages": (0, 2 * PAGE),
    "schema behind the roots": (24 * PAGE, 8 * PAGE),
    "nine KiB, and with them the roots of records and deliveries": (0, 9 * PAGE),
}
#: The root of a table without row ids has rows too, which go with it.
ON_A_ROOT = 30
EXPECTED_A = set(range(DELIVERED + 2, COUNT + 1))


@pytest.fixture
def whole(kit):
    """Return a directory with a sound outbox that is closed, and its stream."""
    kit.runtime = kit.directory.parent / "runtime"
    kit.runtime.mkdir()
    outbox = prepared(kit)
    stream_id = stream_of(outbox)
    outbox.close()
    return kit.directory, stream_id


def stream_of(outbox):
    return outbox.read(meta.load).result().stream_id


def copy_of(kit, directory, name):
    """Have the kit go on with a copy of *directory*, and of what outlives the agent beside it."""
    kit.directory = shutil.copytree(directory, directory.parent / f"copy-{name}")
    kit.runtime = shutil.copytree(directory.parent / "runtime", directory.parent / f"runtime-{name}")


def struck(kit, offset, length, *, is_running):
    """Return an outbox, open again after a strike under a running agent or at rest, and what it stored since."""
    if not is_running:
        strike(kit, offset, length)
        outbox = kit.open()
        return outbox, keep_working(kit, outbox)
    outbox = kit.open()
    checkpoint(outbox)
    damage(kit, f"write({offset}, garbage({length}))")
    new = keep_working(kit, outbox)
    outbox.close()
    return kit.open(), new


def assert_saved(outbox, kit, new, *, lost=0):
    old, due_to_a = whole_due(outbox, kit, new), set(kit.due(outbox, "a")) - set(new)
    assert len(old) >= COUNT - lost
    assert set(old) <= set(range(1, COUNT + 1))
    assert len(due_to_a) >= len(EXPECTED_A) - lost
    assert due_to_a <= EXPECTED_A
    assert kit.totals(outbox)["a"]["delivered"] >= DELIVERED - lost
    assert kit.totals(outbox)["b"]["accepted"] >= COUNT + len(new) - lost
    assert_totals_hold(outbox, kit)


@pytest.mark.parametrize("is_running", [True, False], ids=["under a running agent", "at rest"])
@pytest.mark.parametrize("place", STRIKES)
def test_a_strike_where_the_tables_are_found_costs_hardly_a_record(kit, whole, place, is_running):
    _, stream_id = whole
    outbox, new = struck(kit, *STRIKES[place], is_running=is_running)
    assert len(set_aside(kit)) == 1
    has_roots = place.startswith("nine")
    assert_saved(outbox, kit, new, lost=ON_A_ROOT if has_roots else 0)
    assert kit.totals(outbox)["a"]["parked"] == 1
    assert stream_of(outbox) == stream_id or (has_roots and not is_running)


def assert_roots_cost_only_themselves(kit, whole, *names, is_running):
    directory, stream_id = whole
    roots = root_pages(kit)
    for name in names or roots:
        copy_of(kit, directory, name)
        outbox, new = struck(kit, (roots[name] - 1) * PAGE, PAGE, is_running=is_running)
        assert_saved(outbox, kit, new, lost=ON_A_ROOT if name == "deliveries" else 0)
        assert stream_of(outbox) == stream_id or (name == "meta" and not is_running), name
        outbox.close()


def test_the_first_page_of_a_table_costs_no_more_than_what_is_on_it(kit, whole):
    tables = "meta", "records", "deliveries", "sinks", "decisions", "records_by_age"
    assert_roots_cost_only_themselves(kit, whole, *tables, is_running=False)


def test_the_first_page_of_a_table_under_a_running_agent_costs_no_more_than_what_is_on_it(kit, whole):
    assert_roots_cost_only_themselves(kit, whole, "meta", "records", "deliveries", is_running=True)


@pytest.mark.long
@pytest.mark.parametrize("is_running", [True, False], ids=["under a running agent", "at rest"])
def test_the_first_page_of_every_table_and_index_costs_no_more_than_what_is_on_it(kit, whole, is_running):
    assert_roots_cost_only_themselves(kit, whole, is_running=is_running)


def test_a_file_of_larger_pages_is_read_without_its_first_page_too(kit, whole):
    """As the agents before had them; nothing but the pages themselves tells their size."""
    with closing(sqlite3.connect(kit.directory / "outbox.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA page_size = 4096")
        connection.execute("VACUUM")
    outbox, new = struck(kit, 0, 4096, is_running=False)
    assert_saved(outbox, kit, new)
    assert stream_of(outbox) == whole[1]


def test_what_was_committed_after_the_strike_is_read_from_the_wal(kit, whole):
    outbox = kit.open()
    checkpoint(outbox)
    damage(kit, "write(0, garbage(2 * page)); write(23 * page, garbage(9 * page))")
    late = kit.commit(outbox, kit.event("L-1"), kit.event("L-2"), document=Document())
    kit.settle(outbox, "a", late[0].sequence)
    copy_of(kit, whole[0], "as after a kill")
    outbox = kit.open()
    new = keep_working(kit, outbox)
    assert whole_due(outbox, kit, new) == [*range(1, COUNT + 1), *(record.sequence for record in late)]
    assert set(kit.due(outbox, "a")) == {*EXPECTED_A, late[1].sequence, *new}
    assert_totals_hold(outbox, kit)


@pytest.mark.parametrize("is_map_gone", [False, True], ids=["free for sure", "in doubt"])
def test_deleted_rows_whose_pages_are_still_in_the_file_are_not_due_again(kit, whole, is_map_gone):
    outbox = kit.open(keep_delivered_seconds=10)
    # As most builds of SQLite have it; Debian's writes zeros over what is deleted.
    outbox.exclusive(lambda storage: storage.connection.execute("PRAGMA secure_delete = OFF")).result()
    kit.settle(outbox, "a", *range(1, COUNT + 1))
    kit.settle(outbox, "b", *range(1, COUNT - 9))
    kit.wait(3600)
    outbox.clean().result()
    kept = [*range(COUNT - 9, COUNT + 1)]
    assert kit.due(outbox, "b") == kept
    totals = kit.totals(outbox)
    checkpoint(outbox)
    copy_of(kit, whole[0], "with free pages")
    strike(kit, 0, 2 * PAGE if is_map_gone else PAGE)
    outbox = kit.open()
    assert kit.due(outbox, "b") == kept
    assert kit.due(outbox, "a") == []
    assert kit.totals(outbox) == totals
    assert_totals_hold(outbox, kit)


def test_a_large_outbox_is_read_by_way_of_a_file_that_leaves_nothing_behind(kit):
    outbox = kit.open(sinks=("a",))
    kit.fill(outbox, 400, size=30_000)
    outbox.close()
    assert (kit.directory / "outbox.db").stat().st_size > 11 * 1024 * 1024
    strike(kit, 0, PAGE)
    outbox = kit.open(sinks=("a",))
    assert kit.due(outbox, "a") == list(range(1, 401))
    assert_totals_hold(outbox, kit)
    assert not [path.name for path in kit.directory.iterdir() if path.name.endswith("-leaves")]
