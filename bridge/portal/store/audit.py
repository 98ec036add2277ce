"""Stores and reads audit entries. A lock serializes the writers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import msgspec
from sqlalchemy import Connection, Row, insert, select, update

from bridge.events.event import compact_json
from bridge.portal.audit import NO_HASH, Entry, NewEntry, chained
from bridge.portal.schema import audit, counters

PAGE = 1_000
_COUNTER = "audit"


def add_entries(connection: Connection, new: Sequence[NewEntry], *, at: str) -> None:
    """Add *new* to the chain. Lock the chain until the commit."""
    if not new:
        return
    last = next_values(connection, _COUNTER, len(new))
    number = last - len(new)
    before = connection.execute(select(audit.c.hash).where(audit.c.entry == number)).scalar_one_or_none()
    previous_hash = before or NO_HASH
    rows = []
    for each in new:
        number += 1
        entry = chained(each, entry=number, at=at, previous_hash=previous_hash)
        previous_hash = entry.hash
        rows.append({**msgspec.structs.asdict(entry), "details": compact_json(entry.details)})
    connection.execute(insert(audit), rows)


def entries(connection: Connection, *, after: int, limit: int = PAGE) -> list[Entry]:
    """Return at most *limit* entries after the entry with the number *after*."""
    query = select(audit).where(audit.c.entry > after).order_by(audit.c.entry).limit(limit)
    return [_entry(row) for row in connection.execute(query)]


def all_entries(connection: Connection) -> Iterator[Entry]:
    """Yield every entry in order. Load one page at a time."""
    page = entries(connection, after=0)
    while page:
        yield from page
        page = entries(connection, after=page[-1].entry)


def entry_with_hash(connection: Connection, wanted: str) -> int | None:
    """Return the number of the entry with the hash *wanted*, or None."""
    return connection.execute(select(audit.c.entry).where(audit.c.hash == wanted)).scalar()


def count(connection: Connection) -> int:
    """Return the number of entries that were ever written."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == _COUNTER)).scalar_one())


def next_values(connection: Connection, name: str, how_many: int = 1) -> int:
    """Increase the counter *name* by *how_many*, and return the new value.

    The counter stays locked until the transaction commits, so its values are committed in ascending order.
    """
    taken = update(counters).where(counters.c.name == name).values(value=counters.c.value + how_many)
    return int(connection.execute(taken.returning(counters.c.value)).scalar_one())


def _entry(row: Row[tuple[object, ...]]) -> Entry:
    values = row._asdict()
    return Entry(**{str(name): value for name, value in values.items()} | {"details": _details(values["details"])})


def _details(text: str) -> object:
    try:
        found = json.loads(text)  # keeps numbers with many digits exact
    except ValueError:
        found = None
    # If someone has changed the text to invalid JSON, show the text. The hash of the entry is then wrong.
    return found if isinstance(found, dict) else {"": text}
