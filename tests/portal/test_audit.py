"""The audit: an append-only hash chain that detects the first changed entry."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import msgspec
import pytest
from portal_databases import audit_fault, of_file
from sqlalchemy.exc import DBAPIError

from bridge.portal.audit import NO_HASH, Entry, chained
from bridge.portal.store.audit import add_entries, count, entries, entry_with_hash

AT = "2026-11-20T11:00:30.000Z"


def new(number=0):
    details = {"number": number, "text": "a \u2603 b\n", "part": 0.1, "list": [None, True]}
    return Entry(actor="ada", action="approved", subject="e", details=details)


def tampered(store, statement):
    """Run *statement* as the owner of the database, without the triggers."""

    def work(connection):
        where = " ON audit" if connection.dialect.name == "postgresql" else ""
        for what in ("update", "delete"):
            connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS audit_no_{what}{where}")
        connection.exec_driver_sql(statement)

    store.write(work)


@pytest.fixture
def ten(store):
    for number in range(10):
        store.write(add_entries, [new(number)], at=AT)
    return store


def test_unchanged_chain_is_valid(ten):
    assert audit_fault(ten) is None
    found = ten.read(entries, after=0)
    assert [entry.entry for entry in found] == list(range(1, 11))
    assert found[0].previous_hash == NO_HASH
    assert all(late.previous_hash == early.hash for early, late in pairwise(found))


@pytest.mark.parametrize(
    ("statement", "entry", "why"),
    [
        ("UPDATE audit SET details = '{}' WHERE entry = 4", 4, "changed"),
        ("UPDATE audit SET details = 'nothing' WHERE entry = 4", 4, "changed"),
        ("UPDATE audit SET actor = 'eve' WHERE entry = 4", 4, "changed"),
        ("UPDATE audit SET action = 'held' WHERE entry = 1", 1, "changed"),
        ("UPDATE audit SET subject = '' WHERE entry = 10", 10, "changed"),
        ("UPDATE audit SET at = '2026-11-20T11:00:31.000Z' WHERE entry = 4", 4, "changed"),
        (f"UPDATE audit SET hash = '{NO_HASH}' WHERE entry = 4", 4, "changed"),
        (f"UPDATE audit SET previous_hash = '{NO_HASH}' WHERE entry = 4", 4, "the previous entry"),
        ("DELETE FROM audit WHERE entry = 4", 4, "missing"),
        ("DELETE FROM audit WHERE entry = 1", 1, "missing"),
        ("DELETE FROM audit WHERE entry > 7", 8, "missing"),
        ("DELETE FROM audit", 1, "missing"),
    ],
)
def test_first_changed_entry_is_named(ten, statement, entry, why):
    tampered(ten, statement)
    found = audit_fault(ten)
    assert found.entry == entry
    assert why in found.why


def test_rewritten_entry_with_a_valid_hash_invalidates_the_next_entry(ten):
    fourth = ten.read(entries, after=3, limit=1)[0]
    third = ten.read(entries, after=2, limit=1)[0]
    forged = chained(
        Entry(actor="eve", action="approved", subject="e", details={}),
        entry=4,
        at=fourth.at,
        previous_hash=third.hash,
    )
    tampered(ten, f"UPDATE audit SET actor = 'eve', details = '{{}}', hash = '{forged.hash}' WHERE entry = 4")
    found = audit_fault(ten)
    assert (found.entry, found.why) == (5, "it does not contain the hash of the previous entry")


@pytest.mark.parametrize("statement", ["UPDATE audit SET actor = 'eve'", "DELETE FROM audit"])
def test_database_prevents_changes_of_an_entry(ten, statement):
    with ten.engine.connect() as connection, pytest.raises(DBAPIError, match="cannot be changed or deleted"):
        connection.exec_driver_sql(statement)
    assert audit_fault(ten) is None


@pytest.mark.parametrize("columns", ["entry", "rowid, entry"])
def test_sqlite_prevents_the_replacement_of_an_entry(tmp_path, columns):
    with of_file(tmp_path) as database:
        store = database.store()
        store.write(add_entries, [new()], at=AT)
        values = "1" if columns == "entry" else "1, 7"
        others = "at, actor, action, subject, details, previous_hash, hash"
        statement = (
            f"INSERT OR REPLACE INTO audit ({columns}, {others}) VALUES ({values}, '', 'eve', '', '', '', '', '')"
        )
        with store.engine.connect() as connection, pytest.raises(DBAPIError, match="cannot be changed or deleted"):
            connection.exec_driver_sql(statement)
        assert audit_fault(store) is None


def test_truncated_chain_is_detected_with_a_stored_hash(ten):
    seventh = ten.read(entries, after=6, limit=1)[0]
    assert ten.read(entry_with_hash, seventh.hash) == 7
    tampered(ten, "DELETE FROM audit WHERE entry > 6")
    tampered(ten, "UPDATE counters SET value = 6 WHERE name = 'audit'")
    assert audit_fault(ten) is None
    assert ten.read(entry_with_hash, seventh.hash) is None


def test_concurrent_writers_create_one_chain(database):
    stores = [database.store() for _ in range(2)]

    def add(store):
        for number in range(30):
            store.write(add_entries, [new(number), new(number)], at=AT)

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(add, stores))
    assert stores[0].read(count) == 120
    assert audit_fault(stores[1]) is None


def test_hash_can_be_computed_from_an_export(ten):
    for line in (msgspec.json.encode(entry) for entry in ten.read(entries, after=0)):
        shown = json.loads(line)
        names = ("entry", "at", "actor", "action", "subject", "details", "previous_hash")
        text = json.dumps([shown[name] for name in names], sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == shown["hash"]
