"""The rows of the audit: added under a lock, so that the chain has one end, and read page by page."""

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
    """Add *new* to the chain; whoever else adds waits until this transaction is over."""
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
    """Return at most *limit* entries after the one with the number *after*."""
    query = select(audit).where(audit.c.entry > after).order_by(audit.c.entry).limit(limit)
    return [_entry(row) for row in connection.execute(query)]


def all_entries(connection: Connection) -> Iterator[Entry]:
    """Yield every entry in order, a page in memory at a time."""
    page = entries(connection, after=0)
    while page:
        yield from page
        page = entries(connection, after=page[-1].entry)


def count(connection: Connection) -> int:
    """Return how many entries were ever written."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == _COUNTER)).scalar_one())


def next_values(connection: Connection, name: str, how_many: int = 1) -> int:
    """Take the next *how_many* values of the counter *name* and return the last of them.

    The row stays locked until the transaction is over, so a value becomes visible after every lower one.
    """
    taken = update(counters).where(counters.c.name == name).values(value=counters.c.value + how_many)
    return int(connection.execute(taken.returning(counters.c.value)).scalar_one())


def _entry(row: Row[tuple[object, ...]]) -> Entry:
    values = row._asdict()
    return Entry(**{str(name): value for name, value in values.items()} | {"details": _details(values["details"])})


def _details(text: str) -> object:
    try:
        found = json.loads(text)  # as exactly as it was written, also a number of many digits
    except ValueError:
        found = None
    # What was changed to something that nobody wrote is shown as it is, and its hash no longer fits.
    return found if isinstance(found, dict) else {"": text}
