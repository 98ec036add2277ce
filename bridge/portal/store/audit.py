"""Stores and reads audit entries. A lock serializes the writers.

The `audit_events` table lists the events of each entry. Filters and scopes use this table, but it is not part of the
hash chain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, func, insert, or_, select, update

from bridge.events.event import compact_json
from bridge.portal.audit import NO_HASH, Entry, chained
from bridge.portal.schema import audit, audit_events, counters, event_groups
from bridge.portal.user_names import folded_name

PAGE = 1_000
#: The actions of people on events.
DECISIONS = ("approved", "held", "withdrew", "agreed_to_lift", "decided_approve", "decided_hold")
_COUNTER = "audit"


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filters for audit entries. An entry must match every filter that is set."""

    person: str = ""
    """The actor, in any spelling of the name."""
    event_key: str = ""
    since: str = ""
    until: str = ""
    is_decision: bool = False
    """Only `DECISIONS`."""
    scope: tuple[str, ...] = ()
    """Groups of VMs. Every event of an entry must be in one of these groups. An empty scope means all entries."""
    own: tuple[str, str] = ("", "")
    """The name and the key of a person. The scope never excludes this person's own entries."""


def add_entries(connection: Connection, new: Sequence[Entry], *, at: str) -> None:
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
    members = [(row["entry"], key) for row, each in zip(rows, new, strict=True) for key in each.event_keys]
    if members:
        connection.execute(insert(audit_events), [{"entry": entry, "event_key": key} for entry, key in members])


def newest_entries(
    connection: Connection, wanted: AuditFilter, *, limit: int, before: int | None = None
) -> tuple[list[Entry], int]:
    """Return at most *limit* entries of *wanted* with a number below *before*, newest first.

    Also return the number of all entries of *wanted*.
    """
    where = _conditions(connection, wanted)
    total = connection.execute(select(func.count()).select_from(audit).where(*where)).scalar_one()
    if before is not None:
        where.append(audit.c.entry < before)
    query = select(audit).where(*where).order_by(audit.c.entry.desc()).limit(limit)
    return [_entry(row) for row in connection.execute(query)], int(total)


def entries(connection: Connection, wanted: AuditFilter | None = None, *, after: int, limit: int = PAGE) -> list[Entry]:
    """Return at most *limit* entries of *wanted* after the entry *after*, oldest first."""
    where = _conditions(connection, wanted or AuditFilter())
    query = select(audit).where(*where, audit.c.entry > after).order_by(audit.c.entry).limit(limit)
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


def _conditions(connection: Connection, wanted: AuditFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if wanted.person:
        actors = connection.execute(select(audit.c.actor).distinct()).scalars()
        person = folded_name(wanted.person)
        found.append(audit.c.actor.in_([each for each in actors if folded_name(each) == person]))
    if wanted.event_key:
        found.append(
            audit.c.entry.in_(select(audit_events.c.entry).where(audit_events.c.event_key == wanted.event_key))
        )
    if wanted.since:
        found.append(audit.c.at >= wanted.since)
    if wanted.until:
        found.append(audit.c.at < wanted.until)
    if wanted.is_decision:
        found.append(audit.c.action.in_(DECISIONS))
    if wanted.scope:
        in_scope = select(event_groups.c.event_key).where(event_groups.c.name.in_(wanted.scope))
        visible = select(audit_events.c.entry).where(audit_events.c.event_key.in_(in_scope))
        hidden = select(audit_events.c.entry).where(audit_events.c.event_key.not_in(in_scope))
        name, key = wanted.own
        is_own = (audit.c.actor == name) & audit.c.details.contains(f'"person":{compact_json(key)}', autoescape=True)
        found.append(or_(audit.c.entry.in_(visible) & audit.c.entry.not_in(hidden), is_own))
    return found


def _entry(row: Any) -> Entry:
    try:
        details = json.loads(row.details)  # keeps numbers with many digits exact
    except ValueError:
        details = None
    # If someone has changed the text to invalid JSON, show the text. The hash of the entry is then wrong.
    return Entry(**{**row._asdict(), "details": details if isinstance(details, dict) else {"": row.details}})
