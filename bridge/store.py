"""Where the outbox lives: a database file, or memory while the disk refuses.

Records must outlive what happens to the file under them, so every misfortune has one answer here:

- full, read-only or failing disk: what is owed is carried into memory and work goes on; `return_to_disk` tries again.
- damaged, deleted or overwritten file: it is set aside under a new name with its -wal and -shm, never deleted; what
  can still be read, through the open connection or from the file, is carried into a new one.
- a file that belongs to another machine: set aside, nothing carried.

A store belongs to one thread. The statements are in outbox.sql.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path

from bridge.carry import carry_all, carry_owed, merge_back
from bridge.errors import OutboxError

logger = logging.getLogger(__name__)

DATABASE = "outbox.db"
#: What a store in memory may hold: an agent on a full disk must not be killed for its memory next.
MEMORY_BYTES = 16 * 1024 * 1024
_CARRIED_BYTES = 12 * 1024 * 1024
_SUFFIXES = ("", "-wal", "-shm")
_DAMAGED = ("malformed", "not a database", "unsupported file format", "no such table", "no such column", "encrypted")
_REFUSED = ("full", "readonly", "read-only", "disk i/o error", "unable to open", "authoriz")


def load_statements() -> dict[str, str]:
    """Return outbox.sql, name -> statement."""
    text = files("bridge").joinpath("outbox.sql").read_text(encoding="utf-8")
    blocks = text.split("-- name: ")[1:]
    named = (block.partition("\n") for block in blocks)
    return {name.strip(): body.strip() for name, _, body in named}


SQL = load_statements()


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether *error* says that the file is no database of ours any more."""
    return _says(error, _DAMAGED)


def is_refusal(error: sqlite3.Error) -> bool:
    """Return whether *error* says that the disk does not take writes, or gives no reads, for now."""
    return _says(error, _REFUSED)


def _says(error: sqlite3.Error, words: tuple[str, ...]) -> bool:
    # By text: Python 3.10 does not hand on SQLite's error code.
    text = str(error).lower()
    return any(word in text for word in words)


def connect(path: Path, *, read_only: bool = False, timeout_seconds: float = 5.0) -> sqlite3.Connection:
    """Return a connection to the database at *path*, set up for durable commits."""
    target = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    connection = sqlite3.connect(
        target, uri=True, isolation_level=None, timeout=timeout_seconds, check_same_thread=False
    )
    try:
        if not read_only:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            # FULL: the host may die right after a commit, and NORMAL can lose what was acknowledged.
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA journal_size_limit = 4194304")
        connection.execute("SELECT count(*) FROM sqlite_master")
    except BaseException:
        connection.close()
        raise
    return connection


