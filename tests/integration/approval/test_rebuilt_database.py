"""What people decided outlives the database that it is kept in, a hold wherever it can be read."""

import os
import sqlite3
import time
from contextlib import closing, suppress

import pytest
from approver_kit import BORIS

from bridge.config.approval import RuleSettings
from bridge.errors import ImdsStatus, OutboxError
from bridge.events.diff import Change
from bridge.events.event import Document
from bridge.events.record import Evidence, Transition
from bridge.outbox import approvals, meta
from bridge.outbox.records import Observation

FREEZE = RuleSettings(name="freeze", action="approve", event_types=("Freeze",))
_A_COMMIT = 500


def database(kit):
    return kit.state / "outbox.db"


def delete(kit):
    for suffix in ("", "-wal", "-shm"):
        database(kit).with_name(f"outbox.db{suffix}").unlink(missing_ok=True)


def damage(kit, table="records"):
    """Overwrite the first page of *table*."""
    with closing(sqlite3.connect(database(kit))) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        tables = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"), sqlite_master=1)
        page = tables[table]
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with database(kit).open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xa5" * size)


def checkpoint(kit):
    """Have the file itself hold all that was committed so far."""
    with closing(sqlite3.connect(database(kit))) as connection:
        connection.execute("PRAGMA wal_checkpoint(FULL)")


def cut_wal(kit):
    """Take away, in place, what was committed since; the agent has none of it in its cache."""
    kit.outbox.exclusive(lambda storage: storage.connection.execute("PRAGMA shrink_memory")).result()
    os.truncate(kit.state / "outbox.db-wal", 0)


def tend(kit, *events):
    """Let time pass, in memory at first, until the agent is back on the disk."""
    for _ in range(4):
        with suppress(OutboxError):
            kit.go(5, *events)
        kit.outbox.tend().result()


def replace(kit):
    """Have the running agent find its file missing."""
    delete(kit)
    kit.outbox.tend().result()


def fill(kit, count):
    """Have the outbox hold *count* records of 4 KB on its disk."""
    events = [kit.event(f"F-{number}", event_status="Started", description="x" * 4096) for number in range(count)]
    for begin in range(0, count, _A_COMMIT):
        seen = Observation(
            stream_id=kit.outbox.read(meta.load).result().stream_id,
            document=Document(incarnation=1),
            changes=[
                Change(transition=Transition.STARTED, evidence=Evidence.OBSERVED, event=event)
                for event in events[begin : begin + _A_COMMIT]
            ],
            observed_at=kit.now(),
            incarnation=1,
            previous_incarnation=None,
            is_settled=True,
            boot_id="boot-1",
        )
        kit.outbox.write(kit.outbox.records.append_observation, seen).result()
    deadline = time.monotonic() + 60
    while kit.outbox.in_memory:  # a busy disk took more than two seconds for a commit
        assert time.monotonic() < deadline
        kit.outbox.tend().result()
        time.sleep(0.05)


def held(kit):
    return {each.event_id for each in kit.outbox.read(approvals.open_decisions).result() if each.state.value == "held"}


def test_a_hold_outlives_a_file_that_is_deleted_under_the_running_agent(make):
    kit = make(FREEZE)
    kit.offer(kit.token(kit.event(), "hold"))
    replace(kit)
    kit.go(30, kit.event())
    assert held(kit) == {"E-1"}
    assert kit.imds.posts == []


@pytest.mark.parametrize("table", ["records", "deliveries", "records_by_event", "approvals", "sqlite_master"])
def test_a_hold_outlives_a_file_that_was_damaged_elsewhere(make, table):
    kit = make(FREEZE)
    kit.go(1)
    kit.offer(kit.token(kit.event(), "hold"))
    kit.close()
    damage(kit, table)
    kit.start()
    assert kit.outbox.set_aside_count == 1
    kit.hear_portal()
    kit.go(30, kit.event())
    assert held(kit) == {"E-1"}
    assert kit.imds.posts == []


@pytest.mark.parametrize("lose", [delete, damage], ids=["lost", "damaged"])
def test_rules_wait_after_the_database_was_rebuilt_until_the_portal_has_given_all_of_its_decisions(make, lose):
    kit = make(FREEZE)
    kit.close()
    lose(kit)
    kit.wait(60)
    kit.start()
    kit.go(30, kit.event())
    assert kit.imds.posts == []
    kit.restart()
    kit.go(30, kit.event())
    assert kit.imds.posts == []
    kit.hear_portal()
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]


