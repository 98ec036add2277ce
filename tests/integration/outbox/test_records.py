"""The records of a commit: an id that comes again gets a repeat, counted once for each id."""

from datetime import datetime, timedelta, timezone

import pytest

from bridge.events.diff import Change
from bridge.events.event import Document, ScheduledEvent
from bridge.events.record import Evidence, Transition
from bridge.outbox.records import Observation, RecordWriter
from bridge.outbox.storage import Storage

NOW = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
MIB = 1024 * 1024


def event(status, **fields):
    return ScheduledEvent(event_status=status, event_id="A-1", event_type="Reboot", resources=("vm_0",), **fields)


E, S = event("Scheduled", not_before=NOW + timedelta(minutes=10)), event("Started")


@pytest.fixture
def store(tmp_path):
    opened = Storage(tmp_path, max_bytes=64 * MIB, now=lambda: NOW)
    yield opened
    opened.close()


def observation(store, *events):
    changes = [Change(transition=Transition.SCHEDULED, evidence=Evidence.OBSERVED, event=one) for one in events]
    return Observation(
        stream_id=store.meta["stream_id"],
        document=Document(incarnation=1, events=events),
        changes=changes,
        observed_at=NOW,
        incarnation=1,
        previous_incarnation=None,
        is_settled=True,
        boot_id="boot-1",
    )


def commit(writer, store, *events, end="COMMIT"):
    store.connection.execute("BEGIN IMMEDIATE")
    writer.open(store)
    records = writer.append_observation(store.connection, observation(store, *events))
    store.connection.execute(end)
    return [record.id for record in records]


def test_repeats_are_counted_once_for_each_id_in_a_commit(store):
    writer, statements = RecordWriter(now=lambda: NOW), []
    store.connection.set_trace_callback(statements.append)
    ids = commit(writer, store, *[E] * 50, *[S] * 50)
    store.connection.set_trace_callback(None)
    assert sum("COUNT(*) FROM records WHERE first_id" in statement for statement in statements) == 2
    assert len(set(ids)) == 100


def test_repeats_are_the_same_in_one_commit_and_in_many_and_after_a_rollback(store, tmp_path):
    writer = RecordWriter(now=lambda: NOW)
    undone = commit(writer, store, E, E, E, end="ROLLBACK")
    assert commit(writer, store, E, E) + commit(writer, store, E) == undone
    other = Storage(tmp_path / "other", max_bytes=64 * MIB, now=lambda: NOW)
    try:
        assert [commit(writer, other, E) for _ in range(3)] == [[one] for one in undone]
    finally:
        other.close()
