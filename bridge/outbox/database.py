"""Reads and writes the SQLite files of the outbox. No other agent module contains SQL.

Each file ``outbox-N.db`` is one generation of the outbox: a complete copy of the state. The agent writes a new
generation in one transaction, together with a row ``complete``. At startup, the agent reads the newest file that has
this row, so it never uses a generation that a crash left incomplete.

``PRAGMA user_version`` contains the schema version. Each table has columns for its key and for the values that
operators search for with ``sqlite3``. The column ``rest`` contains all other values as JSON.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from bridge.events.record import decode_record
from bridge.outbox.rows import Delivery, EventRow, MetaRow, PendingApproval, RecordRow, SinkRow, StoredDecision
from bridge.outbox.state import Changes

_FILE_NAME = re.compile(r"outbox-([1-9][0-9]{0,17})\.db")
_NOT_REPEATED = ("event_key", "body")  # the file stores these values once, with the record
_SCHEMA_VERSION = 1
HISTORY_STEP = 500  # the most records to delete at once, so that a save stays short
_RESULTS = ("deliveries", "sinks")
_SETTINGS = (
    "page_size = 1024",  # a transition changes a few short rows
    "journal_mode = WAL",
    "synchronous = FULL",  # NORMAL can lose an acknowledged commit on power loss
    "cache_size = -256",  # KiB: the saver reads almost nothing
)

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (key TEXT PRIMARY KEY, ended_at REAL, rest TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE records (sequence INTEGER PRIMARY KEY, id TEXT NOT NULL, event_key TEXT NOT NULL,
  observed_at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE deliveries (sequence INTEGER NOT NULL, sink TEXT NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL,
  error TEXT, rest TEXT NOT NULL, PRIMARY KEY (sequence, sink)) WITHOUT ROWID;
CREATE TABLE sinks (name TEXT PRIMARY KEY, rest TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE decisions (arrival INTEGER PRIMARY KEY, source TEXT NOT NULL, approver TEXT NOT NULL,
  decision_id TEXT NOT NULL, event_id TEXT NOT NULL, verdict TEXT NOT NULL, state TEXT NOT NULL, rest TEXT NOT NULL);
CREATE TABLE approvals (event_id TEXT NOT NULL, event_digest TEXT NOT NULL, state TEXT NOT NULL, rest TEXT NOT NULL,
  PRIMARY KEY (event_id, event_digest)) WITHOUT ROWID;
PRAGMA user_version = 1;
"""


class _Spec:
    """Converts the rows of one table to columns and back."""

    def __init__(self, name: str, row: type[Any], key: tuple[str, ...], *columns: str) -> None:
        # msgspec crashes if two threads use a class for the first time at once, so use the class during the import.
        msgspec.json.Decoder(row)
        self.row, self.key, self.columns = row, key, (*key, *columns)
        self.rest = tuple(field for field in row.__struct_fields__ if field not in (*self.columns, *_NOT_REPEATED))
        self.stored = (*self.columns, *(("rest",) if self.rest else ()))
        marks = ", ".join("?" * len(self.stored))
        self.put = f"INSERT OR REPLACE INTO {name} ({', '.join(self.stored)}) VALUES ({marks})"  # noqa: S608
        self.delete = f"DELETE FROM {name} WHERE {' AND '.join(f'{column} = ?' for column in key)}"  # noqa: S608

    def encode(self, row: Any) -> list[Any]:
        values = [getattr(row, field) for field in self.columns]
        if self.rest:
            values.append(msgspec.json.encode({field: getattr(row, field) for field in self.rest}).decode())
        if isinstance(row, RecordRow):
            values[-1] = row.body.decode()
        return values

    def decode(self, values: Sequence[Any]) -> Any:
        """Return the row with the column *values*. Raises an error if the values are damaged."""
        plain = dict(zip(self.stored, values, strict=True))
        plain |= msgspec.json.decode(plain.pop("rest")) if self.rest else {}
        if self.row is RecordRow:
            if decode_record(plain["body"]).id != plain["id"]:
                raise ValueError(plain["id"])
            plain["body"] = plain["body"].encode()
        return msgspec.convert(plain, self.row)


_SPECS = {
    "meta": _Spec("meta", MetaRow, ("key",), "value"),
    "events": _Spec("events", EventRow, ("key",), "ended_at"),
    "deliveries": _Spec("deliveries", Delivery, ("sequence", "sink"), "state", "attempts", "error"),
    "records": _Spec("records", RecordRow, ("sequence",), "id", "event_key", "observed_at", "body"),
    "sinks": _Spec("sinks", SinkRow, ("name",)),
    "decisions": _Spec(
        "decisions", StoredDecision, ("arrival",), "source", "approver", "decision_id", "event_id", "verdict", "state"
    ),
    "approvals": _Spec("approvals", PendingApproval, ("event_id", "event_digest"), "state"),
}


