import sqlite3
import threading
import time
from concurrent.futures import wait

import pytest

from bridge.errors import OutboxError
from bridge.events.record import Approval, Transition
from bridge.outbox import approvals, deliveries, meta
from bridge.outbox.approvals import ApprovalRecord
from bridge.outbox.deliveries import DeliveryResult, DeliveryState


def test_what_is_handed_in_together_is_committed_together(kit):
    outbox = kit.open()
    observations = [kit.observation(outbox, kit.event(f"E-{number}")) for number in range(100)]
    statements = []
    outbox._storage.connection.set_trace_callback(statements.append)
    blocker = sqlite3.connect(kit.directory / "outbox.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    futures = [outbox.write(outbox.records.append_observation, observation) for observation in observations]
    blocker.execute("COMMIT")
    blocker.close()
    sequences = [future.result(60)[0].sequence for future in futures]
    outbox._storage.connection.set_trace_callback(None)
    assert sequences == list(range(1, 101))
    assert statements.count("COMMIT") <= 5


def test_a_commit_that_writes_no_meta_does_not_read_the_document_again(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    outbox.write(meta.put, "boot_id", "b").result()
    outbox.read(deliveries.accounts).result()  # what follows a commit is done
    assert outbox._storage.meta["boot_id"] == "b"
    statements = []
    outbox._storage.connection.set_trace_callback(statements.append)
    outbox.write(deliveries.mark_started, "s", "E-1", now=0.0).result()
    outbox.read(deliveries.accounts).result()
    outbox._storage.connection.set_trace_callback(None)
    assert statements
    assert not any("SELECT key, value FROM meta" in statement for statement in statements)


@pytest.mark.parametrize(("sinks", "most_kilobytes"), [(1, 48), (4, 96)], ids=["one sink", "four sinks"])
def test_a_transition_costs_few_bytes_of_disk(kit, sinks, most_kilobytes):
    """Less than what is promised by a fifth, for the file itself is written too, now and then, from the -wal."""
    names = tuple("abcd"[:sinks])
    outbox = kit.open(sinks=names)
    wal = kit.directory / "outbox.db-wal"
    for number in range(10):
        kit.commit(outbox, kit.event(f"W-{number}", description="x" * 500))
    before = wal.stat().st_size
    for number in range(20):
        (record,) = kit.commit(outbox, kit.event(f"E-{number}", description="x" * 500))
        results = [DeliveryResult(sequence=record.sequence, state=DeliveryState.DELIVERED)]
        wait([outbox.write_soon(deliveries.record_results, name, results, now=0.0) for name in names])
    assert (wal.stat().st_size - before) / 20 / 1000 <= most_kilobytes
    assert [totals["delivered"] for totals in kit.totals(outbox).values()] == [20] * sinks


def test_what_may_wait_is_committed_with_the_next_write_and_by_itself_soon(kit):
    outbox = kit.open()
    statements = []
    outbox._storage.connection.set_trace_callback(statements.append)
    first = outbox.write_soon(meta.put, "one", "1")
    second = outbox.write_soon(meta.put, "two", "2")
    outbox.write(meta.put, "three", "3").result(10)
    assert (first.done(), second.done(), statements.count("COMMIT")) == (True, True, 1)
    outbox.write_soon(meta.put, "four", "4").result(10)
    outbox._storage.connection.set_trace_callback(None)
    assert statements.count("COMMIT") == 2


def test_closing_does_not_leave_out_what_may_wait(kit):
    outbox = kit.open()
    waiting = outbox.write_soon(meta.put, "boot_id", "b")
    outbox.close()
    assert waiting.done()
    assert kit.open().read(meta.get, "boot_id").result(10) == "b"


def test_work_that_fails_is_rolled_back_alone(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    second, third = (kit.observation(outbox, kit.event(event_id)) for event_id in ("E-2", "E-3"))
    started, go = threading.Event(), threading.Event()

    def hold(_connection):
        started.set()
        go.wait(10)

    def spoil(connection):
        connection.execute("DELETE FROM meta")
        raise ZeroDivisionError

    outbox.read(hold)
    started.wait(10)
    before = outbox.write(outbox.records.append_observation, second)
    bad = outbox.write(spoil)
    wrong = outbox.write(lambda connection: connection.execute("DELETE FROM deliveries"))
    after = outbox.write(outbox.records.append_observation, third)
    go.set()
    assert [before.result(10)[0].sequence, after.result(10)[0].sequence] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        bad.result(10)
    with pytest.raises(OutboxError, match="still owed"):
        wrong.result(10)
    assert kit.due(outbox) == [1, 2, 3]


def test_closing_finishes_what_was_handed_in_and_refuses_the_rest(kit):
    outbox = kit.open()
    observations = [kit.observation(outbox, kit.event(f"E-{number}")) for number in range(300)]
    futures = [outbox.write(outbox.records.append_observation, observation) for observation in observations]
    outbox.close()
    assert all(future.done() for future in futures)
    assert kit.due(kit.open()) == list(range(1, 301))
    with pytest.raises(OutboxError, match="closed"):
        outbox.read(deliveries.accounts)
    outbox.close()


def test_eight_threads_hand_in_at_once_and_every_record_is_kept_once(kit):
    outbox = kit.open(sinks=("a",))
    observations = [[kit.observation(outbox, kit.event(f"E-{n}-{i}")) for i in range(50)] for n in range(8)]

    def commit(mine):
        wait([outbox.write(outbox.records.append_observation, observation) for observation in mine], 60)

    threads = [threading.Thread(target=commit, args=(mine,)) for mine in observations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kit.due(outbox) == list(range(1, 401))


def test_a_caller_that_gave_up_does_not_stop_the_outbox(kit):
    outbox = kit.open()
    assert outbox.write(outbox.records.append_observation, kit.observation(outbox, kit.event())).cancel() is False
    assert kit.due(outbox) == [1]


def test_a_commit_waits_for_a_command_that_holds_the_database_for_seven_seconds(kit, caplog):
    outbox = kit.open()
    observation = kit.observation(outbox, kit.event())
    blocker = sqlite3.connect(kit.directory / "outbox.db", isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(7.0, lambda: (blocker.execute("COMMIT"), blocker.close()))
    timer.start()
    (record,) = outbox.write(outbox.records.append_observation, observation).result(60)
    timer.join()
    assert record.sequence == 1
    assert kit.due(outbox) == [1]
    assert "locked by another program" in caplog.text


def test_a_lock_that_lasts_is_treated_as_a_disk_that_refuses_until_it_is_gone(kit, caplog):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"))
    second, third = (kit.observation(outbox, kit.event(event_id)) for event_id in ("E-2", "E-3"))
    blocker = sqlite3.connect(kit.directory / "outbox.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    assert outbox.write(outbox.records.append_observation, second).result(20)[0].sequence == 2
    assert outbox.in_memory
    began_at = time.monotonic()
    outbox.tend().result(20)
    assert outbox.write(outbox.records.append_observation, third).result(20)[0].sequence == 3
    assert outbox.in_memory
    assert time.monotonic() - began_at < 4, "in memory nobody waits for the lock"
    assert caplog.text.count("locked by another program") == 1
    blocker.execute("COMMIT")
    blocker.close()
    outbox.tend().result(20)
    assert not outbox.in_memory
    assert kit.due(outbox) == [1, 2, 3]
    outbox.close()
    assert kit.due(kit.open()) == [1, 2, 3]


def test_closing_does_not_wait_for_a_thread_that_hangs(kit):
    outbox = kit.open()
    go = threading.Event()
    outbox.read(lambda _connection: go.wait(30))
    assert outbox.close(0.1) is False
    go.set()
    assert outbox.close(30) is True


def test_an_outbox_that_is_locked_when_it_is_opened_works_from_memory(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"))
    outbox.close()
    blocker = sqlite3.connect(kit.directory / "outbox.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    again = kit.open()
    assert (
        again.write(again.records.append_observation, kit.observation(again, kit.event("E-2"))).result(30)[0].sequence
        == 2
    )
    assert again.in_memory
    blocker.execute("COMMIT")
    blocker.close()
    again.tend().result(20)
    assert not again.in_memory
    assert kit.due(again) == [1, 2]


# Who is told of a commit.


def test_workers_are_woken_by_new_deliveries_and_by_nothing_else(kit):
    outbox = kit.open(sinks=("a",), route=lambda record, _name: ["a"] * (record.event is not None))
    woken = []
    outbox.on_added = lambda: woken.append(True)

    def until_done(future):
        future.result(10)
        outbox.read(lambda _connection: None).result(10)  # done after the worker was woken, if it was
        return len(woken)

    state = outbox.read(approvals.read_state).result()
    approved = ApprovalRecord(
        transition=Transition.APPROVED, event=None, approval=Approval(source="cli", result="accepted")
    )
    assert until_done(outbox.write(outbox.records.append_heartbeat, incarnation=1)) == 0
    assert until_done(outbox.write(meta.save_liveness, last_good_at=kit.time, boot_id="boot-2")) == 0
    bookkeeping = outbox.write(outbox.records.write_approvals, state.stream_id, outcomes=[approved], incarnation=1)
    assert until_done(bookkeeping) == 0
    assert until_done(outbox.write(deliveries.mark_started, "a", "E-1", now=0.0)) == 0
    observation = kit.observation(outbox, kit.event())
    assert until_done(outbox.write(outbox.records.append_observation, observation)) == 1
    assert until_done(outbox.write(deliveries.record_results, "a", [], now=0.0)) == 1


def test_workers_look_again_when_the_database_was_exchanged(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    woken = threading.Event()
    outbox.on_added = woken.set
    (kit.directory / "outbox.db").unlink()
    outbox.tend().result(10)
    assert woken.wait(10)
    assert kit.due(outbox) == [1]


def test_those_who_send_are_told_what_was_added_before_the_caller_is(kit):
    outbox = kit.open()
    gate = threading.Event()
    read = outbox.read_when_added("a", deliveries.due, "a", limit=9)
    outbox.write(meta.put, "boot_id", "b").result(10)
    assert not read.done(), "nothing was added"
    told = []
    outbox.on_added = lambda: told.append((read.done(), added.done()))
    observation = kit.observation(outbox, kit.event())
    outbox.read(lambda _connection: gate.wait(10))
    added = outbox.write(outbox.records.append_observation, observation)
    gate.set()
    added.result(10)
    assert told == [(True, False)]
    rows, additions = read.result()
    assert ([row.sequence for row in rows], additions) == ([1], outbox.additions)


def test_a_later_read_of_what_is_added_takes_the_place_of_the_one_before(kit):
    outbox = kit.open()
    first, second = (outbox.read_when_added("a", deliveries.due, "a", limit=9) for _ in range(2))
    kit.commit(outbox, kit.event())
    assert second.done()
    assert not first.done()
    kit.commit(outbox, kit.event("E-2"))
    assert [row.sequence for row in second.result()[0]] == [1], "it is done once"


@pytest.mark.parametrize("error", [ValueError("x"), sqlite3.OperationalError("database is locked")])
def test_a_read_of_what_is_added_that_fails_does_not_keep_it_from_being_stored(kit, error):
    outbox = kit.open()

    def fail(_connection):
        raise error

    read = outbox.read_when_added("a", fail)
    (record,) = kit.commit(outbox, kit.event())
    assert record.sequence == 1
    assert kit.due(outbox) == [1]
    assert not outbox.in_memory
    assert not read.done() or read.exception() is error


def test_what_gathered_beside_the_file_is_copied_into_it_between_commits(kit):
    outbox = kit.open()
    file = kit.directory / "outbox.db"
    for number in range(130):
        outbox.write(meta.put, "boot_id", str(number)).result(10)
    kit.commit(outbox, kit.event(description="x" * 100_000))
    before = file.stat().st_size
    outbox.tend().result(10)
    assert file.stat().st_size > before + 100_000
    kit.commit(outbox, kit.event("E-2", description="x" * 100_000))
    size = file.stat().st_size
    outbox.tend().result(10)
    assert file.stat().st_size == size, "one commit is not worth it"
    assert kit.due(outbox) == [1, 2]