def create_schema(connection: sqlite3.Connection) -> None:
    """Create the tables where there are none; raise OutboxError for a file of a newer version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > 1:
        raise OutboxError(
            f"The outbox was written by a newer version (schema {version}, this one knows 1). "
            "Run that version, or move the state directory away to start empty."
        )
    if version == 0:
        connection.executescript(f"BEGIN IMMEDIATE;\n{SQL['schema']}\nCOMMIT;")


def utc_now() -> datetime:
    """Return the time of the wall clock, aware."""
    return datetime.now(timezone.utc)


class Store:
    """The outbox's connection, on disk or in memory, kept alive; raise OutboxError when not even memory works."""

    def __init__(self, directory: Path, *, max_bytes: int, now: Callable[[], datetime] = utc_now) -> None:
        self.directory = directory
        self.path = directory / DATABASE
        self._max_bytes = max_bytes
        self._now = now
        self._inode: int | None = None
        self._totals_on_leaving: dict[str, tuple[int, ...]] = {}
        self.floor = 0
        """In memory: the last sequence that the disk has too; up to it nothing may be evicted. Else 0."""
        self.in_memory = False
        self.meta: dict[str, str] = {}
        self.connection = self._open()
        self.refresh()

    @property
    def max_bytes(self) -> int:
        """How much the outbox may hold where it lives now."""
        return MEMORY_BYTES if self.in_memory else self._max_bytes

    @property
    def used_bytes(self) -> int:
        """How much of that is used."""
        pages, free, size = (
            int(self.connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def refresh(self) -> None:
        """Read meta again after a commit, so that a damaged file cannot take it along."""
        self.meta = dict(self.connection.execute(SQL["get_meta"]))

    def recover(self, error: sqlite3.Error) -> None:
        """Answer *error* so that the same work can be done again; raise OutboxError when nothing helps."""
        if self.in_memory or not (is_damage(error) or is_refusal(error)):
            raise OutboxError(f"The outbox failed: {error}.") from error
        if is_damage(error):
            self.start_over("damaged", carry=True, why=str(error))
        else:
            self._leave_disk(str(error))

    def check_file(self) -> None:
        """Look whether the file is still the one that is open, and start over if it is not."""
        if self.in_memory:
            return
        try:
            is_ours = self.path.stat().st_ino == self._inode and _has_header(self.path)
        except OSError:
            is_ours = False
        if not is_ours:
            self.start_over("damaged", carry=True, why="the file was deleted, replaced or overwritten")

    def start_over(self, reason: str, *, carry: bool, why: str) -> None:
        """Set the file aside as *reason* and go on with a new one, with all that could be read when *carry*."""
        aside = self._set_aside(reason)
        logger.error(
            "The outbox was set aside and a new one started; what could be read was %s.",
            "carried over" if carry else "left there",
            extra={"reason": reason, "why": why, "set_aside_as": str(aside), "directory": str(self.directory)},
        )
        old, meta = self.connection, self.meta
        self.connection = self._open_new()
        if carry:
            self._carry_from(old, aside)
            self._put_missing_meta(meta)
        old.close()
        self.refresh()

    def return_to_disk(self) -> bool:
        """Try to move what is in memory to the disk; return whether the outbox is on disk now."""
        if not self.in_memory:
            return True
        disk: sqlite3.Connection | None = None
        try:
            disk = self._open_file()
            if not self._is_mine(disk):
                disk.close()
                self._set_aside("other-stream")
                disk = self._open_file()
            merge_back(self.connection, disk, self._totals_on_leaving, SQL)
        except (sqlite3.Error, OSError) as error:
            if disk is not None:
                disk.close()
            if isinstance(error, sqlite3.Error) and is_damage(error):
                self._set_aside("damaged")
            return False
        self.connection.close()
        self.connection, self.in_memory, self.floor = disk, False, 0
        self.refresh()
        logger.warning("The outbox is back on disk.", extra={"directory": str(self.directory)})
        return True

    def close(self) -> None:
        """Close the connection; a file is checkpointed by that."""
        self.connection.close()

    def _open(self) -> sqlite3.Connection:
        try:
            connection = self._open_file()
            self._check(connection)
        except sqlite3.Error as error:
            if is_damage(error):
                return self._replace_damaged(str(error))
            if is_refusal(error):
                return self._open_memory(str(error), _open_read_only(self.path))
            raise OutboxError(f"The outbox {self.path} cannot be opened: {error}.") from error
        return connection

    def _open_file(self) -> sqlite3.Connection:
        _create_private(self.path)
        connection = connect(self.path)
        try:
            create_schema(connection)
        except BaseException:
            connection.close()
            raise
        self._inode = self.path.stat().st_ino
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            connection.close()
            raise sqlite3.DatabaseError(f"malformed: {verdict}")

    def _is_mine(self, disk: sqlite3.Connection) -> bool:
        stream = dict(disk.execute(SQL["get_meta"])).get("stream_id")
        return stream is None or stream == self.meta.get("stream_id")

    def _replace_damaged(self, why: str) -> sqlite3.Connection:
        aside = self._set_aside("damaged")
        logger.error(
            "The outbox is damaged. It was set aside and a new one started with what could be read.",
            extra={"why": why, "set_aside_as": str(aside), "directory": str(self.directory)},
        )
        self.connection = self._open_new()
        self._carry_from(None, aside)
        return self.connection

    def _open_new(self) -> sqlite3.Connection:
        if self.path.exists():
            return self._open_memory("the old file cannot be renamed", None)
        try:
            connection = self._open_file()
        except sqlite3.Error as error:
            return self._open_memory(str(error), None)
        self.in_memory, self.floor = False, 0
        return connection

    def _open_memory(self, why: str, source: sqlite3.Connection | None) -> sqlite3.Connection:
        """Return a memory store with what is owed in *source*, which is closed."""
        logger.error(
            "The disk under the outbox refuses. Work goes on in memory (at most %d MiB): what is there when the agent "
            "dies is lost. Free the disk or make it writable; the outbox goes back by itself.",
            MEMORY_BYTES // 1024 // 1024,
            extra={"why": why, "directory": str(self.directory)},
        )
        memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        create_schema(memory)
        if source is not None:
            carry_owed(source, memory, _CARRIED_BYTES, SQL)
            source.close()
        self.in_memory = True
        self._totals_on_leaving = {row[0]: tuple(row[1:]) for row in memory.execute(SQL["totals"])}
        self.floor = int(dict(memory.execute(SQL["get_meta"])).get("next_sequence", "1")) - 1
        return memory

    def _leave_disk(self, why: str) -> None:
        self.connection = self._open_memory(why, self.connection)
        self.refresh()

    def _carry_from(self, old: sqlite3.Connection | None, aside: Path | None) -> None:
        """Copy all that can be read: from the live connection first, it may know what the file lost."""
        for source in (old, _open_read_only(aside) if aside is not None else None):
            if source is not None:
                carry_all(source, self.connection, SQL)
                if source is not old:
                    source.close()

    def _put_missing_meta(self, meta: dict[str, str]) -> None:
        found = dict(self.connection.execute(SQL["get_meta"]))
        for key, value in meta.items():
            if key not in found:
                self.connection.execute(SQL["put_meta"], (key, value))

    def _set_aside(self, reason: str) -> Path | None:
        stamp = self._now().astimezone(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = self.path.with_name(f"{DATABASE}.{reason}-{stamp}")
        for suffix in _SUFFIXES:
            try:
                Path(f"{self.path}{suffix}").rename(f"{aside}{suffix}")
            except OSError:
                continue
        return aside if aside.exists() else None


def _open_read_only(path: Path | None) -> sqlite3.Connection | None:
    if path is None or not path.exists():
        return None
    try:
        return connect(path, read_only=True)
    except sqlite3.Error:
        pass
    try:
        # Last resort on a read-only directory: without the -wal's newest commits, but with the rest.
        return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, isolation_level=None)
    except sqlite3.Error:
        return None


def _has_header(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\x00"


def _create_private(path: Path) -> None:
    """Create the file readable by its owner alone: records name resources and labels."""
    if not path.exists():
        with suppress(OSError):  # SQLite says next what is wrong, in words that are understood above
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
