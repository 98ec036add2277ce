"""What is done about a damaged database: `FileGuard` notices it, `copy_readable` saves the rows that still read.

SQLite does not notice when its file is deleted, replaced or written over: it goes on with what it has in memory, and
what it commits is lost when the agent ends. So the agent checks now and then.

The damaged file is set aside and stays. It is read once: from its first row until the damage, and from its last row
back to it; where SQLite does not get to its end, its pages are read too (`leaf_pages`). A row is taken only when it
makes sense, since a page of garbage can read as text. What was pending and could not be saved is counted as evicted,
never forgotten. For more there is `sqlite3 .recover`; see docs/operate/runbook.md.

What people decided is a case of its own (`copy_decisions`): a hold is kept wherever it can be read, an approval that is
still open only when it is sure that no hold is missing beside it.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bridge.clock import parse_time
from bridge.events.event import VmIdentity, decode_document
from bridge.events.record import Verdict, decode_record
from bridge.outbox import meta
from bridge.outbox.approvals import (
    OPEN_DECISIONS,
    OPEN_STAGES,
    ApprovalStage,
    StoredDecision,
    approval_of,
    decision_of,
)
from bridge.outbox.database import SQL, check, is_damage, open_read_only, used_bytes

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
#: A sink's totals, in the order of the statement `copy_sinks`.
COUNTS = ("accepted", "delivered", "pending", "parked", "expired", "evicted", "discarded", "nudges")
Row = tuple[Any, ...]
T = TypeVar("T")


#: Of an inode: a number that is given out again gets another (ext4, xfs, btrfs).
_FS_IOC_GETVERSION = 0x80087601


class FileGuard:
    """Notices that what is at a path is no longer the file that was opened there.

    One descriptor stays open for that. Opening the file and closing it again would drop the POSIX locks that this
    process has on it (sqlite.org, "How To Corrupt An SQLite Database File", 2.2), and the next command that ends beside
    the agent would take the -wal away.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wal = Path(f"{path}-wal")
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0))
        self._file, self._wal_file = _identity(path), _identity(self._wal)
        self._cut: tuple[int, int] | None = None
        self._whole_cut: tuple[int, int] | None = None

    @property
    def file_id(self) -> str | None:
        """Return what tells this file from a copy that was put in its place, also after a boot; None: nothing does."""
        try:
            # Loaded here: no such thing on Windows. Asked of a file that stays open, as above.
            from fcntl import ioctl  # noqa: PLC0415

            generation = ioctl(self._descriptor, _FS_IOC_GETVERSION, bytes(8))
            return f"{os.fstat(self._descriptor).st_ino}-{int.from_bytes(generation[:4], sys.byteorder)}"
        except (ImportError, OSError):  # only file systems of a disk of one's own have a generation
            return None

    def trouble(self) -> str | None:
        """Return what happened to the file, None when nothing did."""
        if _identity(self._path) is None:
            return "the file was deleted"
        if self.is_replaced:
            return "the file, or the -wal beside it, was deleted or replaced"
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        header = os.read(self._descriptor, _HEADER_BYTES)
        if not header.startswith(_MAGIC) or self._is_cut(os.fstat(self._descriptor).st_size, _size_in(header)):
            return "the file was overwritten or cut off"
        return None

    def _is_cut(self, size: int, expected: int) -> bool:
        """Return whether pages are missing at the end of the file, and not in the -wal either.

        Seen twice: another program may be in the middle of a checkpoint, which writes the first page first. A full disk
        can end one there, for as long as it is full; all else is in the -wal then.
        """
        before, self._cut = self._cut, (size, expected) if size < expected else None
        if self._cut is None or self._cut != before or self._cut == self._whole_cut:
            return False
        if _is_whole(self._path):
            self._whole_cut = self._cut
            return False
        return True

    @property
    def is_replaced(self) -> bool:
        """Return whether the path leads to another file or -wal, or to none."""
        return (_identity(self._path), _identity(self._wal)) != (self._file, self._wal_file)

    def close(self) -> None:
        """Close the descriptor; only after every connection to the file is closed."""
        os.close(self._descriptor)