@pytest.mark.parametrize("lose", [delete, damage], ids=["lost", "damaged"])
def test_a_hold_that_was_lost_with_the_database_counts_when_the_portal_gives_it_again(make, lose):
    kit = make(FREEZE)
    hold = kit.token(kit.event(), "hold")
    kit.close()
    lose(kit)
    kit.wait(60)
    kit.start()
    kit.see(kit.event())
    kit.offer(hold)
    kit.hear_portal()
    kit.go(30, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == []


def test_an_open_approval_outlives_a_file_that_is_deleted_under_the_running_agent(make):
    kit = make(required=2)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.offer(kit.token(kit.event("E-2")))
    replace(kit)
    kit.see(kit.event(), kit.event("E-2"))
    kit.offer(*(kit.token(kit.event(name), kid="k2", approver=BORIS, after=-1) for name in ("E-1", "E-2")))
    assert sorted(kit.imds.posts) == [["E-1", "E-2"]]


@pytest.mark.parametrize("table", ["records", "sqlite_master"])
def test_an_open_approval_of_a_damaged_file_is_not_followed_since_a_hold_may_be_missing_beside_it(make, table):
    kit = make(required=2)
    kit.see(kit.event())
    first = kit.token(kit.event())
    kit.offer(first)
    kit.close()
    damage(kit, table)
    kit.wait(1)
    kit.start()
    kit.see(kit.event())
    kit.offer(first, kit.token(kit.event(), kid="k2", approver=BORIS))
    kit.go(3, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "issued_before_this_outbox")]


@pytest.mark.parametrize("table", ["records", "sqlite_master"])
def test_what_was_followed_is_known_after_the_database_was_rebuilt(make, table):
    kit = make()
    kit.see(kit.event())
    token = kit.token(kit.event())
    kit.offer(token)
    kit.close()
    damage(kit, table)
    kit.start()
    kit.see(kit.event())
    before = len(kit.outcomes)
    kit.offer(token)
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]
    assert len(kit.outcomes) == before


@pytest.mark.parametrize("backlog", [0, 3_000], ids=["copied into memory", "too large for memory"])
def test_a_hold_outlives_a_file_that_is_lost_while_its_disk_refuses(make, backlog):
    kit = make(FREEZE)
    kit.offer(kit.token(kit.event(), "hold"))
    fill(kit, backlog)
    full = sqlite3.OperationalError("database or disk is full")
    kit.outbox.exclusive(lambda storage: storage.recover(full)).result()
    assert kit.outbox.in_memory
    delete(kit)
    kit.outbox.tend().result()
    assert not kit.outbox.in_memory
    kit.hear_portal()
    kit.go(30, kit.event())
    assert held(kit) == {"E-1"}
    assert kit.imds.posts == []


def test_a_hold_that_was_lost_with_a_cut_wal_lets_no_rule_act_before_the_portal_has_given_it_again(make):
    kit = make(FREEZE)
    kit.go(1)
    checkpoint(kit)
    hold = kit.token(kit.event(), "hold")
    kit.offer(hold)
    before = kit.outbox.created_at
    cut_wal(kit)
    tend(kit, kit.event())
    assert kit.outbox.set_aside_count == 1
    assert kit.outbox.created_at > before  # so the portal is asked from the beginning
    assert kit.outbox.awaits_portal
    kit.offer(hold)
    kit.hear_portal()
    kit.go(30, kit.event())
    assert kit.imds.posts == []


def test_an_approval_that_a_hold_had_withdrawn_does_not_revive_when_the_wal_is_cut(make):
    kit = make()
    approve = kit.token(kit.event())
    kit.imds.get_answer = ImdsStatus("no", status=503)
    kit.see(kit.event())
    kit.offer(approve)
    checkpoint(kit)
    kit.offer(kit.token(kit.event(), "hold"))
    kit.imds.get_answer = None
    cut_wal(kit)
    tend(kit, kit.event())
    kit.offer(approve)
    kit.go(3, kit.event())
    assert not kit.outbox.in_memory
    assert kit.imds.posts == []