Fingerprint = tuple[tuple[int, ...] | None, tuple[int, ...] | None]
"""The device, inode, size, mtime, and ctime of the file and of its WAL. A missing file is None."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that the agent loads from a file at startup."""

    rows: dict[str, list[Any]] = {}
    file: Path | None = None
    fingerprint: Fingerprint = (None, None)
    missing: dict[str, int | None] = {}
    """The number of unreadable rows of each damaged table. An unknown number is None."""
    unreadable: tuple[Path, ...] = ()
    """The newer files that the agent could not read."""

    @property
    def is_damaged(self) -> bool:
        """Return whether some rows or files were unreadable."""
        return bool(self.missing or self.unreadable)


def generations(directory: Path) -> dict[int, Path]:
    """Return the outbox files in *directory* by generation, newest first. Raises OSError."""
    try:
        found = {int(match[1]): path for path in directory.iterdir() if (match := _FILE_NAME.fullmatch(path.name))}
    except FileNotFoundError:
        return {}
    return dict(sorted(found.items(), reverse=True))


def is_damage(error: Exception) -> bool:
    """Return whether *error* reports a damaged file."""
    return isinstance(error, sqlite3.Error) and ("malformed" in str(error) or "not a database" in str(error))


def is_full(error: Exception) -> bool:
    """Return whether *error* reports a full disk."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, sqlite3.Error) and "is full" in str(error)  # Python 3.10 has no error codes


def is_read_only(error: Exception) -> bool:
    """Return whether *error* reports a read-only file."""
    return isinstance(error, sqlite3.Error) and "readonly" in str(error)


def read_newest(directory: Path) -> Loaded:
    """Return the rows of the newest file that is complete and undamaged.

    Raises OSError or sqlite3.Error if a file cannot be read.
    """
    unreadable: list[Path] = []
    for path in generations(directory).values():
        try:
            loaded = read_file(path)
        except Exception as error:  # damaged rows can cause any error
            if isinstance(error, (OSError, sqlite3.Error)) and not is_damage(error):
                raise
            unreadable.append(path)
        else:
            if loaded is not None:
                return msgspec.structs.replace(loaded, unreadable=tuple(unreadable))
    return Loaded(unreadable=tuple(unreadable))


def read_file(path: Path) -> Loaded | None:
    """Return all rows except history, or None if the file is incomplete."""
    found = fingerprint(path)
    with closing(connect_read_only(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        is_known = version == _SCHEMA_VERSION
        if not (is_known and connection.execute("SELECT 1 FROM meta WHERE key = 'complete'").fetchone()):
            return None
        missing: dict[str, int | None] = {}
        whole = [name for name in _SPECS if name not in ("deliveries", "records")]
        rows = {name: _read_table(connection, name, missing) for name in whole}
        undelivered = _read_table(connection, "deliveries", missing, "WHERE state IN ('pending', 'parked')")
        needed = {row.sequence for row in undelivered}
        needed.update(sequence for event in rows["events"] for sequence in event.references)
        for name in ("deliveries", "records"):
            where = "WHERE sequence IN (SELECT value FROM json_each(?))"
            rows[name] = _read_table(connection, name, missing, where, msgspec.json.encode(needed).decode())
        return Loaded(rows=rows, file=path, fingerprint=found, missing=missing)


def _uri(path: Path, mode: str) -> str:
    return f"file:///{quote(os.fsencode(path.absolute()))}?{mode}"  # Path.as_uri imports ssl on Python 3.14


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open *path* for reading. Raise sqlite3.Error if the file is unreadable.

    On a read-only disk, SQLite might be unable to use the WAL. The function then opens the file without the WAL.
    """
    # mode=ro would create a missing WAL. Without a WAL, the file is complete, so immutable=1 is sufficient.
    modes = ("mode=ro", "immutable=1") if path.with_name(f"{path.name}-wal").exists() else ("immutable=1",)
    for mode in modes:
        connection = sqlite3.connect(_uri(path, mode), uri=True, isolation_level=None, check_same_thread=False)
        connection.text_factory = lambda text: text.decode(errors="replace")  # the JSON decoder detects damaged text
        try:
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.Error as error:
            connection.close()
            if mode == modes[-1] or is_damage(error):
                raise
        else:
            break
    return connection


def _read_table(
    connection: sqlite3.Connection, name: str, missing: dict[str, int | None], where: str = "", *values: str
) -> list[Any]:
    """Read a table. If a page is damaged, read the rest of the table backward from the end."""
    spec = _SPECS[name]
    rows: dict[Any, Any] = {}
    undecodable = 0
    for order in ("ASC", "DESC"):
        by = ", ".join(f"{column} {order}" for column in spec.key)
        query = f"SELECT {', '.join(spec.stored)} FROM {name} {where} ORDER BY {by}"  # noqa: S608
        try:
            for row in connection.execute(query, values):
                try:
                    rows[row[: len(spec.key)]] = spec.decode(row)
                except (msgspec.MsgspecError, ValueError, TypeError, AttributeError):
                    undecodable += 1
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            missing[name] = None
        else:
            break
    if undecodable:
        missing.setdefault(name, undecodable)
    return [rows[key] for key in sorted(rows)]


