"""Carrying the outbox from one database to another, as much as can be read.

Three ways, because three things are wanted: all that is readable out of a damaged file; what is owed out of a disk
that refuses writes, as far as memory allows; and back from memory onto that disk.

The totals are set at the end of each, since the copying itself runs through the triggers that count.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

_RECENT_IDS = 10_000
_COUNTS = ("accepted", "delivered", "pending", "parked", "expired", "evicted", "discarded")
_PENDING, _PARKED = _COUNTS.index("pending"), _COUNTS.index("parked")

Row = tuple[Any, ...]
Statements = Mapping[str, str]


def carry_all(source: sqlite3.Connection, target: sqlite3.Connection, sql: Statements) -> None:
    """Copy every row of *source* that can be read; what is unreadable in the middle is read from both ends."""
    totals: dict[str, Row] = {row[0]: row[1:] for row in target.execute(sql["totals"])}
    target.execute("BEGIN IMMEDIATE")
    for key, value in _readable(source, sql["get_meta"]):
        target.execute(sql["put_meta"], (key, value))
    for row in _both_ends(source, sql["copy_records"], sql["copy_records_backwards"]):
        target.execute(sql["paste_record"], row)
    for row in _both_ends(source, sql["copy_deliveries"], sql["copy_deliveries_backwards"]):
        target.execute(sql["paste_delivery"], row)
    for row in _readable(source, sql["totals"]):
        totals[row[0]] = tuple(max(pair) for pair in zip(row[1:], totals.get(row[0], row[1:]), strict=True))
    # A delivery without its record has nothing to send.
    target.execute(sql["discard_orphans"])
    target.execute(sql["drop_orphans"])
    _keep_sequence_ahead(target, sql)
    _settle_totals(target, totals, sql)
    target.execute("COMMIT")


def carry_owed(source: sqlite3.Connection, target: sqlite3.Connection, limit_bytes: int, sql: Statements) -> None:
    """Copy what *source* owes, at most *limit_bytes* of it, and enough besides to go on from.

    Events of which not everything fits are held: their later records wait, so that none goes out before an older one.
    """
    target.execute("BEGIN IMMEDIATE")
    for key, value in _readable(source, sql["get_meta"]):
        target.execute(sql["put_meta"], (key, value))
    used = 0
    for row in _readable(source, sql["copy_owed_records"]):
        used += len(row[6])
        if used > limit_bytes:
            target.execute(sql["hold_event"], (row[3],))
            continue
        target.execute(sql["paste_record"], row)
        for delivery in source.execute(sql["copy_deliveries_of"], (row[0],)):
            target.execute(sql["paste_delivery"], delivery)
    for row in _readable(source, sql["copy_recent_ids"], (_RECENT_IDS,)):
        target.execute(sql["paste_record"], row)
    for row in _readable(source, sql["totals"]):
        target.execute(sql["set_totals"], dict(zip(("name", *_COUNTS), row, strict=True)))
    target.execute("COMMIT")


def merge_back(
    memory: sqlite3.Connection, disk: sqlite3.Connection, totals_on_leaving: Mapping[str, Row], sql: Statements
) -> None:
    """Write onto *disk* what happened in *memory*, in one transaction; raise sqlite3.Error and change nothing."""
    totals: dict[str, Row] = {row[0]: row[1:] for row in disk.execute(sql["totals"])}
    zero = (0,) * len(_COUNTS)
    disk.execute("BEGIN IMMEDIATE")
    try:
        for key, value in memory.execute(sql["get_meta"]):
            disk.execute(sql["put_meta"], (key, value))
        for row in memory.execute(sql["copy_records"]):
            if row[6]:
                disk.execute(sql["paste_record"], row)
                disk.execute(sql["rewrite_record"], row)
        for row in memory.execute(sql["copy_deliveries"]):
            disk.execute(sql["paste_delivery"], row)
        for name, *now in memory.execute(sql["totals"]):
            before, on_disk = totals_on_leaving.get(name, zero), totals.get(name, zero)
            totals[name] = tuple(d + n - b for d, n, b in zip(on_disk, now, before, strict=True))
        _set_totals(disk, totals, sql)
        disk.execute("COMMIT")
    except BaseException:
        disk.execute("ROLLBACK")
        raise


def _readable(source: sqlite3.Connection, statement: str, arguments: Row = ()) -> Iterator[Row]:
    """Yield rows until the first that cannot be read."""
    try:
        yield from source.execute(statement, arguments)
    except sqlite3.Error:
        return


def _both_ends(source: sqlite3.Connection, forwards: str, backwards: str) -> Iterator[Row]:
    try:
        yield from source.execute(forwards)
    except sqlite3.Error:
        yield from _readable(source, backwards)


def _keep_sequence_ahead(target: sqlite3.Connection, sql: Statements) -> None:
    meta = dict(target.execute(sql["get_meta"]))
    last = max((row[0] for row in target.execute(sql["copy_records_backwards"])), default=0)
    following = max(int(meta.get("next_sequence", "1")), last + 1)
    target.execute(sql["put_meta"], ("next_sequence", str(following)))


def _settle_totals(target: sqlite3.Connection, totals: dict[str, Row], sql: Statements) -> None:
    """Set *totals* with pending and parked as they really are, so that the sum holds whatever was lost."""
    owed = {row[0]: row[1:] for row in target.execute(sql["count_owed"])}
    counted = {row[0]: row[1:] for row in target.execute(sql["totals"])}
    for name, now in counted.items():
        row = list(totals.get(name, now))
        row[_PENDING], row[_PARKED] = owed.get(name, (0, 0))
        row[0] = sum(row[1:])
        totals[name] = tuple(row)
    _set_totals(target, totals, sql)


def _set_totals(target: sqlite3.Connection, totals: Mapping[str, Row], sql: Statements) -> None:
    for name, row in totals.items():
        target.execute(sql["set_totals"], dict(zip(("name", *_COUNTS), (name, *row), strict=True)))
