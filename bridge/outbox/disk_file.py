"""The outbox's file on the disk: opened, watched, set aside under a new name, and made anew.

A damaged, deleted or overwritten file is set aside with its -wal and -shm, never deleted; what can still be read,
through the open connection or from the file, is copied into a new one. A file that belongs to another machine is set
aside, and nothing of it is copied.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path

from bridge.errors import OutboxError, StateDirectoryError
from bridge.outbox import database, meta, recovery, retention, salvage_note
from bridge.outbox.database import DATABASE, is_lock, transaction
from bridge.outbox.locks import prepare_nudge
from bridge.outbox.recovery import FileGuard
from bridge.outbox.stream import Stream
from bridge.outbox.volume import VolumeRoom, wal_of

logger = logging.getLogger("bridge.outbox.storage")  # the name that logs are filtered by, for all of its parts

#: In memory no lock is waited for: work goes on meanwhile, and the next try is near.
_PROBE_SECONDS = 0.1

_DAMAGED = (
    "The outbox is damaged or gone. What is left of it is set aside, and a new one is started with what can be read. "
    "The agent goes on by itself; look after the disk, and delete the old files when nobody needs them."
)
_FOREIGN = (
    "The outbox belongs to another machine: it came with an image. It is set aside, and this machine starts empty. "
    "Delete the old files when nobody needs them."
)


class DiskFile:
    """The file of the outbox in *directory*.

    *claim* makes sure that the directory is this agent's, as `DirectoryLock.claim`, before a file is made in it.
    """

    def __init__(self, directory: Path, *, now: Callable[[], datetime], claim: Callable[[], object]) -> None:
        self.directory = directory
        self.path = directory / DATABASE
        self._now = now
        self._claim = claim
        self.guard: FileGuard | None = None
        """Notices what becomes of the file while it is open."""
        self.reader: sqlite3.Connection | None = None
        """Open on the file too, and idle: what is there can be read by it while the other connection hangs."""
        self.being_replaced: Path | None = None
        """The new name of the file that was set aside, until another stands in its place."""
        self.set_aside_count = 0
        """How many databases were set aside since the start: damaged ones, and those of another machine."""

    def open(self, stream: Stream) -> sqlite3.Connection:
        """Return a connection to the file, made if need be, that was checked and takes writes."""
        database.refuse_emptied(self.path)
        connection = database.open_file(self.path)
        try:
            database.check(connection, self.path)
            stream.begin(connection)
            self.watch()
        except BaseException:
            connection.close()
            raise
        prepare_nudge(self.directory)
        return connection

    def rebuild(
        self,
        sources: list[sqlite3.Connection],
        known: Mapping[str, str],
        *,
        live: sqlite3.Connection | None,
        stream: Stream,
        room: VolumeRoom,
    ) -> sqlite3.Connection:
        """Return a new file with *known* meta and what can be read of *sources*; see `fill`."""
        connection = self.open_new()
        try:
            try:
                fill(connection, sources, known, live=live, stream=stream, room=room, now=self._now().timestamp())
            except sqlite3.Error:
                connection.close()
                self._delete_stump()
                raise
            salvage_note.end(self.directory)
            stream.begin(connection)
            self.watch()
        except BaseException:
            connection.close()
            raise
        return connection

    def unread(self) -> list[Path]:
        """Return damaged files whose rows are still to be brought into the outbox, because an agent died meanwhile.

        What it had begun to make of them, and committed nothing in, is deleted.
        """
        found = salvage_note.unread(self.directory)
        if found and self._holds_a_stream():
            salvage_note.end(self.directory)  # it died after the commit
            return []
        if found:
            self._delete_stump()
            self.set_aside_count += len(found)
        return found

    def _holds_a_stream(self) -> bool:
        """Return whether there is a file in which something was committed, or one that only `open` can judge."""
        if self.path.is_symlink() or not self.path.exists():
            return False
        try:
            with closing(database.open_read_only(self.path)) as connection:
                return meta.get(connection, "stream_id") is not None
        except sqlite3.Error:
            return self.path.stat().st_size > 0 and not _is_without_tables(self.path)

    def _delete_stump(self) -> None:
        """Delete a file that was made just now, and in which nothing was ever committed: it may fill its volume."""
        for path in (self.path, wal_of(self.path), Path(f"{self.path}-shm")):
            with suppress(OSError):
                path.unlink()

    def open_new(self) -> sqlite3.Connection:
        """Return a connection to a file that is made; raise OSError while an old one is in the way."""
        self.claim_directory()
        if database.is_in_the_way(self.path):
            raise OSError(f"{self.path} cannot be renamed")
        return database.open_file(self.path)

    def claim_directory(self) -> None:
        """Raise OutboxError when the directory is another agent's now: what is there is not touched."""
        try:
            self._claim()
        except StateDirectoryError as error:
            raise OutboxError(str(error)) from error

    def watch(self, guard: FileGuard | None = None) -> None:
        """Notice what becomes of the file, by *guard* if it has one, and keep a second connection to read it by."""
        self.guard = guard or FileGuard(self.path)
        self.reader = database.open_to_read(self.path)

    def close_reader(self) -> None:
        """Close the second connection; before the other, which takes the -wal along as the last one."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()

    @property
    def file_id(self) -> str | None:
        """Return which file it is, as `FileGuard.file_id`."""
        return None if self.guard is None else self.guard.file_id

    def is_locked(self) -> bool:
        """Return whether another program has the file locked; `Merge` finds whatever else is wrong with it."""
        if self.path.is_symlink() or not self.path.exists() or self.path.stat().st_size == 0:
            return False
        try:
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=_PROBE_SECONDS)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as error:
            return is_lock(error)
        return False

    def set_aside(self, reason: str, why: str, *, in_memory: bool, is_read: bool = True) -> Path | None:
        """Rename the file and log it; return its new name, None when there was nothing or it failed.

        A damaged one that *is_read* afterwards is read again by the next agent, if this one dies before it is.
        """
        if reason == "damaged" and is_read:
            salvage_note.begin(self.directory)
        aside = self.rename(reason)
        # In memory a damaged file that cannot be renamed is found again and again; it was logged the first time.
        if aside is not None or reason != "damaged" or not in_memory:
            logger.log(
                logging.ERROR if reason == "damaged" else logging.WARNING,
                _DAMAGED if reason == "damaged" else _FOREIGN,
                extra={"why": why, "set_aside_as": str(aside), "directory": str(self.directory)},
            )
        return aside

    def rename(self, reason: str) -> Path | None:
        """Put the file out of the way as *reason*; return its new name, None when there was nothing or it failed."""
        aside = database.set_aside(self.path, reason, self._now())
        self.set_aside_count += aside is not None
        return aside


def fill(
    connection: sqlite3.Connection,
    sources: list[sqlite3.Connection],
    known: Mapping[str, str],
    *,
    live: sqlite3.Connection | None,
    stream: Stream,
    limit_bytes: float = float("inf"),
    room: VolumeRoom | None = None,
    now: float = 0.0,
) -> None:
    """Write *known* meta and what can be read of *sources* into *connection*, a new database.

    *live* is the one of them that was open all along. No more records are copied once *limit_bytes* are used; on a
    small volume, with *room*, the oldest that are finished are left out.
    """
    is_small = room is not None and room.longest_wal_bytes is not None
    if is_small:
        connection.execute("PRAGMA cache_spill = OFF")  # what is left out is not written at all
    with transaction(connection):
        for key, value in known.items():
            meta.put(connection, key, value)
        recovery.copy_readable(sources, connection, limit_bytes=limit_bytes)
        if not recovery.copy_decisions(sources, connection, live=live):
            stream.forget_decisions(connection)
        if room is not None and is_small:
            retention.fit_volume(connection, max_bytes=room.bound_bytes, finished_bytes=room.finished_bytes, now=now)


def _is_without_tables(path: Path) -> bool:
    """Return whether the database at *path* is one that was made, and in which no table was committed yet."""
    with suppress(sqlite3.Error), closing(database.open_read_only(path)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return int(count) == 0
    return False