def _is_whole(path: Path) -> bool:
    """Return whether the database at *path*, with its -wal, has all of its pages, as far as can be seen.

    Without a free descriptor nothing can, which is no damage.
    """
    try:
        with closing(open_read_only(path)) as connection:
            check(connection, path)
    except sqlite3.Error as error:
        return not is_damage(error)
    return True


def _size_in(header: bytes) -> int:
    """Return how many bytes the database has, by the *header* of its file (sqlite.org/fileformat.html, 1.3)."""
    page_size = int.from_bytes(header[16:18], "big")
    return int.from_bytes(header[28:32], "big") * (65_536 if page_size == 1 else page_size)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()  # a link in its place is another file, wherever it leads
    except OSError:
        return None
    return found.st_dev, found.st_ino


def copy_readable(
    sources: Sequence[sqlite3.Connection], target: sqlite3.Connection, *, limit_bytes: float = float("inf")
) -> None:
    """Copy what can be read of *sources* into *target*, inside its transaction; raise what *target* raises.

    What *target* has already stays, but for a pending row that a source knows to be finished. No more records are
    copied once *target* uses *limit_bytes*.
    """
    totals: dict[str, Row] = {}
    for source in sources:
        source.text_factory = _text_or_bytes
        known = meta.read_meta(target)
        for key, value in _until_failure(source, "get_meta"):
            if key not in known and _is_sound_meta(key, value):
                meta.put(target, key, value)
        for row in _readable(source, "copy_records", key=1):
            if used_bytes(target) < limit_bytes and _is_sound_record(row):
                _paste(target, "paste_record", row)
        for row in _readable(source, "copy_deliveries", key=2):
            _paste(target, "paste_delivery", row)
        for row in _until_failure(source, "copy_start_marks"):
            _paste(target, "add_start_mark", row)
        for name, *counts in _until_failure(source, "copy_sinks"):
            if isinstance(name, str) and all(isinstance(count, int) for count in counts):
                totals[name] = tuple(map(max, counts, totals.get(name, counts)))
    target.execute(SQL["evict_orphans"])
    target.execute(SQL["drop_orphans"])
    keep_sequence_ahead(target)
    _settle_totals(target, totals)


def copy_decisions(
    sources: Sequence[sqlite3.Connection], target: sqlite3.Connection, *, live: sqlite3.Connection | None = None
) -> bool:
    """Copy decisions and approvals into *target*, inside its transaction; return whether none can be missing.

    That is sure only of *live*, one of *sources*: the connection that the agent had open all along. A file that is read
    anew may have lost its last commits with its -wal. What is finished is copied wherever it can be read, and so is
    every hold; what is still open and would approve is left out when a hold may be missing.
    """
    if live is not None and _is_intact(live):
        _copy_decisions(live, target, lambda _decision: True)
        _copy_approvals(live, target, frozenset(ApprovalStage))
        return True
    for source in sources:
        _copy_decisions(source, target, lambda each: each.state not in OPEN_DECISIONS or each.verdict is Verdict.HOLD)
        _copy_approvals(source, target, frozenset(ApprovalStage) - OPEN_STAGES)
    return False


