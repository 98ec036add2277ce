"""Where the outbox lives: a database file, or memory while the disk refuses.

Records must outlive what happens to the file under them, so every misfortune has one answer here:

- full, read-only or failing disk, or a lock that lasts: what is owed is carried into memory and work goes on;
  `return_to_disk` tries again.
- damaged, deleted or overwritten file: it is set aside under a new name with its -wal and -shm, never deleted; what
  can still be read, through the open connection or from the file, is carried into a new one.
- both at once: memory first; the damaged one is kept at hand, and read when there is a disk to put it on.
- a file that belongs to another machine: set aside, nothing carried.

A store belongs to one thread.
"""

from __future__ import annotations

import logging
import sqlite3
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from bridge.clock import format_time, utc_now
from bridge.errors import OutboxError
from bridge.outbox import database
from bridge.outbox.carry import bring_back, carry_owed
from bridge.outbox.database import DATABASE, SQL, is_damage, is_lock, is_refusal, transaction
from bridge.outbox.file_guard import FileGuard
from bridge.outbox.locks import InMemoryFlag, prepare_nudge
from bridge.outbox.meta import begin_stream, put, read_meta, vm_id_of
from bridge.outbox.recovery import keep_sequence_ahead
from bridge.outbox.wreck import Wreck, carry_wrecks

__all__ = ["MEMORY_BYTES", "SQL", "Storage"]

logger = logging.getLogger(__name__)

#: What a store in memory may hold: an agent on a full disk must not be killed for its memory next.
MEMORY_BYTES = 16 * 1024 * 1024
_CARRIED_BYTES = 10 * 1024 * 1024
#: In memory nobody waits for a lock: work goes on meanwhile, and the next try is near.
_PROBE_SECONDS = 0.1

_DAMAGED = (
    "The outbox is damaged or gone. What is left of it is set aside, and a new one is started with what can be read. "
    "The agent goes on by itself; look after the disk, and delete the old files when nobody needs them."
)
_FOREIGN = (
    "The outbox belongs to another machine: it came with an image. It is set aside, and this machine starts empty. "
    "Delete the old files when nobody needs them."
)


