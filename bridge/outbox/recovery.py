"""Saving what can be read out of a damaged database.

Damage is rarely whole: a page is gone, and the rest reads well. So rows are asked for by ranges of their sequence, and
what a range did not give one by one. A row is taken only when it makes sense: a page of garbage can read as text. What
is owed stands in the table and, once more, in the index that workers read; either will do.

The copying runs through the triggers that count, so the totals are set at the end, from the damaged file's own where
they can be read. What was owed and could not be saved is counted as evicted, never forgotten.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from bridge.clock import parse_time
from bridge.events.event import VmIdentity, decode_document
from bridge.events.record import decode_record

_RANGE = 512
#: A file whose tree is gone fails for every range; the search ends before it takes hours.
_MOST_FAILURES = 20_000
#: What a sink's totals hold, in the order of `copy_sinks`, and where the two that can be counted stand.
COUNTS = ("accepted", "delivered", "pending", "parked", "expired", "evicted", "discarded", "nudges")
_ACCEPTED, _PENDING, _PARKED, _EVICTED, _NUDGES = (
    COUNTS.index(name) for name in ("accepted", "pending", "parked", "evicted", "nudges")
)

Row = tuple[Any, ...]
Statements = Mapping[str, str]


def carry_all(source: sqlite3.Connection, target: sqlite3.Connection, sql: Statements) -> None:
    """Copy all of *source* that can be read into *target*, inside its transaction; raise what *target* raises.

    What *target* has already stays, but for an owed row that *source* knows to be finished.
    """
    source.text_factory = _text_or_bytes
    totals = read_totals(target, sql)
    known = dict(target.execute(sql["get_meta"]))
    for key, value in rows_until_failure(source, sql["get_meta"]):
        if key not in known and is_sound_meta(key, value):
            target.execute(sql["put_meta"], (key, value))
    last = _last_sequence(source, target, sql)
    first = _first_sequence(source, last, sql)
    for row in _by_ranges(source, sql["copy_record_range"], (), first, last):
        if _is_sound_record(row):
            paste(target, sql["paste_record"], row)
    for sink in _sink_names(source, sql):
        for row in _by_ranges(source, sql["copy_delivery_range"], (sink,), first, last):
            paste(target, sql["paste_delivery"], row)
    for copy, put in (("copy_due_rows", "paste_due_row"), ("copy_begun", "add_begun")):
        for row in rows_until_failure(source, sql[copy]):
            paste(target, sql[put], row)
    totals.update(_sound_totals(source, totals, sql))
    target.execute(sql["evict_orphans"])
    target.execute(sql["drop_orphans"])
    keep_sequence_ahead(target, sql)
    settle_totals(target, totals, sql)


def _sound_totals(source: sqlite3.Connection, known: Mapping[str, Row], sql: Statements) -> dict[str, Row]:
    """Return what *source* says of the sinks' totals, never less than is *known*."""
    found: dict[str, Row] = {}
    for name, *counts in rows_until_failure(source, sql["copy_sinks"]):
        if isinstance(name, str) and all(isinstance(count, int) for count in counts):
            before = known.get(name, (0,) * len(COUNTS))
            found[name] = tuple(max(pair) for pair in zip(counts, before, strict=True))
    return found


def read_totals(connection: sqlite3.Connection, sql: Statements) -> dict[str, Row]:
    """Return sink -> its totals as COUNTS names them."""
    return {row[0]: tuple(row[1:]) for row in connection.execute(sql["copy_sinks"])}


def settle_totals(target: sqlite3.Connection, totals: Mapping[str, Row], sql: Statements) -> None:
    """Set *totals* with pending and parked as they really are, and what is missing then as evicted."""
    owed = {row[0]: row[1:] for row in target.execute(sql["count_owed"])}
    for name, counted in {**read_totals(target, sql), **totals}.items():
        counts = list(counted)
        counts[_PENDING], counts[_PARKED] = owed.get(name, (0, 0))
        missing = counts[_ACCEPTED] - sum(counts[_ACCEPTED + 1 : _NUDGES])
        counts[_EVICTED] += max(missing, 0)
        counts[_ACCEPTED] -= min(missing, 0)
        set_totals(target, name, counts, sql)