def copy_holds(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy the holds in force into *target*, inside its transaction, and nothing else that people decided."""
    _copy_decisions(source, target, lambda each: each.state in OPEN_DECISIONS and each.verdict is Verdict.HOLD)


def _is_intact(source: sqlite3.Connection) -> bool:
    """Return whether all of the decisions and approvals in *source* can be read, and make sense."""
    source.text_factory = str
    try:
        tables = [("decisions", "copy_decisions", decision_of), ("approvals", "copy_approvals", approval_of)]
        for table, statement, read in tables:
            if source.execute(f"PRAGMA integrity_check({table})").fetchall() != [("ok",)]:
                return False
            for row in source.execute(SQL[statement]):
                read(row)
    except sqlite3.Error:
        return False
    return True


def _copy_decisions(
    source: sqlite3.Connection, target: sqlite3.Connection, is_wanted: Callable[[StoredDecision], bool]
) -> None:
    source.text_factory = _text_or_bytes
    for row in _readable(source, "copy_decisions", key=1):
        decision = _if_sound(decision_of, row)
        if decision is not None and is_wanted(decision):
            _paste(target, "paste_decision", row[:-1])
    for row in _until_failure(source, "copy_tokens"):
        _paste(target, "paste_token", row)


def _copy_approvals(source: sqlite3.Connection, target: sqlite3.Connection, stages: frozenset[ApprovalStage]) -> None:
    for row in _until_failure(source, "copy_approvals"):
        approval = _if_sound(approval_of, row)
        if approval is not None and approval.state in stages:
            _paste(target, "paste_approval", row)


def _if_sound(read: Callable[[Row], T], row: Row) -> T | None:
    try:
        return read(row)
    except sqlite3.DatabaseError:
        return None


def _until_failure(source: sqlite3.Connection, statement: str) -> Iterator[Row]:
    """Yield rows until the first that cannot be read."""
    try:
        cursor = source.execute(SQL[statement])
        while (row := cursor.fetchone()) is not None:
            yield row
    except sqlite3.Error:
        return


def _readable(source: sqlite3.Connection, statement: str, *, key: int) -> Iterator[Row]:
    """Yield the rows before the damage and, from the last on, those behind it; *key*: how many columns name a row.

    A pass may end at the damage without an error: garbage that reads as a greater sequence ends it too.
    """
    last: Row | None = None
    for row in _until_failure(source, statement):
        last = row[:key]
        yield row
    for row in _until_failure(source, f"{statement}_from_the_last"):
        if row[:key] == last:
            return
        yield row


def _paste(target: sqlite3.Connection, statement: str, row: Row) -> None:
    """Insert *row* if it makes sense."""
    if any(isinstance(value, bytes) for value in row):
        return
    with suppress(sqlite3.IntegrityError):  # the row makes no sense: the database has refused it
        target.execute(SQL[statement], row)


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _is_sound_record(row: Row) -> bool:
    sequence, body = row[0], row[6]
    try:
        return bool(decode_record(body).sequence == sequence)
    except (msgspec.MsgspecError, TypeError, UnicodeError):
        return False


def _is_sound_meta(key: str | bytes, value: str | bytes) -> bool:
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
        elif key == meta.DECISION_CHANGES:
            return int(value) >= 0
        elif key == meta.CREATED_AT_CORRECTED and value:
            parse_time(value)
        elif key == meta.DOUBT and value:
            msgspec.json.decode(value, type=meta.DoubtMark)
    except (ValueError, msgspec.MsgspecError):
        return False
    return True


def keep_sequence_ahead(target: sqlite3.Connection) -> None:
    """Make sure that no sequence in *target* is given out again."""
    last = max(target.execute(SQL[name]).fetchone()[0] or 0 for name in ("last_record", "last_delivery"))
    following = max(int(meta.get(target, "next_sequence") or 1), last + 1)
    meta.put(target, "next_sequence", str(following))


def _settle_totals(target: sqlite3.Connection, totals: Mapping[str, Row]) -> None:
    """Set *totals* with pending and parked as they really are, and what is missing then as evicted."""
    rows = {name: (pending, parked) for name, pending, parked in target.execute(SQL["count_unfinished"])}
    copied = {name: counts for name, *counts in target.execute(SQL["copy_sinks"])}
    for name, found in {**copied, **totals}.items():
        counts = dict(zip(COUNTS, found, strict=True))
        counts["pending"], counts["parked"] = rows.get(name, (0, 0))
        missing = counts["accepted"] - sum(counts[state] for state in COUNTS[1:-1])
        counts["evicted"] += max(missing, 0)
        counts["accepted"] -= min(missing, 0)
        target.execute(SQL["set_totals"], {"name": name, **counts})