class Storage:
    """The outbox's connection, on disk or in memory, kept alive; raise OutboxError when the file must not be used."""

    def __init__(self, directory: Path, *, max_bytes: int, now: Callable[[], datetime] = utc_now) -> None:
        self.directory = directory
        self.path = directory / DATABASE
        self._max_bytes = max_bytes
        self._now = now
        self._watch: FileGuard | None = None
        self._wrecks: list[Wreck] = []
        self._flag = InMemoryFlag(directory)
        self._is_blind = False
        self.set_aside_count = 0
        """How many databases were set aside since the start: damaged ones, and those of another machine."""
        self.disk_sequence = 0
        """In memory: the last sequence that the disk has too; up to it nothing may be deleted. Else 0."""
        self.in_memory = False
        self.meta: dict[str, str] = {}
        """What the outbox remembers, as of the last commit: a damaged file cannot take it along."""
        self.connection = self._open()
        self.refresh()

    @property
    def max_bytes(self) -> int:
        """How much the outbox may hold where it lives now."""
        return MEMORY_BYTES if self.in_memory else self._max_bytes

    def refresh(self) -> None:
        """Read meta again after a commit."""
        self.meta = read_meta(self.connection)

    def recover(self, error: sqlite3.Error) -> None:
        """Answer *error* so that the same work can be done again; raise OutboxError when nothing helps."""
        if self.in_memory or not (is_damage(error) or is_refusal(error) or is_lock(error)):
            raise OutboxError(f"The outbox failed: {error}.") from error
        if is_damage(error):
            self.replace_database("damaged", carry=True, why=str(error))
        else:
            self._switch_to_memory(str(error))

    def check_file(self) -> None:
        """Look whether the file is still the one that is open, and start over if it is not."""
        if self.in_memory or self._watch is None:
            return
        trouble = self._watch.trouble() or self._watch.look_through()
        if trouble is not None:
            self.replace_database("damaged", carry=True, why=trouble)

    def replace_database(self, reason: str, *, carry: bool, why: str) -> None:
        """Set the file aside as *reason* and go on with a new one, with all that can be read when *carry*."""
        is_another = self._watch is not None and self._watch.is_replaced
        if sys.platform == "win32" and not self.in_memory:
            self._switch_to_memory(why)  # a file that is open cannot be renamed there
        self._flag.clear()
        wreck = Wreck(connection=self.connection, watch=self._watch)
        aside = self._set_aside(reason)
        if not is_another:  # what somebody put in its place is not ours to read
            wreck.aside = aside
        logger.log(
            logging.ERROR if carry else logging.WARNING,
            _DAMAGED if carry else _FOREIGN,
            extra={"why": why, "set_aside_as": str(aside), "directory": str(self.directory)},
        )
        meta = self.meta if carry else {}
        self._watch, self.in_memory, self.disk_sequence = None, False, 0
        try:
            self.connection = self._rebuilt([wreck] if carry else [], meta)
        except (sqlite3.Error, OSError) as error:
            self.connection = self._open_memory(str(error), wreck.connection if carry else None, meta)
        self._wrecks.append(wreck)
        if not (carry and self.in_memory):
            self._close_wrecks()
        self.refresh()

    def return_to_disk(self) -> bool:
        """Try to move what is in memory to the disk; return whether the outbox is on disk now."""
        if not self.in_memory:
            return True
        if self._is_locked():
            return False
        self._flag.clear()  # a command that hears of the return may write at once
        disk = self._merged_or_none() or self._merged_or_none()  # the second time without what was damaged
        if disk is None:
            self._flag.set()
            return False
        self.connection.close()
        self._close_wrecks()
        self.connection = disk
        self.in_memory, self.disk_sequence, self._is_blind = False, 0, False
        self.refresh()
        logger.warning("The outbox is back on disk.", extra={"directory": str(self.directory)})
        return True

    def close(self) -> None:
        """Close the connection, after a last try to bring what is in memory to the disk."""
        if not self.return_to_disk():
            logger.error("What is in memory is lost: the disk under the outbox still refuses.")
        trouble = None if self._watch is None else self._watch.look_through(at_once=True)
        if trouble is not None:
            self.replace_database("damaged", carry=True, why=trouble)
        self.connection.close()
        if self._watch is not None:
            self._watch.close()
        self._close_wrecks()
        self._flag.clear()

    def _close_wrecks(self) -> None:
        for wreck in self._wrecks:
            wreck.close()
        self._wrecks.clear()

    # Opening.

    def _open(self) -> sqlite3.Connection:
        try:
            connection = self._open_disk()
        except (sqlite3.Error, OSError) as error:
            if is_damage(error):
                return self._replace_damaged(str(error))
            if is_refusal(error) or is_lock(error):
                return self._open_memory_from(self.path, str(error))
            raise OutboxError(f"The outbox {self.path} cannot be opened: {error}.") from error
        return connection

    def _open_disk(self) -> sqlite3.Connection:
        """Return a connection to the file, made if need be, that was looked through and takes writes."""
        database.refuse_emptied(self.path)
        connection = database.open_file(self.path)
        try:
            database.check(connection, self.path)
            begin_stream(connection, self._now())
            self._watch = FileGuard(self.path)
        except BaseException:
            connection.close()
            raise
        prepare_nudge(self.directory)
        return connection

    def _replace_damaged(self, why: str) -> sqlite3.Connection:
        wreck = self._put_away_damaged(why)
        try:
            connection = self._rebuilt([wreck], {})
        except (sqlite3.Error, OSError) as error:
            return self._open_memory_from(wreck.aside or self.path, str(error))
        self._wrecks.clear()
        return connection

    def _put_away_damaged(self, why: str) -> Wreck:
        """Set the file aside, to be read later."""
        wreck = Wreck(aside=self._set_aside("damaged"))
        if wreck.aside is None and self.in_memory:
            return wreck  # it lies where it lay, and that was said
        self._wrecks.append(wreck)
        logger.error(
            _DAMAGED,
            extra={"why": why, "set_aside_as": str(wreck.aside), "directory": str(self.directory)},
        )
        return wreck

    def _rebuilt(self, wrecks: list[Wreck], meta: dict[str, str]) -> sqlite3.Connection:
        """Return a new file with what can be read of *wrecks*, and *meta* as it was known last."""
        connection = self._open_new()
        try:
            with transaction(connection):
                for key, value in meta.items():
                    put(connection, key, value)
                carry_wrecks(wrecks, connection)
                self._forget_decisions(connection)
            begin_stream(connection, self._now())
            self._watch = FileGuard(self.path)
        except BaseException:
            connection.close()
            raise
        prepare_nudge(self.directory)
        return connection

    def _forget_decisions(self, connection: sqlite3.Connection) -> None:
        """Have the database count as made now: its decisions are gone, and older ones must not come again."""
        put(connection, "created_at", format_time(self._now()))

    def _open_memory_from(self, path: Path, why: str) -> sqlite3.Connection:
        source = database.open_to_read(path)
        try:
            return self._open_memory(why, source, {})
        finally:
            if source is not None:
                source.close()

    def _open_memory(self, why: str, source: sqlite3.Connection | None, meta: dict[str, str]) -> sqlite3.Connection:
        """Return a memory store with what is owed in *source*, and *meta* as it was known last."""
        logger.error(
            "The disk under the outbox refuses. Work goes on in memory (at most %d MiB): what is there when the agent "
            "dies is lost. Free the disk or make it writable; the outbox goes back by itself.",
            MEMORY_BYTES // 1024 // 1024,
            extra={"why": why, "directory": str(self.directory)},
        )
        memory = database.open_memory()
        with transaction(memory):
            if source is not None:
                carry_owed(source, memory, _CARRIED_BYTES, SQL)
            for key, value in meta.items():
                put(memory, key, value)
            keep_sequence_ahead(memory, SQL)
        self._is_blind = "stream_id" not in read_meta(memory)
        begin_stream(memory, self._now())
        self.in_memory = True
        self.disk_sequence = int(read_meta(memory).get("next_sequence", "1")) - 1
        self._flag.set()
        return memory

    def _switch_to_memory(self, why: str) -> None:
        old, watch = self.connection, self._watch
        self.connection, self._watch = self._open_memory(why, old, self.meta), None
        old.close()
        if watch is not None:
            watch.close()
        self.refresh()

    # Returning.

    def _is_locked(self) -> bool:
        """Return whether another program holds the file; whatever else it has is for `_merged` to find."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return False
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(self.path, isolation_level=None, timeout=_PROBE_SECONDS)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as error:
            return is_lock(error)
        finally:
            if connection is not None:
                connection.close()
        return False

    def _merged_or_none(self) -> sqlite3.Connection | None:
        try:
            return self._merged()
        except (sqlite3.Error, OSError, OutboxError) as error:
            if is_damage(error):
                self._put_away_damaged(str(error))
            elif isinstance(error, OutboxError):
                logger.error("The outbox stays in memory: %s", error)  # noqa: TRY400  # the sentence says it all
        return None

    def _merged(self) -> sqlite3.Connection:
        """Return the disk's database with all that happened in memory, or raise and change nothing."""
        disk = self._file_to_return_to()
        try:
            with transaction(disk):
                is_new = "stream_id" not in read_meta(disk)
                carry_wrecks(self._wrecks, disk)
                bring_back(self.connection, disk, SQL, disk_is_new=is_new, is_blind=self._is_blind)
                if is_new:
                    self._forget_decisions(disk)
            self._watch = FileGuard(self.path)
        except BaseException:
            disk.close()
            raise
        prepare_nudge(self.directory)
        return disk

    def _file_to_return_to(self) -> sqlite3.Connection:
        database.refuse_emptied(self.path)
        disk = database.open_file(self.path)
        try:
            database.check(disk, self.path)
            if self._is_ours(read_meta(disk)):
                return disk
        except BaseException:
            disk.close()
            raise
        disk.close()
        aside = self._set_aside("other-vm")
        logger.error("The state directory holds another outbox; it is set aside.", extra={"set_aside_as": str(aside)})
        return self._open_new()

    def _is_ours(self, meta: dict[str, str]) -> bool:
        theirs, mine = vm_id_of(meta), vm_id_of(self.meta)
        is_mine = meta.get("stream_id") in (None, self.meta["stream_id"])
        return is_mine or (self._is_blind and (None in (theirs, mine) or theirs == mine))

    def _open_new(self) -> sqlite3.Connection:
        if database.is_in_the_way(self.path):
            raise OSError(f"{self.path} cannot be renamed")
        return database.open_file(self.path)

    def _set_aside(self, reason: str) -> Path | None:
        aside = database.set_aside(self.path, reason, self._now())
        self.set_aside_count += aside is not None
        return aside
