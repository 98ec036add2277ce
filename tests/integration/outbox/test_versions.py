"""The version before opens our database and we open its: the tables, their text and the words in them stay."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from outbox_kit import OutboxKit

from bridge.events.event import VmIdentity
from bridge.outbox import approvals, deliveries, meta
from bridge.outbox.reader import OutboxFile

BEFORE = Path(__file__).parent / "version_before.sql"
SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY type, name"


@pytest.fixture
def before(tmp_path):
    """Return the directory of an outbox that the version before wrote."""
    directory = tmp_path / "before"
    directory.mkdir()
    with closing(sqlite3.connect(directory / "outbox.db")) as connection:
        connection.executescript("PRAGMA journal_mode = WAL;")
        connection.executescript(BEFORE.read_text(encoding="utf-8"))
    return directory


def shape(path):
    """Return all that another version reads a database by."""
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        keys = [key for (key,) in connection.execute("SELECT key FROM meta ORDER BY key")]
        return version, connection.execute(SCHEMA).fetchall(), keys


def test_what_the_version_before_left_is_delivered(before):
    kit = OutboxKit(before)
    outbox = kit.open()
    assert not outbox.in_memory
    assert (kit.due(outbox, "a"), kit.due(outbox, "b")) == ([4, 5], [2, 1, 3, 4, 5])
    assert [row.record.transition.value for row in outbox.read(deliveries.due, "a", limit=9).result()] == [
        "started",
        "heartbeat",
    ]
    kit.settle(outbox, "a", 4, 5)
    assert kit.totals(outbox)["a"] == {
        "accepted": 5,
        "delivered": 4,
        "pending": 0,
        "parked": 1,
        "expired": 0,
        "evicted": 0,
        "discarded": 0,
    }
    (again,) = kit.commit(outbox, kit.event("E-4"))
    assert again.sequence == 6
    kit.close()
    assert list(before.glob("outbox.db.*-*")) == []


def test_what_the_version_before_knew_is_known(before):
    kit = OutboxKit(before)
    outbox = kit.open()
    saved = outbox.read(meta.load).result()
    assert (saved.vm.name, saved.boot_id) == ("vm_0", "boot-1")
    assert [event.event_id for event in saved.document.events] == ["E-1"]
    assert outbox.identify(VmIdentity(name="vm_0", vm_id=saved.vm.vm_id)).result() is False
    assert outbox.write(deliveries.mark_started, "b", "E-2", now=0.0).result().is_new is False
    state = outbox.read(approvals.read_state).result()
    assert [decision.decision_id for decision in state.decisions] == ["D-1", "D-2"]
    assert outbox.read(approvals.is_known, approver="anne", decision_id="D-1", payload_sha256="D-1").result()
    kit.close()
    with OutboxFile(before) as commands:
        assert commands.retry("a") == 1


ADDED = {"decision_tokens", "decision_tokens_gone"}
"""What additions.sql makes beside the tables of the version before, which passes over it."""


def test_a_database_of_today_has_the_shape_of_the_one_before_and_what_was_added(before, kit):
    outbox = kit.open()
    outbox.identify(VmIdentity(name="vm_0", vm_id="1")).result()
    kit.commit(outbox, kit.event())
    kit.close()
    version, objects, keys = shape(kit.directory / "outbox.db")
    keys.remove("awaits_portal")
    assert {name for _, name, _, _ in objects if name in ADDED} == ADDED
    assert (version, [each for each in objects if each[1] not in ADDED], keys) == shape(before / "outbox.db")


def test_a_database_of_the_version_before_gets_what_was_added_and_keeps_the_rest(before):
    version, objects, keys = shape(before / "outbox.db")
    kit = OutboxKit(before)
    kit.open()
    kit.close()
    now_version, now_objects, now_keys = shape(before / "outbox.db")
    assert {each[1] for each in now_objects} - {each[1] for each in objects} == ADDED
    assert (version, objects, keys) == (now_version, [each for each in now_objects if each[1] not in ADDED], now_keys)


def test_commands_read_a_database_of_the_version_before_without_writing_to_it(before):
    found = shape(before / "outbox.db")
    with OutboxFile(before) as commands:
        assert [decision.decision_id for decision in commands.snapshot().decisions] == ["D-1", "D-2"]
    assert shape(before / "outbox.db") == found