def set_totals(target: sqlite3.Connection, name: str, counts: Row | list[Any], sql: Statements) -> None:
    """Set the totals of the sink called *name*."""
    target.execute(sql["set_totals"], dict(zip(("name", *COUNTS), (name, *counts), strict=True)))


def rows_until_failure(source: sqlite3.Connection, statement: str, arguments: Row = ()) -> Iterator[Row]:
    """Yield rows until the first that cannot be read."""
    try:
        cursor = source.execute(statement, arguments)
        while (row := cursor.fetchone()) is not None:
            yield row
    except sqlite3.Error:
        return


def _by_ranges(source: sqlite3.Connection, statement: str, fixed: Row, first: int, last: int) -> Iterator[Row]:
    """Yield the readable rows with a sequence from *first* to *last*; what a range lacks is asked for one by one.

    A range may end early without an error: garbage that reads as a greater sequence ends it too.
    """
    failures = 0
    for low in range(first, last + 1, _RANGE):
        missing = set(range(low, min(low + _RANGE, last + 1)))
        for row in rows_until_failure(source, statement, (*fixed, low, max(missing))):
            sequence = row[0] if not fixed else row[1]
            if sequence in missing:
                missing.discard(sequence)
                yield row
        for sequence in sorted(missing):
            if failures > _MOST_FAILURES:
                return
            try:
                yield from source.execute(statement, (*fixed, sequence, sequence)).fetchall()
            except sqlite3.Error:
                failures += 1


def _first_sequence(source: sqlite3.Connection, last: int, sql: Statements) -> int:
    found = next(rows_until_failure(source, sql["first_record"]), (None,))[0]
    return found if isinstance(found, int) and 0 < found <= last else 1


def _last_sequence(source: sqlite3.Connection, target: sqlite3.Connection, sql: Statements) -> int:
    meta = dict(target.execute(sql["get_meta"]))
    candidates = [int(meta.get("next_sequence", "1")) - 1]
    for statement in ("last_record", "last_delivery"):
        candidates += [row[0] for row in rows_until_failure(source, sql[statement]) if isinstance(row[0], int)]
    return max(candidates)


def _sink_names(source: sqlite3.Connection, sql: Statements) -> list[str]:
    names: set[str] = set()
    for statement in ("copy_sinks", "sinks_of_deliveries", "sinks_of_due_rows"):
        names.update(row[0] for row in rows_until_failure(source, sql[statement]) if isinstance(row[0], str))
    return sorted(names)


def paste(target: sqlite3.Connection, statement: str, row: Row) -> None:
    """Insert *row* if it makes sense."""
    if any(isinstance(value, bytes) for value in row):
        return
    with suppress(sqlite3.IntegrityError):  # the row makes no sense: the database has refused it
        target.execute(statement, row)


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _is_sound_record(row: Row) -> bool:
    sequence, body = row[0], row[6]
    try:
        return bool(body == "" or decode_record(body).sequence == sequence)
    except (msgspec.MsgspecError, TypeError, UnicodeError):
        return False


def is_sound_meta(key: str | bytes, value: str | bytes) -> bool:
    """Return whether *value* is what is stored under *key*."""
    if isinstance(key, bytes) or isinstance(value, bytes):
        return False
    try:
        if key == "document":
            decode_document(value)
        elif key == "vm":
            msgspec.json.decode(value, type=VmIdentity)
        elif key in ("last_good_at", "created_at"):
            parse_time(value)
        elif key == "next_sequence":
            return int(value) > 0
    except (ValueError, msgspec.MsgspecError):
        return False
    return True


def keep_sequence_ahead(target: sqlite3.Connection, sql: Statements) -> None:
    """Make sure that no sequence in *target* is given out again."""
    meta = dict(target.execute(sql["get_meta"]))
    last = max(row[0] or 0 for name in ("last_record", "last_delivery") for row in target.execute(sql[name]))
    following = max(int(meta.get("next_sequence", "1")), last + 1)
    target.execute(sql["put_meta"], ("next_sequence", str(following)))
