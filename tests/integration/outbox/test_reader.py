import sqlite3
import threading

import pytest

from bridge.clock import format_time
from bridge.errors import OutboxError, OutboxReadOnly
from bridge.events.event import VmIdentity
from bridge.outbox import deliveries, meta
from bridge.outbox.reader import LastError, OutboxFile


def nudged_at(kit):
    return (kit.directory / "nudge").stat().st_mtime_ns


def test_records_are_read_beside_the_agent_oldest_first_and_page_by_page(kit):
    outbox = kit.open()
    kit.commit(outbox, *(kit.event(f"E-{number}") for number in range(5)))
    with OutboxFile(kit.directory) as beside:
        assert [record.sequence for record in beside.records()] == [1, 2, 3, 4, 5]
        assert [record.sequence for record in beside.records(limit=2)] == [4, 5]
        assert beside.records(after=5) == []
        kit.commit(outbox, kit.event("E-9"))
        assert [record.event.event_id for record in beside.records(after=5)] == ["E-9"]
        assert [record.sequence for record in beside.records(2, after=1)] == [5, 6]


def test_deliveries_are_listed_with_what_was_said_of_them(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"))
    kit.settle(outbox, "b", 2, state="parked")
    with OutboxFile(kit.directory) as beside:
        assert [(row.sink, row.sequence) for row in beside.deliveries()] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
        (row,) = beside.deliveries("b", state="parked")
        assert (row.sequence, row.attempts, row.record.event.event_id) == (2, 1, "E-2")
        assert row.changed_at == format_time(kit.time)
        assert len(beside.deliveries(limit=3)) == 3
        assert beside.accounts() == outbox.read(deliveries.accounts).result()


def test_the_state_is_read_beside_the_agent_and_after_it(kit):
    outbox = kit.open()
    outbox.identify(VmIdentity(name="vm_0", vm_id="1")).result()
    kit.commit(outbox, kit.event())
    with OutboxFile(kit.directory) as beside:
        state = outbox.read(meta.load).result()
        assert beside.state() == state
        outbox.close()
        assert beside.state() == state


def test_a_parked_record_that_is_retried_is_due_again_and_late(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"), kit.event("E-1", "Started"))
    kit.settle(outbox, "a", 1, 2, state="parked")
    kit.settle(outbox, "a", 3)
    before = nudged_at(kit)
    with OutboxFile(kit.directory) as beside:
        assert beside.retry(record_id=beside.records()[0].id) == 1
        assert kit.due(outbox) == [1]
        assert beside.retry("a") == 1
    assert kit.due(outbox) == [1, 2]
    assert outbox.read(deliveries.due, "a", limit=1).result()[0].attempts == 0
    assert kit.totals(outbox)["a"]["parked"] == 0
    assert nudged_at(kit) > before


def test_a_retry_makes_a_record_young_again(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    kit.settle(outbox, "a", 1, state="parked")
    kit.wait(-10 * 365 * 86400)  # the retry itself goes by the real clock
    with OutboxFile(kit.directory) as beside:
        beside.retry("a")
    kit.wait(10 * 365 * 86400)
    outbox.write(deliveries.expire, "a", now=kit.time.timestamp(), max_age_seconds=0).result()
    assert kit.due(outbox) in ([], [1])


def test_a_retried_record_of_an_event_that_became_urgent_goes_before_the_rest_of_it(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"))
    kit.settle(outbox, "a", 1, state="parked")
    kit.commit(outbox, kit.event("E-1", event_type="Preempt"))
    with OutboxFile(kit.directory) as beside:
        beside.retry()
    assert kit.due(outbox) == [1, 2]


def test_a_retry_nudges_a_sink_that_has_nothing_parked(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    with OutboxFile(kit.directory) as beside:
        assert beside.retry("a") == 0
        assert (
            outbox.read(deliveries.retry_requests, "a").result(),
            outbox.read(deliveries.retry_requests, "b").result(),
        ) == (1, 0)
        assert beside.retry() == 0
        assert (
            outbox.read(deliveries.retry_requests, "a").result(),
            outbox.read(deliveries.retry_requests, "b").result(),
        ) == (2, 1)
        assert beside.retry(record_id="unknown") == 0
        assert (
            outbox.read(deliveries.retry_requests, "a").result(),
            outbox.read(deliveries.retry_requests, "b").result(),
        ) == (2, 1)


def test_what_is_discarded_is_counted_and_never_due_again(kit):
    outbox = kit.open()
    kit.commit(outbox, *(kit.event(f"E-{number}") for number in range(4)))
    kit.settle(outbox, "a", 1, state="parked")
    kit.settle(outbox, "a", 2)
    with OutboxFile(kit.directory) as beside:
        last = beside.records()[-1].id
        assert beside.discard("a", state="parked") == 1
        assert beside.discard("a", record_id=last) == 1
        assert kit.due(outbox) == [3]
        assert beside.discard("a") == 1
        assert beside.discard("a") == 0
    kit.settle(outbox, "a", 3)  # it was on its way meanwhile
    totals = kit.totals(outbox)
    assert (totals["a"]["discarded"], totals["a"]["delivered"], totals["a"]["pending"]) == (3, 1, 0)
    assert totals["b"]["pending"] == 4


def test_a_sink_that_is_no_longer_configured_can_be_listed_and_discarded(kit):
    kit.commit(kit.open(), kit.event())
    kit.close()
    kit.open(sinks=("a",))
    with OutboxFile(kit.directory) as beside:
        assert [row.sequence for row in beside.deliveries("b")] == [1]
        assert beside.discard("b") == 1
        assert beside.accounts()["b"].discarded == 1


def test_many_commands_and_the_agent_write_at_once_and_nothing_is_lost(kit):
    outbox = kit.open()
    observations = [kit.observation(outbox, kit.event(f"E-{number}")) for number in range(100)]
    problems = []

    def command():
        try:
            for _ in range(10):
                OutboxFile(kit.directory).retry("a")
        except OutboxError as error:
            problems.append(error)

    threads = [threading.Thread(target=command) for _ in range(3)]
    for thread in threads:
        thread.start()
    sequences = [
        outbox.write(outbox.records.append_observation, observation).result(60)[0].sequence
        for observation in observations
    ]
    for thread in threads:
        thread.join()
    assert (problems, sequences) == ([], list(range(1, 101)))
    assert outbox.read(deliveries.retry_requests, "a").result() == 30


def test_commands_leave_the_agents_files_alone(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    with OutboxFile(kit.directory) as beside:
        beside.records()
        beside.retry()
    outbox.tend().result()
    assert sorted(path.name for path in kit.directory.iterdir()) == [
        "nudge",
        "outbox.db",
        "outbox.db-shm",
        "outbox.db-wal",
    ]
    kit.commit(outbox, kit.event("E-2"))
    assert len(OutboxFile(kit.directory).records()) == 2


def test_a_directory_without_an_outbox_is_named(kit):
    with pytest.raises(OutboxError, match=r"There is no outbox in .*state\. "):
        OutboxFile(kit.directory)


def test_a_file_that_is_no_outbox_is_named(kit):
    kit.directory.mkdir()
    (kit.directory / "outbox.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(OutboxError, match=r"outbox\.db cannot be opened.*damaged"):
        OutboxFile(kit.directory)


def test_commands_that_write_are_refused_while_the_agent_works_from_memory(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event())
    refusal = sqlite3.OperationalError("database or disk is full")
    outbox.exclusive(lambda store: store.recover(refusal)).result()
    with OutboxFile(kit.directory) as beside:
        assert beside.is_agent_in_memory
        with pytest.raises(OutboxReadOnly, match="works from memory because its disk refuses writes"):
            beside.retry()
        with pytest.raises(OutboxReadOnly):
            beside.discard("a")
        assert len(beside.records()) == 1
        outbox.tend().result()
        assert not beside.is_agent_in_memory
        assert beside.discard("a") == 1
    assert kit.due(outbox) == []


def test_another_program_that_holds_the_database_too_long_is_said(kit):
    kit.commit(kit.open(), kit.event())
    blocker = sqlite3.connect(kit.directory / "outbox.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(OutboxError, match="Another program writes to it; try again"):
            OutboxFile(kit.directory).retry()
    finally:
        blocker.close()


def test_a_glance_has_the_totals_the_errors_and_the_last_records_of_active_events(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"), kit.event("E-2"))
    kit.commit(outbox, kit.event("E-2", "Started"), transition="started", incarnation=2)
    kit.wait(10)
    kit.settle(outbox, "a", 1, state=None, error="too late")
    kit.wait(10)
    kit.settle(outbox, "a", 2, state="parked", error="refused")
    kit.settle(outbox, "b", 1, 2, 3)
    glance = OutboxFile(kit.directory).snapshot()
    assert glance.sinks == outbox.read(deliveries.accounts).result()
    assert glance.last_errors == {"a": LastError(message="refused", at=kit.time.timestamp())}
    assert glance.oldest_pending_at == {"a": kit.time.timestamp() - 20}
    assert [record.sequence for record in glance.last_records["E-2"]] == [3, 2]
    assert list(glance.last_records) == ["E-2"]
    assert glance.newest_record_at == kit.time.timestamp() - 20
    assert glance.stored == outbox.read(meta.load).result()


def test_a_glance_is_of_one_commit_while_the_agent_writes(kit):
    outbox = kit.open()
    done = threading.Event()

    def write():
        for number in range(150):
            kit.commit(outbox, kit.event(f"E-{number}"), incarnation=number + 1)
        done.set()

    kit.commit(outbox, kit.event("E-0"), incarnation=1)
    writer = threading.Thread(target=write)
    writer.start()
    looks = 0
    while not done.is_set() or not looks:
        glance = OutboxFile(kit.directory).snapshot()
        (key,) = (event.key for event in glance.stored.document.events)
        (record, *_) = glance.last_records[key]
        assert glance.sinks["a"].accepted == record.sequence
        looks += 1
    writer.join()


def test_a_directory_that_may_not_be_looked_into_says_whom_to_ask_as(kit):
    kit.directory.parent.joinpath("file").touch()
    with pytest.raises(
        OutboxError, match=r"cannot be read: Not a directory\. Ask as the owner of the directory or as root"
    ):
        OutboxFile(kit.directory.parent / "file")


def test_an_outbox_without_tables_holds_nothing(kit):
    kit.directory.mkdir()
    (kit.directory / "outbox.db").touch()
    with pytest.raises(OutboxError, match=r"holds nothing.*just making it"):
        OutboxFile(kit.directory)
