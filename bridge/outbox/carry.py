"""Carrying the outbox off a disk that refuses writes, and back onto it.

What is owed goes into memory as far as there is room; the disk keeps the rest, and an event of which something stayed
behind waits (`held`), so that none of its records overtakes another. On the way back the triggers of the disk count
what changed, as if it had been written there; only rows that came and went in memory alone are added to the totals.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from bridge.events.diff import is_over
from bridge.events.event import decode_document, encode
from bridge.events.record import decode_record
from bridge.outbox.database import used_bytes
from bridge.outbox.recovery import (
    COUNTS,
    Row,
    Statements,
    is_sound_meta,
    keep_sequence_ahead,
    paste,
    read_totals,
    rows_until_failure,
    set_totals,
    settle_totals,
)

#: Of so many records memory knows the ids, so that a change seen again gets its repeat.
_RECENT_IDS = 2_000
_SEQUENCE, _ID, _BODY = 0, 1, 6


def carry_owed(source: sqlite3.Connection, target: sqlite3.Connection, limit_bytes: int, sql: Statements) -> None:
    """Copy into *target*, at most *limit_bytes* large, what *source* owes, and enough besides to go on from.

    Records that wait for their sinks go first, then the urgent, then the oldest. The last record of each active event
    comes along, for sinks that are new.
    """
    meta = {key: value for key, value in rows_until_failure(source, sql["get_meta"]) if is_sound_meta(key, value)}
    for row in meta.items():
        target.execute(sql["put_meta"], row)
    for sequence, event_key in list(rows_until_failure(source, sql["owed_in_order"])):
        if used_bytes(target) > limit_bytes:
            target.execute(sql["hold_event"], (event_key,))
            continue
        for row in rows_until_failure(source, sql["copy_record"], (sequence,)):
            paste(target, sql["paste_record"], row)
        for row in rows_until_failure(source, sql["copy_deliveries_of"], (sequence,)):
            paste(target, sql["paste_delivery"], row)
    events = decode_document(meta["document"]).events if "document" in meta else ()
    for key in dict.fromkeys(event.key for event in events if not is_over(event)):
        for row in rows_until_failure(source, sql["copy_last_of_event"], (key,)):
            paste(target, sql["paste_record"], row)
    for row in rows_until_failure(source, sql["copy_recent_ids"], (_RECENT_IDS,)):
        paste(target, sql["paste_record"], row)
    for name, *counts in rows_until_failure(source, sql["copy_sinks"]):
        set_totals(target, name, counts, sql)


def bring_back(
    memory: sqlite3.Connection, disk: sqlite3.Connection, sql: Statements, *, disk_is_new: bool, is_blind: bool
) -> None:
    """Write onto *disk*, inside its transaction, what happened in *memory*; raise sqlite3.Error.

    *disk_is_new*: the old file is gone, so memory may know more of the totals. *is_blind*: memory began without
    knowing where the disk's stream stood.
    """
    if is_blind and disk.execute(sql["last_record"]).fetchone()[0] is not None:
        _append(memory, disk, sql)
    else:
        _merge_back(memory, disk, sql, disk_is_new=disk_is_new)
    keep_sequence_ahead(disk, sql)
    disk.execute(sql["align_urgency"])
    for row in memory.execute(sql["copy_begun"]):
        disk.execute(sql["add_begun"], row)


def _merge_back(memory: sqlite3.Connection, disk: sqlite3.Connection, sql: Statements, *, disk_is_new: bool) -> None:
    for row in memory.execute(sql["get_meta"]):
        disk.execute(sql["put_meta"], row)
    for row in memory.execute(sql["copy_records"]):
        if row[_BODY]:
            _put_record(disk, row, sql)
    for row in memory.execute(sql["copy_deliveries"]):
        disk.execute(sql["paste_delivery"], row)
    _add_gone(memory, disk, sql)
    if disk_is_new:
        totals = read_totals(disk, sql)
        for name, counts in read_totals(memory, sql).items():
            totals[name] = tuple(max(pair) for pair in zip(counts, totals.get(name, counts), strict=True))
        settle_totals(disk, totals, sql)


def _append(memory: sqlite3.Connection, disk: sqlite3.Connection, sql: Statements) -> None:
    """Write onto *disk* what was seen in *memory* while the disk could not even be read.

    Memory had to begin a stream of its own, so its records go on at the end of the disk's. Those that the disk has
    already, under the same id, are the same changes seen again.
    """
    keep_sequence_ahead(disk, sql)
    meta = {**dict(memory.execute(sql["get_meta"])), **dict(disk.execute(sql["get_meta"]))}
    stream_id, following = meta["stream_id"], int(meta["next_sequence"])
    moved: dict[int, int] = {}
    for row in memory.execute(sql["copy_records"]):
        if row[_BODY] and not disk.execute(sql["has_id"], (row[_ID], 0)).fetchone():
            moved[row[_SEQUENCE]] = following
            disk.execute(sql["paste_record"], _moved(row, stream_id, following))
            following += 1
    for row in memory.execute(sql["copy_deliveries"]):
        if row[1] in moved:
            disk.execute(sql["paste_delivery"], (row[0], moved[row[1]], *row[2:]))
    of_the_stream = {key: meta[key] for key in ("stream_id", "created_at")}
    for row in {**dict(memory.execute(sql["get_meta"])), **of_the_stream, "next_sequence": str(following)}.items():
        disk.execute(sql["put_meta"], row)
    _add_gone(memory, disk, sql)


def _moved(row: Row, stream_id: str, sequence: int) -> Row:
    record = msgspec.structs.replace(decode_record(row[_BODY]), stream_id=stream_id, sequence=sequence)
    return (sequence, *row[1:_BODY], encode(record).decode())


def _put_record(disk: sqlite3.Connection, row: Row, sql: Statements) -> None:
    """Write one record; an id that only the disk remembered may not keep it out."""
    disk.execute(sql["paste_record"], row)
    if disk.execute(sql["has_id"], (row[_ID], row[_SEQUENCE])).fetchone():
        row = (row[_SEQUENCE], f"{row[_ID]}/{row[_SEQUENCE]}", *row[2:])
        disk.execute(sql["paste_record"], row)
    disk.execute(sql["rewrite_record"], (*row[1:], row[_SEQUENCE]))


def _add_gone(memory: sqlite3.Connection, disk: sqlite3.Connection, sql: Statements) -> None:
    gone: dict[str, dict[str, int]] = {}
    for sink, state, count in memory.execute(sql["gone"]):
        gone.setdefault(sink, {})[state] = count
    totals = read_totals(disk, sql)
    for sink, states in gone.items():
        counts: list[Any] = list(totals.get(sink, (0,) * len(COUNTS)))
        for state, count in states.items():
            counts[COUNTS.index(state)] += count
            counts[0] += count
        set_totals(disk, sink, counts, sql)
