"""Where the outbox lives: a database file, or memory while the disk refuses.

Records must outlive what happens to the file under them, so every misfortune has one answer here:

- full, read-only or failing disk, or a lock that lasts: the database is copied into memory by SQLite's own backup, or
  an outline of it where it is large (`memory_copy`), and work goes on there; `return_to_disk` tries again (`merge`).
  Before that a full disk is given room (`volume`).
- damaged, deleted or overwritten file: it is set aside under a new name with its -wal and -shm, never deleted; what
  can still be read, through the open connection or from the file, is copied into a new one (`disk_file`), or into
  memory. A damaged one that is too large for memory is kept open meanwhile, and read on the way back.
- a file that belongs to another machine: set aside, nothing copied.
- a disk that hangs: another thread goes on in memory (`stalls`). One that is slow from then on gets what is there
  beside the work (`write_behind`).

A file that may not be the newest of its stream begins a new one (`stream`): at the start, or on the way back.

A storage belongs to one thread.
"""

from __future__ import annotations

import copy
import logging
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from bridge.clock import utc_now
from bridge.errors import OutboxError
from bridge.outbox import database, meta
from bridge.outbox.database import SQL, TrackedConnection, check_wal, is_damage, is_lock, is_refusal
from bridge.outbox.disk_file import DiskFile, fill
from bridge.outbox.leaf_pages import open_damaged
from bridge.outbox.locks import InMemoryFlag, prepare_nudge
from bridge.outbox.memory_copy import COPIED_BYTES, copy_outline, copy_whole, is_large, read_beside
from bridge.outbox.merge import DeletedRows, MemoryOrigin, Merge, deleted_rows
from bridge.outbox.newest import Progress
from bridge.outbox.retention import make_room
from bridge.outbox.stalls import COMMIT_SECONDS, WORK_SECONDS, wait_for_disk
from bridge.outbox.stream import Stream
from bridge.outbox.volume import VolumeRoom, room_on_volume
from bridge.outbox.write_behind import WriteBehind

logger = logging.getLogger(__name__)

#: What a storage in memory may use: an agent on a full disk must not be killed for its memory next.
MEMORY_BYTES = 16 * 1024 * 1024
#: About 2 MiB of the -wal, half of what SQLite lets gather.
_COMMITS_UNTIL_CHECKPOINT = 128


