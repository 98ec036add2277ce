import re
import sqlite3

import pytest

from bridge.events.event import Document
from bridge.outbox import deliveries
from bridge.outbox.database import SQL
from bridge.outbox.deliveries import DeliveryResult, DeliveryState

#: What a delivery worker runs, again and again, and the tables' sizes must not matter to.
WORKER_STATEMENTS = {
    "due": ("a", 0),
    "due_of_event": ("E-1", "a"),
    "body": (1,),
    "soonest_notice": ("a", 0.0),
    "has_urgent": ("a",),
    "oldest_pending": ("a",),
    "expire": (0.0, "a", 0.0),
    "finish": ("delivered", None, 1, 0.0, "a", "[1]"),
    "note_failure": (None, 0.0, "a", 1),
    "retry_requests": ("a",),
    "make_event_urgent": ("E-1",),
    "is_unfinished": (1,),
    "repeats": ("id", 1),
    "has_id": ("id", 1),
    "last_of_event": ("E-1",),
    "finished_before": (0.0, 10),
}


def urgent(kit, event_id, **fields):
    return kit.event(event_id, event_type="Preempt", **fields)


# What is due.


def test_urgent_events_come_first_and_each_event_in_sequence(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"), urgent(kit, "P-1"), kit.event("E-1", "Started"))
    assert kit.due(outbox) == [3, 1, 2, 4]
    assert [row.urgent for row in outbox.read(deliveries.due, "a", limit=9).result()] == [True, False, False, False]


def test_an_event_that_became_urgent_takes_its_older_records_along(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"), kit.event("E-2", "Started"))
    kit.commit(outbox, urgent(kit, "E-2"), kit.event("E-1", "Started"))
    assert kit.due(outbox) == [2, 3, 4, 1, 5]
    assert kit.due(outbox, "b") == [2, 3, 4, 1, 5]


def test_rows_and_events_that_are_busy_are_left_out(kit):
    outbox = kit.open()
    kit.commit(outbox, *(kit.event(f"E-{number % 3}") for number in range(9)))
    assert kit.due(outbox, blocked=["E-1"]) == [1, 3, 4, 6, 7, 9]
    assert kit.due(outbox, blocked=["E-1"], skip=[1, 9]) == [3, 4, 6, 7]
    assert kit.due(outbox, limit=2) == [1, 2]
    assert kit.due(outbox, after=7) == [8, 9]
    assert kit.due(outbox, "nobody") == []


def test_events_are_kept_together_for_a_sink_whose_batches_hold_one_event(kit):
    outbox = kit.open()
    kit.commit(outbox, *(kit.event(f"E-{number % 3}") for number in range(9)))
    assert kit.due(outbox, limit=2, per_event=2) == [1, 4, 2, 5]
    assert kit.due(outbox, limit=9, per_event=9) == [1, 4, 7, 2, 5, 8, 3, 6, 9]


def test_what_is_settled_is_due_no_more(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"), kit.event("E-3"))
    outcomes = [
        DeliveryResult(sequence=1, state=DeliveryState.DELIVERED),
        DeliveryResult(sequence=2, state=DeliveryState.PARKED, error="too large"),
        DeliveryResult(sequence=3, state=None, error="down"),
    ]
    outbox.write(deliveries.record_results, "a", outcomes, now=kit.time.timestamp()).result()
    (row,) = outbox.read(deliveries.due, "a", limit=9).result()
    assert (row.sequence, row.attempts) == (3, 1)
    totals = kit.totals(outbox)
    assert (totals["a"]["delivered"], totals["a"]["parked"], totals["a"]["pending"]) == (1, 1, 1)
    assert totals["b"]["pending"] == 3


def test_an_outcome_that_comes_twice_or_late_counts_once(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    kit.settle(outbox, "a", 1)
    kit.settle(outbox, "a", 1)
    kit.settle(outbox, "a", 1, state="parked")
    kit.settle(outbox, "a", 99)
    totals = kit.totals(outbox)["a"]
    assert (totals["accepted"], totals["delivered"], totals["parked"]) == (1, 1, 0)


def test_what_is_owed_carries_the_record_and_its_notice(kit):
    outbox = kit.open()
    soon, later = kit.time.replace(hour=12), kit.time.replace(hour=13)
    (record, _) = kit.commit(outbox, kit.event("E-1", not_before=later), kit.event("E-2", not_before=soon))
    row = outbox.read(deliveries.due, "a", limit=1).result()[0]
    assert (row.record, row.not_before) == (record, later.timestamp())
    assert outbox.read(deliveries.urgency, "a", now=kit.time.timestamp()).result() == (False, soon.timestamp())
    kit.wait(3600)
    assert outbox.read(deliveries.urgency, "a", now=kit.time.timestamp()).result() == (False, later.timestamp())
    kit.commit(outbox, urgent(kit, "P-1"))
    assert outbox.read(deliveries.urgency, "a", now=kit.time.timestamp()).result() == (True, later.timestamp())
    assert outbox.read(deliveries.urgency, "nobody", now=kit.time.timestamp()).result() == (False, None)


# Trying a paused sink.


def probe(outbox, **options):
    rows = outbox.read(deliveries.probe, "a", **options).result()
    return rows[0].sequence if rows else None


def test_a_probe_tries_each_event_in_turn(kit):
    outbox = kit.open()
    kit.commit(outbox, *(kit.event(f"E-{number % 3}") for number in range(6)))
    tried = []
    for _ in range(6):
        tried.append(probe(outbox))
        kit.settle(outbox, "a", tried[-1], state=None)
    assert tried == [1, 2, 3, 1, 2, 3]


def test_a_probe_takes_the_urgent_first_and_the_head_of_an_event_only(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("P-1"), urgent(kit, "P-1"))
    assert probe(outbox) == 2
    kit.settle(outbox, "a", 2, 2, 2, state=None)
    assert probe(outbox) == 2
    assert probe(outbox, blocked=["P-1"]) == 1
    assert probe(outbox, only=frozenset({"E-1"})) == 1
    assert probe(outbox, only=frozenset({"gone"})) is None
    assert probe(outbox, skip=[1, 2, 3]) is None


def test_a_probe_of_a_long_backlog_costs_no_more_than_one_of_a_short(kit):
    outbox = kit.open(sinks=("a",), max_bytes=256 * 1024 * 1024)
    short, long = 3_000, 12_000
    steps = []
    for count in (short, long):
        kit.fill(outbox, count, events=1_000)
        connection = sqlite3.connect(kit.directory / "outbox.db")
        try:
            for kind, options in (("any", {}), ("one", {"only": frozenset(["EVENT-none"])})):
                note = (kind, count)
                connection.set_progress_handler(lambda: steps.append(note), 100)  # noqa: B023  # used within the turn
                deliveries.probe(connection, "a", **options)
        finally:
            connection.close()
    for kind in ("any", "one"):
        assert steps.count((kind, long)) <= 1.5 * steps.count((kind, short))


# Giving up.


def test_records_expire_by_their_age_and_are_counted(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"))
    kit.wait(60)
    kit.commit(outbox, kit.event("E-2"))
    kit.wait(30)
    assert outbox.write(deliveries.expire, "a", now=kit.time.timestamp(), max_age_seconds=90).result() == 0
    kit.wait(1)
    assert outbox.write(deliveries.expire, "a", now=kit.time.timestamp(), max_age_seconds=90).result() == 1
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == ([2], [1, 2])
    assert kit.totals(outbox)["a"]["expired"] == 1
    assert outbox.read(deliveries.oldest_pending).result()["b"] == pytest.approx(kit.time.timestamp() - 91)


# In far less time than it takes to look at everything.


@pytest.fixture
def backlog(kit):
    """Return an outbox with 2,000 pending rows behind 4,000 delivered ones."""
    outbox = kit.open(sinks=("a",), max_bytes=256 * 1024 * 1024)
    kit.fill(outbox, 6_000, events=600)
    kit.settle(outbox, "a", *range(1, 4_001))
    return outbox


@pytest.mark.usefixtures("backlog")
def test_what_is_due_is_found_without_looking_at_what_is_done(kit):
    steps = []
    connection = sqlite3.connect(kit.directory / "outbox.db")
    try:
        connection.set_progress_handler(lambda: steps.append(1), 10)
        [first] = deliveries.due(connection, "a", limit=1)
    finally:
        connection.close()
    assert first.sequence == 4_001
    assert 10 * len(steps) < 2_000, "more steps of SQLite than there are pending rows"


@pytest.mark.parametrize("name", WORKER_STATEMENTS)
def test_a_statement_that_workers_run_scans_no_table(kit, name):
    kit.commit(kit.open(), kit.event())
    kit.close()
    connection = sqlite3.connect(kit.directory / "outbox.db")
    try:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", WORKER_STATEMENTS[name]).fetchall()
    finally:
        connection.close()
    steps = [row[3] for row in plan]
    assert not [step for step in steps if re.match(r"SCAN (records|deliveries)", step)], steps
    assert not [step for step in steps if "TEMP B-TREE" in step], steps


def test_due_rows_are_read_from_their_index_alone(kit):
    kit.open().close()
    connection = sqlite3.connect(kit.directory / "outbox.db")
    try:
        explained = connection.execute(f"EXPLAIN QUERY PLAN {SQL['due']}", WORKER_STATEMENTS["due"])
        steps = [row[3] for row in explained]
    finally:
        connection.close()
    assert any("USING COVERING INDEX deliveries_due" in step for step in steps), steps


def test_the_clean_up_of_old_records_goes_on_bit_by_bit(kit, backlog):
    kit.commit(backlog, document=Document())
    kit.wait(3601)
    assert backlog.clean().result() == 500
    assert backlog.clean().result() == 500
    assert kit.totals(backlog)["a"]["pending"] == 2_000