def read_records(path: Path, *, after: int, before: int) -> Iterator[tuple[int, bytes]]:
    """Yield the sequence and the body of records, newest first.

    Only records with a sequence above *after* and below *before* are included.
    """
    with closing(connect_read_only(path)) as connection:
        query = "SELECT sequence, body FROM records WHERE sequence > ? AND sequence < ? ORDER BY sequence DESC"
        for sequence, body in connection.execute(query, (after, before)):
            yield sequence, body.encode()


class Database:
    """Writes one outbox file. All methods except `close` can raise sqlite3.Error or OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # mode=rw does not recreate a deleted file, which would be empty.
        uri = _uri(path, "mode=rw")
        self._connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=1.0)
        for setting in _SETTINGS:
            self._connection.execute(f"PRAGMA {setting}")
        volume_bytes = shutil.disk_usage(path.parent).total  # on a small volume, the WAL takes at most an eighth
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {min(1000, volume_bytes // 8 // 1024)}")

    @classmethod
    def create(cls, directory: Path, changes: Changes) -> Database:
        """Create the next generation from the rows in *changes*."""
        generation = max(generations(directory), default=0) + 1
        path = directory / f"outbox-{generation}.db"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        database = cls(path)
        try:
            database._connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            changes.tables["meta"]["complete"] = MetaRow(key="complete", value="1")
            database.save(changes)
            _sync_directory(directory)
        except BaseException:
            database.close()
            with suppress(OSError):
                delete_generation(path)
            raise
        return database

    def save(self, changes: Changes) -> None:
        """Write *changes* in one transaction.

        If *changes* contains only delivery results, the method does not sync them to disk. If a power failure loses
        these results, the agent sends the records again.
        """
        is_results = all(name in _RESULTS or not rows for name, rows in changes.tables.items())
        if is_results:
            self._connection.execute("PRAGMA synchronous = NORMAL")
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for name, rows in changes.tables.items():
                spec = _SPECS[name]
                put = [spec.encode(row) for row in rows.values() if row is not None]
                deleted = [key if isinstance(key, tuple) else (key,) for key, row in rows.items() if row is None]
                for statement, values in ((spec.put, put), (spec.delete, deleted)):
                    if values:
                        self._connection.executemany(statement, values)
        if is_results:
            self._connection.execute("PRAGMA synchronous = FULL")

    def delete_history(self, in_memory: Collection[int], *, before: float = math.inf) -> int:
        """Delete up to 500 old records from the file, and return how many were deleted.

        Deletes only records that were observed earlier than *before* and are not in *in_memory*.
        """
        query = (
            "SELECT sequence, observed_at FROM records WHERE sequence NOT IN (SELECT value FROM json_each(?)) "
            "ORDER BY sequence LIMIT ?"
        )
        kept = msgspec.json.encode(in_memory).decode()
        found = self._connection.execute(query, (kept, HISTORY_STEP)).fetchall()
        chosen = [(sequence,) for sequence, observed_at in found if observed_at < before]
        if chosen:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany("DELETE FROM deliveries WHERE sequence = ?", chosen)
                self._connection.executemany("DELETE FROM records WHERE sequence = ?", chosen)
        return len(chosen)

    def checkpoint(self) -> None:
        """Copy the WAL into the database file, so that SQLite can reuse the WAL's space."""
        self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()

    @property
    def used_bytes(self) -> int:
        """Return the size of the used pages in bytes."""
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (self._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return int((pages - free) * size)

    def close(self) -> None:
        """Close the file. This method never raises an exception."""
        with suppress(sqlite3.Error):
            self._connection.close()


def fingerprint(path: Path) -> Fingerprint:
    """Return the size, times, and inode of the file and of its WAL. Raises OSError."""
    wal = _stat(f"{path}-wal")
    return _stat(str(path)), None if wal is None else wal[:-1]  # SQLite changes the ctime if root reads the file


def follows(before: Fingerprint, after: Fingerprint) -> bool:
    """Return whether the agent's own writes can explain the change from *before* to *after*.

    The agent never replaces or shrinks a file.
    """
    return all(
        old is None or (new is not None and new[:2] == old[:2] and new[2] >= old[2])
        for old, new in zip(before, after, strict=True)
    )


def delete_generation(path: Path) -> None:
    """Delete a file and its WAL. Raises OSError."""
    for suffix in ("-wal", "-shm", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def file_bytes(path: Path) -> int:
    """Return the size of a file and its WAL in bytes. Raises OSError."""
    return sum(each[2] for each in fingerprint(path) if each is not None)


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)  # noqa: PTH116  # runs before and after each save
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _sync_directory(directory: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def older_generations(directory: Path, current: Path | None) -> list[Path]:
    """Return all outbox files except *current*, newest first. Raises OSError."""
    return [path for path in generations(directory).values() if path != current]