class Storage:
    """The outbox's connection, on disk or in memory, kept alive; raise OutboxError when the file must not be used."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        now: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        claim: Callable[[], object] = lambda: None,
        runtime: Path | None = None,
    ) -> None:
        self.directory = directory
        self._now = now
        self._file = DiskFile(directory, now=now, claim=claim)
        self._stream = Stream(directory, now=now, monotonic=monotonic, runtime=runtime)
        self._origin = MemoryOrigin()
        self.enter_step: Callable[[float], None] = lambda _limit_seconds: None
        """Called before a step that must not happen once another thread goes on instead (`Turn.enter`)."""
        self._stalled: list[tuple[Storage, Callable[[], bool]]] = []
        """In memory: those before, each left to a thread in a call to the disk; and whether that has ended."""
        self._has_come_back = threading.Event()
        """Set when the call that this one was left in has returned, and the disk is slow."""
        self._behind = WriteBehind(monotonic)
        self._sequence_before = 0
        """What `disk_sequence` was before the writing that is on its way."""
        self.patience_seconds = WORK_SECONDS
        """How long the way back to the disk may take."""
        self._is_settled = False
        self._max_bytes = max_bytes
        self._bound = max_bytes
        self._longest_wal_bytes: int | None = None
        self._may_make_room = True
        self._flag = InMemoryFlag(directory)
        self.disk_sequence = 0
        """In memory: the last sequence that the disk has too; up to it nothing may be deleted. Else 0."""
        self.in_memory = False
        self._commits = 0
        """How many were made since the -wal was copied into the file last, as far as that was done here."""
        self.meta: dict[str, str] = {}
        """What the outbox remembers, as of the last commit: a damaged file cannot take it along."""
        self.connection = self._open()
        self.meta = meta.read_meta(self.connection)
        self._begin_work()
        self._look_at_volume()

    def _begin_work(self) -> None:
        """Go on with the stream that is there, or with a new one; in memory when the disk refuses that.

        Until that is settled nothing is counted: what was counted before is what tells.
        """
        try:
            self._stream.start(self.connection, None if self._file.set_aside_count else self._file.file_id)
        except sqlite3.Error as error:
            self.recover(error)
            self._stream.go_on_in(self.connection)
        self._is_settled = True
        self._read_meta()

    @property
    def written_back(self) -> DeletedRows | None:
        """In memory: what `deleted_rows` found when all of it was last written into the file."""
        return self._origin.written_back

    @property
    def set_aside_count(self) -> int:
        """How many databases were set aside since the start: damaged ones, and those of another machine."""
        return self._file.set_aside_count

    @property
    def max_bytes(self) -> int:
        """How much the outbox may use where it lives now."""
        return MEMORY_BYTES if self.in_memory else self._bound

    def refresh(self) -> None:
        """Read meta again after a commit that may have changed it."""
        self._may_make_room = True
        self._commits += 1
        connection = self.connection
        if not isinstance(connection, TrackedConnection) or connection.meta_changed:
            self._read_meta()
        if isinstance(connection, TrackedConnection):
            connection.meta_changed = False
        if not self.in_memory and self._longest_wal_bytes is not None:
            try:
                check_wal(connection, self._file.path, self._longest_wal_bytes)
            except sqlite3.Error as error:
                self._switch_to_memory(str(error))

    def mark_read(self) -> None:
        """Read something right after a commit, so that the next transaction need not write to the -shm to begin.

        SQLite notes there up to where somebody reads. On a disk that is frozen meanwhile that write hangs, in whoever
        begins to read: the outbox, and what would be copied into memory from.
        """
        if not self.in_memory:
            self.connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()

    def _read_meta(self) -> None:
        self.meta = meta.read_meta(self.connection)
        if self._is_settled:
            progress = Progress(
                next_sequence=meta.next_sequence(self.meta), decision_changes=meta.decision_changes(self.meta)
            )
            self._stream.counter.note(self.meta["stream_id"], progress)

    def recover(self, error: sqlite3.Error) -> None:
        """Answer *error* so that the same work can be done again; raise OutboxError when nothing helps."""
        if self.in_memory or not (is_damage(error) or is_refusal(error) or is_lock(error)):
            raise OutboxError(f"The outbox failed: {error}.") from error
        if is_damage(error):
            self.replace_database("damaged", carry=True, why=str(error))
        elif not (database.is_full(error) and self._has_made_room_first()):
            self._switch_to_memory(str(error))

    def _has_made_room_first(self) -> bool:
        """Return whether room was made, once for each commit: when that did not help, nothing of it will."""
        is_first, self._may_make_room = self._may_make_room, False
        return is_first and make_room(self.connection, self._room())

    def _look_at_volume(self) -> None:
        """Bound the outbox by its volume, which needs room for the -wal too, and make room there before it is full."""
        room = self._room()
        if room.is_almost_full and not self.in_memory:
            make_room(self.connection, room)

    def _room(self) -> VolumeRoom:
        room = room_on_volume(self._file.path, max_bytes=self._max_bytes)
        self._bound, self._longest_wal_bytes = room.bound_bytes, room.longest_wal_bytes
        return room

    def check_file(self) -> None:
        """Replace the database if its file is no longer the one that is open, and look at its volume."""
        trouble = None if self.in_memory or self._file.guard is None else self._file.guard.trouble()
        if trouble is not None:
            self.replace_database("damaged", carry=True, why=trouble)
        elif not self.in_memory:
            self._look_at_volume()

    def checkpoint(self) -> None:
        """Copy the -wal into the file when much has gathered in it.

        SQLite does that by itself at 4 MiB, in a commit, which then takes five times as long; a record would wait for
        it. What fails shows at the next commit.
        """
        if self.in_memory or self._commits < _COMMITS_UNTIL_CHECKPOINT:
            return
        self._commits = 0
        self.enter_step(COMMIT_SECONDS)
        with suppress(sqlite3.Error):
            self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    @property
    def is_creation_to_correct(self) -> bool:
        """Return whether `correct_created_at` has something to do."""
        return not self.in_memory and self._stream.is_creation_to_correct(self.meta)

    def correct_created_at(self) -> None:
        """Have a database that was made while the clock was ahead count as made when it was, inside a transaction."""
        if self.is_creation_to_correct:
            self._stream.correct_created_at(self.connection, self.meta)

    def replace_database(self, reason: str, *, carry: bool, why: str) -> None:
        """Set the file aside as *reason* and go on with a new one, with all that can be read when *carry*."""
        self._behind.wait(WORK_SECONDS)
        self._behind.close()
        with suppress(OSError):  # where the directory cannot be had, memory is next
            self._file.claim_directory()
        is_another = self._file.guard is not None and self._file.guard.is_replaced
        if sys.platform == "win32" and not self.in_memory:
            self._switch_to_memory(why)  # a file that is open cannot be renamed there
        self._flag.clear()
        old, guard, reader = self.connection, self._file.guard, self._file.reader
        self._file.reader = None
        aside = self._file.being_replaced = self._file.set_aside(
            reason, why, in_memory=self.in_memory, is_read=carry and not is_another
        )
        # A file that somebody put in the place of ours is not read.
        readable = [] if is_another or not carry else open_damaged(aside)
        sources = ([old] if carry else []) + readable
        live = None if self.in_memory or not carry else old
        self._file.guard, self.in_memory, self.disk_sequence = None, False, 0
        if not carry:
            self._origin.close_unread()
        self.connection = self._rebuilt(sources, self.meta if carry else {}, live=live)
        if reader is not None:
            reader.close()
        for connection in {old, *sources}.difference(self._origin.unread):
            connection.close()  # after the new one is open: the last to close takes the -wal of that name away
        if guard is not None:
            guard.close()
        self.enter_step(WORK_SECONDS)
        self._file.being_replaced = None
        self.refresh()

    def return_to_disk(self) -> bool:
        """Try to move what is in memory to the disk; return whether the outbox is on disk now."""
        if not self.in_memory:
            return True
        if self._is_written_behind() or not self._has_disk_answered() or self._file.is_locked():
            return False
        self._flag.clear()  # a command that hears of the return may write at once
        disk = Merge(
            self.connection,
            self.meta,
            self._origin,
            file=self._file,
            stream=self._stream,
            room=self._room(),
            now=self._now().timestamp(),
            enter_step=self.enter_step,
            # The first commit to a new -wal makes two things durable, and a slow disk may need the longer time.
            commit_seconds=COMMIT_SECONDS * self.patience_seconds / WORK_SECONDS,
            opened=self._behind.give_up_disk(),
        ).run()
        if disk is None:
            self._flag.set()
            return False
        self.connection.close()
        self._origin.close_unread()
        self.patience_seconds = WORK_SECONDS
        self.connection = disk
        self.in_memory, self.disk_sequence, self._origin.is_blind, self._stream.on_disk = False, 0, False, None
        self.refresh()
        logger.warning("The outbox is back on disk.", extra={"directory": str(self.directory)})
        return True

    def close(self) -> None:
        """Close the connection, after a last try to bring what is in memory to the disk."""
        self._behind.wait(2 * WORK_SECONDS)
        if self.return_to_disk():
            self._stream.note_stop(self.connection, self._file.file_id)
        else:
            logger.error("What is in memory is lost: the disk under the outbox still refuses.")
        self._stream.counter.close()
        self._behind.close()
        self._file.close_reader()
        self.connection.close()
        self._origin.close_unread()
        if self._file.guard is not None:
            self._file.guard.close()
        self._flag.clear()

    # The file.

    def _open(self) -> sqlite3.Connection:
        unread = self._file.unread()
        if unread:
            logger.error(
                "An agent before this one ended while it read a damaged outbox. It is read again.",
                extra={"set_aside_as": [str(path) for path in unread]},
            )
            return self._salvaged([source for path in unread for source in open_damaged(path)])
        try:
            return self._file.open(self._stream)
        except (sqlite3.Error, OSError) as error:
            if is_damage(error):
                return self._replace_damaged(str(error))
            if is_refusal(error) or is_lock(error):
                source = database.open_to_read(self._file.path)
                try:
                    return self._open_memory(str(error), source, {})
                finally:
                    if source is not None:
                        source.close()
            raise OutboxError(f"The outbox {self._file.path} cannot be opened: {error}.") from error

    def _replace_damaged(self, why: str) -> sqlite3.Connection:
        aside = self._file.set_aside("damaged", why, in_memory=self.in_memory)
        return self._salvaged(open_damaged(aside or self._file.path))

    def _salvaged(self, sources: list[sqlite3.Connection]) -> sqlite3.Connection:
        try:
            return self._rebuilt(sources, {})
        finally:
            for source in set(sources).difference(self._origin.unread):
                source.close()

    def _rebuilt(
        self, sources: list[sqlite3.Connection], known: dict[str, str], *, live: sqlite3.Connection | None = None
    ) -> sqlite3.Connection:
        """Return a new file, or memory when the disk refuses, with *known* meta and what can be read of *sources*.

        *live* is the one of them that was open all along.
        """
        try:
            connection = self._file.rebuild(sources, known, live=live, stream=self._stream, room=self._room())
        except (sqlite3.Error, OSError) as error:
            if any(is_large(source) for source in sources):
                self._origin.unread.extend(sources)
                memory = copy_outline(sources, known)
            else:
                memory = database.open_memory()
                fill(memory, sources, known, live=live, stream=self._stream, limit_bytes=COPIED_BYTES)
            return self._begin_in_memory(memory, str(error), is_whole=False)
        prepare_nudge(self.directory)
        return connection

    # Into memory.

    def _switch_to_memory(self, why: str) -> None:
        old, guard = self.connection, self._file.guard
        self.connection, self._file.guard = self._open_memory(why, old, self.meta), None
        self._file.close_reader()
        old.close()
        if guard is not None:
            guard.close()
        self.refresh()

    def _open_memory(self, why: str, source: sqlite3.Connection | None, known: dict[str, str]) -> sqlite3.Connection:
        """Return a copy of *source* in memory, or, when it is large or cannot be copied, what its stream needs."""
        memory = None if source is None else copy_whole(source, self._file.path)
        is_whole = memory is not None
        if memory is None:
            memory = copy_outline([] if source is None else [source], known)
        return self._begin_in_memory(memory, why, is_whole=is_whole)

    def _begin_in_memory(
        self, memory: sqlite3.Connection, why: str, *, is_whole: bool, is_rebuild: bool = False
    ) -> sqlite3.Connection:
        self.in_memory, self._origin.is_blind = True, meta.get(memory, "stream_id") is None
        self._stream.begin(memory)
        self._origin.is_whole = is_whole
        (waiting,) = memory.execute(SQL["count_left_on_disk"]).fetchone()
        logger.error(
            "%s Work goes on in memory (at most %d MiB): what is there when the agent dies is lost. %s%s",
            "The outbox is being rebuilt, which takes long." if is_rebuild else "The disk under the outbox refuses.",
            MEMORY_BYTES // 1024 // 1024,
            "The outbox goes back to the disk by itself."
            if is_rebuild
            else "Free the disk or make it writable; the outbox goes back by itself.",
            f" Until then the records of {waiting} events wait on the disk." if waiting else "",
            extra={"why": why, "directory": str(self.directory)},
        )
        self.disk_sequence = int(meta.get(memory, "next_sequence") or 1) - 1
        self._origin.deleted_before, self._origin.written_back = deleted_rows(memory), None
        self._flag.set()
        return memory

    # A disk that hangs.

    def go_on_in_memory(self, why: str, has_ended: Callable[[], bool]) -> Storage:
        """Return a storage that goes on in memory, from another thread: this one is left in a call to the disk.

        The disk's file is read by another connection, as of its last commit. Where that hangs too, memory begins with
        what is known of the stream, and every active event waits for the disk. It goes back when *has_ended* is true.
        """
        if not self.in_memory:
            self._origin.written_back = None  # of a way back that is over: what the disk has since is read there
        after = copy.copy(self)
        after.enter_step = lambda _limit_seconds: None
        after.continue_after(self, why, has_ended)
        return after

    def continue_after(self, before: Storage, why: str, has_ended: Callable[[], bool]) -> None:
        """Take the place of *before*, of which this is a copy; see `go_on_in_memory`."""
        # What *before* still does to its own, when its call returns, is nothing to this one.
        self._file, self._stream, self._origin = copy.copy(self._file), copy.copy(self._stream), self._origin.copy()
        self._stalled = [*self._stalled, (before, has_ended)]
        self._has_come_back = threading.Event()
        if self.in_memory:
            self.patience_seconds *= 2
            self._flag.set()
            return
        file = self._file
        file.guard, self._origin.unread = None, []
        memory, is_whole = read_beside(
            file.being_replaced or file.path,
            file.reader,
            self.meta,
            is_being_replaced=file.being_replaced is not None,
        )
        file.reader = None
        is_rebuild, file.being_replaced = file.being_replaced is not None, None
        if is_rebuild:
            why = "what can be read of the old file is not yet copied into the new one"
        self.connection = self._begin_in_memory(memory, why, is_whole=is_whole, is_rebuild=is_rebuild)
        self._read_meta()

    def abandon(self, stop: threading.Event) -> None:
        """Close what is on the disk, and return when the disk answers again, or *stop* is set.

        For a storage that another goes on for, on its own thread.
        """
        if not self.in_memory:
            with suppress(sqlite3.Error):
                self.connection.close()
        if self._file.guard is not None:
            self._file.guard.close()
        wait_for_disk(self.directory, stop, self._has_come_back.set)

    def _has_disk_answered(self) -> bool:
        """Return whether no call to the disk hangs any more."""
        if not all(has_ended() for _, has_ended in self._stalled):
            return False
        self._take_over()
        self._stalled = []
        return True

    def _take_over(self) -> None:
        """Go on from what those before have written back after all."""
        for before, _ in self._stalled:
            origin = before._origin  # noqa: SLF001  # of its own kind
            if origin.written_back is not None:
                self._origin.follow(origin, self.connection)
                origin.written_back = None

    def _is_written_behind(self) -> bool:
        """Return whether what is in memory is being written to a slow disk; begin with it where that is to be done."""
        if self._behind.is_on_its_way:
            return True
        if self._behind.has_ended:
            written = self._behind.take()
            if written is None:
                self.disk_sequence = self._sequence_before
            else:
                self._origin.follow(written, self.connection)
        is_slow = all(has_ended() or before._has_come_back.is_set() for before, has_ended in self._stalled)  # noqa: SLF001
        if not is_slow or all(has_ended() for _, has_ended in self._stalled):
            return False
        self._take_over()
        last = self._behind.start(
            self.connection,
            self.meta,
            self._origin,
            file=self._file,
            stream=self._stream,
            now=self._now().timestamp(),
        )
        if last is not None:  # what is on its way to the disk may not be deleted here meanwhile
            self._sequence_before, self.disk_sequence = self.disk_sequence, last
        return last is not None