def test_a_disk_that_refused_for_a_while_and_has_all_that_was_committed_is_gone_on_with(make):
    kit = make(required=2)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    before = kit.outbox.created_at
    full = sqlite3.OperationalError("database or disk is full")
    kit.outbox.exclusive(lambda storage: storage.recover(full)).result()
    kit.outbox.tend().result()
    assert (kit.outbox.set_aside_count, kit.outbox.created_at) == (0, before)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), kid="k2", approver=BORIS))
    assert kit.imds.posts == [["E-1"]]


def test_a_clock_that_is_behind_for_a_moment_lets_nothing_count_from_before_the_database(make):
    kit = make()
    kit.wait(3600)
    kit.close()
    delete(kit)
    old = kit.token(kit.event(), after=-1800, valid_seconds=7200)
    kit.start()
    kit.hear_portal()
    kit.wait(5)
    made_at = kit.outbox.created_at
    kit.wall_jump_seconds = -7200
    assert kit.outbox.created_at < made_at
    kit.wall_jump_seconds = 0
    assert kit.outbox.created_at == made_at
    kit.see(kit.event())
    kit.offer(old)
    kit.go(3, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "issued_before_this_outbox")]


# A decision that was lost, and one that got its number.


def lose_the_decision_behind_an_approval(kit, *events):
    """Let an approval wait for Azure, and drop its decision, as a rebuild does when it finds that table damaged."""
    kit.go(1, *events)
    kit.imds.get_answer = ImdsStatus("Unavailable", status=503)
    kit.offer(kit.token(events[0]))
    kit.go(2, *events)
    with closing(sqlite3.connect(database(kit), isolation_level=None)) as connection:
        connection.execute("DELETE FROM decisions")


def first_arrival(kit):
    return kit.outbox.read(approvals.open_decisions).result()[0].arrival


def test_hold_on_another_event_that_got_the_number_of_a_lost_decision_carries_no_approval(make):
    kit = make()
    events = kit.event("E-1"), kit.event("E-2")
    lose_the_decision_behind_an_approval(kit, *events)
    kit.offer(kit.token(events[1], "hold", kid="k2", approver=BORIS))
    assert first_arrival(kit) == 1
    kit.imds.get_answer = None
    kit.go(5, *events)
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "unknown_key")]


@pytest.mark.parametrize("other", ["event", "version of the event", "approver", "jti"])
def test_approval_that_got_the_number_of_a_lost_decision_counts_for_itself_only(make, other):
    kit = make(required=2)
    events = kit.event("E-1"), kit.event("E-2")
    kit.go(1, *events)
    kit.imds.get_answer = ImdsStatus("Unavailable", status=503)
    kit.offer(kit.token(events[0]), kit.token(events[0], kid="k2", approver=BORIS))
    kit.go(2, *events)
    with closing(sqlite3.connect(database(kit), isolation_level=None)) as connection:
        connection.execute("DELETE FROM decisions")
    moved = kit.event("E-1", duration_seconds=9)
    tokens = {
        "event": [kit.token(events[1]), kit.token(events[1], kid="k2", approver=BORIS)],
        "version of the event": [kit.token(moved), kit.token(moved, kid="k2", approver=BORIS)],
        "approver": [kit.token(events[0], kid="k2", approver=BORIS), kit.token(events[0], kid="k2", approver=BORIS)],
        "jti": [kit.token(events[0]), kit.token(events[0])],
    }[other]
    kit.approver.receive(tokens)
    assert first_arrival(kit) == 1
    kit.imds.get_answer = None
    kit.go(5, *events)
    assert kit.imds.posts == ([["E-2"]] if other == "event" else [])


def test_hold_that_got_the_number_of_a_lost_decision_outlives_the_event_of_that_decision(make):
    kit = make()
    lost, kept = kit.event("E-1"), kit.event("E-2")
    lose_the_decision_behind_an_approval(kit, lost, kept)
    hold = kit.token(kept, "hold", kid="k2", approver=BORIS)
    kit.see(kept)
    kit.offer(hold)
    kit.go(5, kept)
    (still,) = kit.outbox.read(approvals.open_decisions).result()
    assert (still.arrival, still.event_id, still.state.value) == (1, "E-2", "held")
