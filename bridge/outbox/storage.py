"""Where the outbox lives: a database file, or memory while the disk refuses.

Records must outlive what happens to the file under them, so every misfortune has one answer here:

- full, read-only or failing disk, or a lock that lasts: the database is copied into memory by SQLite's own backup and
  work goes on there; `return_to_disk` tries again.
- damaged, deleted or overwritten file: it is set aside under a new name with its -wal and -shm, never deleted; what
  can still be read, through the open connection or from the file, is copied into a new one, or into memory.
- a file that belongs to another machine: set aside, nothing copied.

A database above 10 MiB is not copied, because an agent on a full disk must not be killed for its memory next. Memory
then starts with what the stream needs to go on; the backlog waits for the disk, and with it every event of which
something waits there (the table `held`), so that no record overtakes another.
A damaged one of that size is kept open meanwhile, and read on the way back.

On the way back the rows of memory are written into the file, not over it: a command may have committed a decision in
the very moment when the disk was left.

A file that may not be the newest of its stream begins a new one (see `newest`): at the start, or on the way back.

A storage belongs to one thread.
"""

from __future__ import annotations

import copy
import logging
import os
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext, suppress
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from bridge.clock import format_time, parse_time, utc_now
from bridge.errors import OutboxError, StateDirectoryError
from bridge.events.diff import is_over
from bridge.events.event import encode
from bridge.events.record import decode_record
from bridge.outbox import database, meta, recovery, retention
from bridge.outbox.database import DATABASE, SQL, TrackedConnection, is_damage, is_lock, is_refusal, transaction
from bridge.outbox.locks import InMemoryFlag, prepare_nudge, read_note, sync_nudge, write_note
from bridge.outbox.newest import Progress, StreamCounter, doubt_of, runtime_directory, stop_note
from bridge.outbox.recovery import COUNTS, FileGuard
from bridge.outbox.stalls import COMMIT_SECONDS, WORK_SECONDS
from bridge.system.threads import run_daemon

logger = logging.getLogger(__name__)

#: What a storage in memory may use: an agent on a full disk must not be killed for its memory next.
MEMORY_BYTES = 16 * 1024 * 1024
_COPIED_BYTES = 10 * 1024 * 1024
#: What a volume has beyond the database: for the -wal, and for pages that are on their way.
_WAL_BYTES = 8 * 1024 * 1024
#: A disk with less is about to be full; so much is given up at once then, or a twentieth if that is more.
_ROOM_BYTES = 1024 * 1024
#: Of so many records memory knows the ids when it is no copy, so that a change seen again gets its repeat.
_RECENT_IDS = 2_000
#: Of meta, what a file knows better than memory.
_OF_THE_FILE = ("stream_id", "created_at", meta.CREATED_AT_CORRECTED, meta.DECISION_CHANGES)
#: In memory no lock is waited for: work goes on meanwhile, and the next try is near.
_PROBE_SECONDS = 0.1
#: A disk that has hung is gone back to once it makes something durable within that time.
_PROMPT_SECONDS = 1.0

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
        self._claim = claim
        """Makes sure that the directory is this agent's, as `DirectoryLock.claim`, before a file is made in it."""
        self.path = directory / DATABASE
        self._counter = StreamCounter(runtime or runtime_directory())
        self.enter_step: Callable[[float], None] = lambda _limit_seconds: None
        """Called before a step that must not happen once another thread goes on instead (`Turn.enter`)."""
        self._being_replaced: Path | None = None
        self._stalled: list[tuple[Storage, Callable[[], bool]]] = []
        """In memory: those before, each left to a thread in a call to the disk; and whether that has ended."""
        self.written_back: _Deleted | None = None
        """In memory: what `_deleted` found when all of it was last written into the file."""
        self.patience_seconds = WORK_SECONDS
        """How long the way back to the disk may take."""
        self._is_stream_new = self._is_settled = False
        self._stream_on_disk: str | None = None
        """In memory: the stream of the file, where memory began another because the file may not be the newest."""
        self._max_bytes = max_bytes
        self._bound = max_bytes
        self._may_make_room = True
        self._now = now
        self._monotonic = monotonic
        self._known_since = monotonic()
        """When the database was made, or opened by this process if it is older; in monotonic seconds."""
        self._guard: FileGuard | None = None
        self._reader: sqlite3.Connection | None = None
        """Open on the file too, and idle: what is there can be read by it while the other connection hangs."""
        self._flag = InMemoryFlag(directory)
        self._is_blind = False
        """In memory: the disk could not even be read, so memory began a stream of its own."""
        self._is_whole = False
        """In memory: it began as a copy of all that the disk has."""
        self._unread: list[sqlite3.Connection] = []
        """In memory: damaged databases that are too large for it; they are read on the way back to the disk."""
        self._deleted_before: _Deleted = Counter()
        self.set_aside_count = 0
        """How many databases were set aside since the start: damaged ones, and those of another machine."""
        self.disk_sequence = 0
        """In memory: the last sequence that the disk has too; up to it nothing may be deleted. Else 0."""
        self.in_memory = False
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
            if self._is_stream_new:
                write_note(self.directory, "{}")
            else:
                self._continue_stream(self.connection)
        except sqlite3.Error as error:
            self.recover(error)
            self._continue_stream(self.connection)
        self._is_settled = True
        self._read_meta()

    @property
    def max_bytes(self) -> int:
        """How much the outbox may use where it lives now."""
        return MEMORY_BYTES if self.in_memory else self._bound

    def refresh(self) -> None:
        """Read meta again after a commit that may have changed it."""
        self._may_make_room = True
        connection = self.connection
        if not isinstance(connection, TrackedConnection) or connection.meta_changed:
            self._read_meta()
        if isinstance(connection, TrackedConnection):
            connection.meta_changed = False

    def _read_meta(self) -> None:
        self.meta = meta.read_meta(self.connection)
        if self._is_settled:
            progress = Progress(
                next_sequence=meta.next_sequence(self.meta), decision_changes=meta.decision_changes(self.meta)
            )
            self._counter.note(self.meta["stream_id"], progress)

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
        return is_first and self._make_room()

    def _look_at_volume(self) -> None:
        """Bound the outbox by its volume, which needs room for the -wal too, and make room there before it is full."""
        try:
            found = os.statvfs(self.directory)
        except (OSError, AttributeError):  # Windows has no such call
            return
        size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        if size:
            self._bound = min(self._max_bytes, size - min(_WAL_BYTES, size // 2))
        if size and free < _ROOM_BYTES and not self.in_memory:
            self._make_room()

    def _make_room(self) -> bool:
        """Give up what is delivered for a disk without room, the oldest first; return whether there was any.

        In small steps: to delete takes room in the -wal, and what it has may be all there is.
        """
        connection, deleted = self.connection, 0
        try:
            before = database.used_bytes(connection)
            while database.used_bytes(connection) > before - max(_ROOM_BYTES, before // 20):
                with suppress(sqlite3.Error):  # the file itself may have to grow for it
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                with transaction(connection):
                    count = retention.delete_delivered(connection)
                if not count:
                    break
                deleted += count
            if deleted:
                connection.execute("PRAGMA incremental_vacuum").fetchall()
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error:
            return False
        if deleted:
            logger.warning(
                "The disk under the outbox is full: %d delivered records were given up before their time.", deleted
            )
        return deleted > 0

    def check_file(self) -> None:
        """Replace the database if its file is no longer the one that is open, and look at its volume."""
        trouble = None if self.in_memory or self._guard is None else self._guard.trouble()
        if trouble is not None:
            self.replace_database("damaged", carry=True, why=trouble)
        elif not self.in_memory:
            self._look_at_volume()

    @property
    def is_creation_to_correct(self) -> bool:
        """Return whether `correct_created_at` has something to do."""
        if self.in_memory:
            return False
        if self._is_made_in_future:
            return self._now() < meta.created_at(self.meta)
        return bool(self.meta.get(meta.CREATED_AT_CORRECTED))

    @property
    def _is_made_in_future(self) -> bool:
        return self._now() < parse_time(self.meta["created_at"])

    def correct_created_at(self) -> None:
        """Have a database that was made while the clock was ahead count as made when it was, inside a transaction.

        Only until the clock reaches that time: it may as well be behind now, and what was decided before the database
        was made must not count for good.
        """
        if not self.is_creation_to_correct:
            return
        if not self._is_made_in_future:
            logger.info("The clock has reached the time when the outbox was made, which counts again.")
            meta.put(self.connection, meta.CREATED_AT_CORRECTED, "")
            return
        made_at = self._now() - timedelta(seconds=self._monotonic() - self._known_since)
        logger.warning(
            "The outbox was made at a time that the clock has not reached: it was ahead then, or is behind now. Until "
            "it reaches that time the outbox counts as made at %s, and decisions from then on count.",
            format_time(made_at),
            extra={"before": self.meta["created_at"]},
        )
        meta.put(self.connection, meta.CREATED_AT_CORRECTED, format_time(made_at))

    def replace_database(self, reason: str, *, carry: bool, why: str) -> None:
        """Set the file aside as *reason* and go on with a new one, with all that can be read when *carry*."""
        with suppress(OSError):  # where the directory cannot be had, memory is next
            self._claim_directory()
        is_another = self._guard is not None and self._guard.is_replaced
        if sys.platform == "win32" and not self.in_memory:
            self._switch_to_memory(why)  # a file that is open cannot be renamed there
        self._flag.clear()
        old, guard, reader = self.connection, self._guard, self._reader
        self._reader = None
        aside = self._being_replaced = self._set_aside(reason, why)
        # A file that somebody put in the place of ours is not read.
        readable = None if is_another or not carry else database.open_to_read(aside)
        sources = ([old] if carry else []) + ([] if readable is None else [readable])
        live = None if self.in_memory or not carry else old
        self._guard, self.in_memory, self.disk_sequence = None, False, 0
        if not carry:
            self._close_unread()
        self.connection = self._rebuilt(sources, self.meta if carry else {}, live=live)
        if reader is not None:
            reader.close()
        for connection in {old, *sources}.difference(self._unread):
            connection.close()  # after the new one is open: the last to close takes the -wal of that name away
        if guard is not None:
            guard.close()
        self.enter_step(WORK_SECONDS)
        self._being_replaced = None
        self.refresh()

    def return_to_disk(self) -> bool:
        """Try to move what is in memory to the disk; return whether the outbox is on disk now."""
        if not self.in_memory:
            return True
        if not self._has_disk_answered() or self._is_locked():
            return False
        self._flag.clear()  # a command that hears of the return may write at once
        disk = self._merged()
        if disk is None:
            self._flag.set()
            return False
        self.connection.close()
        self._close_unread()
        self.patience_seconds = WORK_SECONDS
        self.connection = disk
        self.in_memory, self.disk_sequence, self._is_blind, self._stream_on_disk = False, 0, False, None
        self.refresh()
        logger.warning("The outbox is back on disk.", extra={"directory": str(self.directory)})
        return True

    def close(self) -> None:
        """Close the connection, after a last try to bring what is in memory to the disk."""
        if self.return_to_disk():
            self._note_stop()
        else:
            logger.error("What is in memory is lost: the disk under the outbox still refuses.")
        self._counter.close()
        self._close_reader()
        self.connection.close()
        self._close_unread()
        if self._guard is not None:
            self._guard.close()
        self._flag.clear()

    def _watch_file(self) -> None:
        """Notice from now on what becomes of the file, and keep a second connection to read it by."""
        self._guard = FileGuard(self.path)
        self._reader = database.open_to_read(self.path)

    def _close_reader(self) -> None:
        """Close the second connection; before the other, which takes the -wal along as the last one."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _note_stop(self) -> None:
        """Note that the agent ends in order; without that note the next start may begin a new stream."""
        with suppress(sqlite3.Error):
            write_note(self.directory, stop_note(meta.read_meta(self.connection), self._now()))

    def _continue_stream(self, connection: sqlite3.Connection) -> None:
        """Begin a new stream in *connection* when it is not sure to be the newest of its own.

        What a start finds in memory is less sure: no note of a stop can be taken back there.
        """
        known = meta.read_meta(connection)
        is_memory = database.is_in_memory(connection)
        note = read_note(self.directory)
        doubt = doubt_of(known, self._counter, self._now(), note if not (is_memory and note) else None)
        if not note:
            write_note(self.directory, "{}")  # from now on it counts that there is no note of a stop
        if doubt is None:
            return
        with nullcontext() if connection.in_transaction else transaction(connection):
            meta.change_stream(connection)
            if doubt.lacks_decisions:
                self._forget_decisions(connection)
            elif doubt.may_lack_decisions:
                meta.await_portal(connection)
        if is_memory:
            self._stream_on_disk = known["stream_id"]
        logger.warning(
            "The outbox may not be the newest that this machine had: it was restored, or the agent ended while it "
            "worked from memory or was cut off. Its records go on in a new stream, so that no sequence comes twice.",
            extra={"why": doubt.why, "before": known["stream_id"], "stream_id": meta.get(connection, "stream_id")},
        )

    def _close_unread(self) -> None:
        for connection in self._unread:
            connection.close()
        self._unread.clear()

    # On disk.

    def _open(self) -> sqlite3.Connection:
        try:
            return self._open_disk()
        except (sqlite3.Error, OSError) as error:
            if is_damage(error):
                return self._replace_damaged(str(error))
            if is_refusal(error) or is_lock(error):
                source = database.open_to_read(self.path)
                try:
                    return self._open_memory(str(error), source, {})
                finally:
                    if source is not None:
                        source.close()
            raise OutboxError(f"The outbox {self.path} cannot be opened: {error}.") from error

    def _open_disk(self) -> sqlite3.Connection:
        """Return a connection to the file, made if need be, that was checked and takes writes."""
        database.refuse_emptied(self.path)
        connection = database.open_file(self.path)
        try:
            database.check(connection, self.path)
            self._is_stream_new = meta.begin_stream(connection, self._now())
            self._watch_file()
        except BaseException:
            connection.close()
            raise
        prepare_nudge(self.directory)
        return connection

    def _replace_damaged(self, why: str) -> sqlite3.Connection:
        source = database.open_to_read(self._set_aside("damaged", why) or self.path)
        try:
            return self._rebuilt([] if source is None else [source], {})
        finally:
            if source is not None and source not in self._unread:
                source.close()

    def _rebuilt(
        self, sources: list[sqlite3.Connection], known: dict[str, str], *, live: sqlite3.Connection | None = None
    ) -> sqlite3.Connection:
        """Return a new file, or memory when the disk refuses, with *known* meta and what can be read of *sources*.

        *live* is the one of them that was open all along.
        """
        try:
            connection = self._open_new()
            try:
                self._fill(connection, sources, known, live=live)
                self._is_stream_new = meta.begin_stream(connection, self._now())
                self._watch_file()
            except BaseException:
                connection.close()
                raise
        except (sqlite3.Error, OSError) as error:
            memory = database.open_memory()
            if any(_is_large(source) for source in sources):
                self._unread.extend(sources)
                with transaction(memory):
                    self._outline(memory, sources, known)
            else:
                self._fill(memory, sources, known, live=live, limit_bytes=_COPIED_BYTES)
            return self._begin_in_memory(memory, str(error), is_whole=False)
        prepare_nudge(self.directory)
        return connection

    def _fill(
        self,
        connection: sqlite3.Connection,
        sources: list[sqlite3.Connection],
        known: dict[str, str],
        *,
        live: sqlite3.Connection | None,
        limit_bytes: float = float("inf"),
    ) -> None:
        with transaction(connection):
            for key, value in known.items():
                meta.put(connection, key, value)
            recovery.copy_readable(sources, connection, limit_bytes=limit_bytes)
            if not recovery.copy_decisions(sources, connection, live=live):
                self._forget_decisions(connection)

    def _claim_directory(self) -> None:
        """Raise OutboxError when the directory is another agent's now: what is there is not touched."""
        try:
            self._claim()
        except StateDirectoryError as error:
            raise OutboxError(str(error)) from error

    def _forget_decisions(self, connection: sqlite3.Connection) -> None:
        """Have the database count as made now: some of its decisions are gone, and must not come again."""
        self._known_since = self._monotonic()
        meta.forget_decisions(connection, self._now())

    def _open_new(self) -> sqlite3.Connection:
        self._claim_directory()
        if database.is_in_the_way(self.path):
            raise OSError(f"{self.path} cannot be renamed")
        return database.open_file(self.path)

    def _set_aside(self, reason: str, why: str) -> Path | None:
        aside = database.set_aside(self.path, reason, self._now())
        self.set_aside_count += aside is not None
        # In memory a damaged file that cannot be renamed is found again and again; it was logged the first time.
        if aside is not None or reason != "damaged" or not self.in_memory:
            logger.log(
                logging.ERROR if reason == "damaged" else logging.WARNING,
                _DAMAGED if reason == "damaged" else _FOREIGN,
                extra={"why": why, "set_aside_as": str(aside), "directory": str(self.directory)},
            )
        return aside

    # Into memory.

    def _switch_to_memory(self, why: str) -> None:
        old, guard = self.connection, self._guard
        self.connection, self._guard = self._open_memory(why, old, self.meta), None
        self._close_reader()
        old.close()
        if guard is not None:
            guard.close()
        self.refresh()

    def _open_memory(self, why: str, source: sqlite3.Connection | None, known: dict[str, str]) -> sqlite3.Connection:
        """Return a copy of *source* in memory, or, when it is large or cannot be copied, what its stream needs."""
        memory = None if source is None else _copy(source, self.path)
        is_whole = memory is not None
        if memory is None:
            memory = database.open_memory()
            with transaction(memory):
                self._outline(memory, [] if source is None else [source], known)
        return self._begin_in_memory(memory, why, is_whole=is_whole)

    def _outline(self, memory: sqlite3.Connection, sources: list[sqlite3.Connection], known: dict[str, str]) -> None:
        for key, value in known.items():
            meta.put(memory, key, value)
        for source in sources:
            _copy_outline(source, memory)
            recovery.copy_holds(source, memory)
        recovery.keep_sequence_ahead(memory)

    def _begin_in_memory(self, memory: sqlite3.Connection, why: str, *, is_whole: bool) -> sqlite3.Connection:
        self.in_memory, self._is_blind = True, meta.get(memory, "stream_id") is None
        self._is_stream_new = meta.begin_stream(memory, self._now())
        self._is_whole = is_whole
        (waiting,) = memory.execute(SQL["count_left_on_disk"]).fetchone()
        logger.error(
            "The disk under the outbox refuses. Work goes on in memory (at most %d MiB): what is there when the agent "
            "dies is lost. Free the disk or make it writable; the outbox goes back by itself.%s",
            MEMORY_BYTES // 1024 // 1024,
            f" Until then the records of {waiting} events wait on the disk." if waiting else "",
            extra={"why": why, "directory": str(self.directory)},
        )
        self.disk_sequence = int(meta.get(memory, "next_sequence") or 1) - 1
        self._deleted_before = _deleted(memory)
        self._flag.set()
        return memory

    # A disk that hangs.

    def go_on_in_memory(self, why: str, has_ended: Callable[[], bool]) -> Storage:
        """Return a storage that goes on in memory, from another thread: this one is left in a call to the disk.

        The disk's file is read by another connection, as of its last commit. Where that hangs too, memory begins with
        what is known of the stream, and every active event waits for the disk. It goes back when *has_ended* is true.
        """
        after = copy.copy(self)
        after.enter_step = lambda _limit_seconds: None
        after.continue_after(self, why, has_ended)
        return after

    def continue_after(self, before: Storage, why: str, has_ended: Callable[[], bool]) -> None:
        """Take the place of *before*, of which this is a copy; see `go_on_in_memory`."""
        self._stalled = [*self._stalled, (before, has_ended)]
        if self.in_memory:
            self.patience_seconds *= 2
            self._flag.set()
            return
        self._guard, self._unread = None, []
        memory, is_whole = self._read_beside()
        self._reader = None
        self.connection = self._begin_in_memory(memory, why, is_whole=is_whole)
        self._read_meta()

    def _read_beside(self) -> tuple[sqlite3.Connection, bool]:
        """Return a copy in memory of what is on the disk, or an outline of it, and which of these it is."""
        found = run_daemon("outbox-copy", self._copied, self._being_replaced or self.path)
        with suppress(Exception):  # whatever it is, the disk gave nothing
            return found.result(COMMIT_SECONDS)
        memory = database.open_memory()
        document = meta.document_of(self.meta)
        with transaction(memory):
            self._outline(memory, [], self.meta)
            events = () if document is None else document.events
            memory.executemany(SQL["leave_on_disk"], [(event.key,) for event in events])
        return memory, False

    def _copied(self, path: Path) -> tuple[sqlite3.Connection, bool]:
        source = self._reader or database.open_to_read(path)
        if source is None:
            raise OutboxError(f"{path} cannot be read.")
        with closing(source):
            memory = _copy(source, path)
            if memory is not None:
                return memory, True
            memory = database.open_memory()
            with transaction(memory):
                self._outline(memory, [source], self.meta if self._being_replaced else {})
                if meta.get(memory, "next_sequence") is None:
                    raise OutboxError(f"{path} could be read in part only.")
            return memory, False

    def abandon(self, stop: threading.Event) -> None:
        """Close what is on the disk, and return when the disk answers again, or *stop* is set.

        For a storage that another goes on for, on its own thread.
        """
        if not self.in_memory:
            with suppress(sqlite3.Error):
                self.connection.close()
        if self._guard is not None:
            self._guard.close()
        while not stop.is_set() and _sync_seconds(self.directory) > _PROMPT_SECONDS:
            stop.wait(_PROMPT_SECONDS)

    def _has_disk_answered(self) -> bool:
        """Return whether no call to the disk hangs any more."""
        if not all(has_ended() for _, has_ended in self._stalled):
            return False
        for before, _ in self._stalled:
            if before.written_back is not None:  # its commit was done after all
                self._deleted_before = before.written_back
        self._stalled = []
        return True

    # Back to disk.

    def _is_locked(self) -> bool:
        """Return whether another program has the file locked; `_merge` finds whatever else is wrong with it."""
        if self.path.is_symlink() or not self.path.exists() or self.path.stat().st_size == 0:
            return False
        try:
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=_PROBE_SECONDS)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as error:
            return is_lock(error)
        return False

    def _merged(self) -> sqlite3.Connection | None:
        """Return the disk's database with all that happened in memory, or None when that cannot be had now."""
        try:
            return self._merge()
        except (sqlite3.Error, OSError, OutboxError) as error:
            if not is_damage(error):
                if isinstance(error, OutboxError):
                    logger.error("The outbox stays in memory: %s", error)  # noqa: TRY400  # the sentence says it all
                return None
            aside = self._set_aside("damaged", str(error))
            damaged = None if self._is_whole else database.open_to_read(aside)
            if damaged is not None:
                self._unread.append(damaged)
        try:
            return self._merge()
        except (sqlite3.Error, OSError, OutboxError):
            return None

    def _merge(self) -> sqlite3.Connection:
        """Return the file with what can be read of damaged ones and all of memory; raise and change nothing."""
        disk = self._file_to_return_to()
        try:
            with transaction(disk):
                is_new = meta.get(disk, "stream_id") is None
                if not is_new:
                    self._join_streams(disk)
                is_alone = is_new and not self._unread  # there is nothing but memory to tell what was
                if self._unread:
                    recovery.copy_readable(self._unread, disk)
                deleted = _deleted(self.connection)
                if not is_alone:
                    deleted.subtract(self._deleted_before)
                _write_back(self.connection, disk, is_blind=self._is_blind and not is_alone, deleted=deleted)
                if is_new:
                    recovery.copy_decisions([*self._unread, self.connection], disk)
                    self._forget_decisions(disk)
                counted = _deleted(self.connection)
                self.enter_step(COMMIT_SECONDS)
            self.written_back = counted
            self.enter_step(WORK_SECONDS)
            self._watch_file()
        except BaseException:
            disk.close()
            raise
        prepare_nudge(self.directory)
        return disk

    def _join_streams(self, disk: sqlite3.Connection) -> None:
        """Have *disk* go on with the stream of memory, where that is not the same, or with one that is sure."""
        if self._is_blind:
            self._continue_stream(disk)
        elif meta.get(disk, "stream_id") != self.meta["stream_id"]:
            meta.put(disk, "stream_id", self.meta["stream_id"])

    def _file_to_return_to(self) -> sqlite3.Connection:
        self._claim_directory()
        database.refuse_emptied(self.path)
        disk = database.open_file(self.path)
        try:
            database.check(disk, self.path)
            theirs = meta.read_meta(disk)
            if self._is_ours(theirs):
                self._refuse_older(theirs)
                return disk
        except BaseException:
            disk.close()
            raise
        disk.close()
        aside = database.set_aside(self.path, "other-vm", self._now())
        self.set_aside_count += aside is not None
        logger.error("The state directory holds another outbox; it is set aside.", extra={"set_aside_as": str(aside)})
        return self._open_new()

    def _refuse_older(self, theirs: dict[str, str]) -> None:
        """Raise sqlite3.DatabaseError for a file that has lost decisions which the agent had committed there.

        A -wal that was cut off looks like a disk that fails, and leaves a sound database of an earlier time behind.
        """
        if self._is_of_stream(theirs) and meta.decision_changes(theirs) < meta.decision_changes(self.meta):
            raise sqlite3.DatabaseError(f"{self.path.name} is malformed: it has lost its last decisions")

    def _is_ours(self, theirs: dict[str, str]) -> bool:
        their_vm, my_vm = meta.vm_id_of(theirs), meta.vm_id_of(self.meta)
        is_mine = theirs.get("stream_id") is None or self._is_of_stream(theirs)
        return is_mine or (self._is_blind and (None in (their_vm, my_vm) or their_vm == my_vm))

    def _is_of_stream(self, theirs: dict[str, str]) -> bool:
        """Return whether the file that remembers *theirs* is the one that memory came from."""
        return theirs.get("stream_id") in {self.meta["stream_id"], self._stream_on_disk} - {None}


def _sync_seconds(directory: Path) -> float:
    """Return how long the disk takes to make something durable, or to say why it does not."""
    started = time.monotonic()
    sync_nudge(directory)
    return time.monotonic() - started


_Deleted = Counter[tuple[str, str]]
"""(sink, state) -> how many rows were counted there and are deleted now."""


def _is_large(source: sqlite3.Connection) -> bool:
    """Return whether *source* is more than is taken into memory, as far as it can be read."""
    try:
        return _size(source) > _COPIED_BYTES
    except sqlite3.Error:
        return False


def _size(source: sqlite3.Connection) -> int:
    pages, size = (int(source.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size"))
    return pages * size


def _copy(source: sqlite3.Connection, path: Path) -> sqlite3.Connection | None:
    """Return a copy of *source* in memory; None when it is too large, or its disk or its pages do not allow it."""
    try:
        if _size(source) > _COPIED_BYTES:
            return None
        memory = database.open_memory(empty=True)
        try:
            source.backup(memory)
            database.check(memory, path)
            database.create_schema(memory)  # of an agent that died before it made the tables
            database.add_tables(memory)
        except BaseException:
            memory.close()
            raise
    except sqlite3.Error:
        return None
    return memory


def _copy_outline(source: sqlite3.Connection, memory: sqlite3.Connection) -> None:
    """Copy what the stream needs to go on without the records: all but what *memory* has already.

    That is meta, the totals, which events wait on the disk, recent ids, and the last record of each active event, which
    a sink that is new gets.
    """
    try:
        for key, value in source.execute(SQL["get_meta"]).fetchall():
            if meta.get(memory, key) is None:
                meta.put(memory, key, value)
        memory.executemany(SQL["leave_on_disk"], source.execute(SQL["waiting_events"]))
        document = meta.document_of(meta.read_meta(memory))
        for key in () if document is None else {event.key for event in document.events if not is_over(event)}:
            memory.executemany(SQL["paste_record"], source.execute(SQL["copy_last_of_event"], (key,)))
        memory.executemany(SQL["paste_record"], source.execute(SQL["copy_recent_ids"], (_RECENT_IDS,)))
        for name, *counts in source.execute(SQL["copy_sinks"]).fetchall():
            _set_totals(memory, name, counts)
    except sqlite3.Error as error:
        logger.info("The outbox on disk could be read in part only.", extra={"why": str(error)})


def _write_back(memory: sqlite3.Connection, disk: sqlite3.Connection, *, is_blind: bool, deleted: _Deleted) -> None:
    """Write into *disk*, inside its transaction, what happened in *memory*; the triggers of the disk count it.

    When memory is blind, its stream is joined to the disk's: its records get sequences behind those of the disk. Those
    that the disk has under the same id are left out: they are the same changes, seen again.
    """
    recovery.keep_sequence_ahead(disk)
    on_disk = meta.read_meta(disk)
    in_memory = meta.read_meta(memory)
    stream_id, following = on_disk.get("stream_id", in_memory["stream_id"]), int(on_disk["next_sequence"])
    moved: dict[int, int] = {}
    for row in memory.execute(SQL["copy_records"]):
        if not is_blind:
            _put_record(disk, row)
            moved[row[0]] = row[0]
        elif disk.execute(SQL["has_id"], (row[1], 0)).fetchone() is None:
            record = msgspec.structs.replace(decode_record(row[6]), stream_id=stream_id, sequence=following)
            disk.execute(SQL["paste_record"], (following, *row[1:6], encode(record).decode()))
            moved[row[0]], following = following, following + 1
    for sink, sequence, *rest in memory.execute(SQL["copy_deliveries"]):
        if sequence in moved:
            disk.execute(SQL["paste_delivery"], (sink, moved[sequence], *rest))
    _add_deleted(disk, deleted)
    of_the_stream = {key: on_disk[key] for key in _OF_THE_FILE if key in on_disk}
    if of_the_stream:  # the disk had its decisions all along
        in_memory.pop(meta.AWAITS_PORTAL, None)
    for key, value in (in_memory | of_the_stream).items():
        meta.put(disk, key, value)
    recovery.keep_sequence_ahead(disk)
    disk.executemany(SQL["add_start_mark"], memory.execute(SQL["copy_start_marks"]))
    disk.execute(SQL["align_urgency"])


def _put_record(disk: sqlite3.Connection, row: recovery.Row) -> None:
    """Write one record; an id that only the disk knew may not keep it out."""
    sequence, own_id, *rest = row
    if disk.execute(SQL["has_id"], (own_id, sequence)).fetchone() is not None:
        own_id = f"{own_id}/{sequence}"
    disk.execute(SQL["put_record"], (sequence, own_id, *rest))


def _deleted(connection: sqlite3.Connection) -> _Deleted:
    """Return how many rows the totals count that are not there any more."""
    deleted: _Deleted = Counter()
    for name, *counts in connection.execute(SQL["copy_sinks"]):
        for state, count in zip(COUNTS[1:-1], counts[1:-1], strict=True):
            deleted[name, state] += count
    for sink, state, count in connection.execute(SQL["count_rows"]):
        deleted[sink, state] -= count
    return deleted


def _add_deleted(disk: sqlite3.Connection, deleted: _Deleted) -> None:
    """Count in the totals of *disk* the rows that came and went in memory alone; what no sink got is evicted."""
    totals = {name: counts for name, *counts in disk.execute(SQL["copy_sinks"])}
    for (sink, state), count in deleted.items():
        counts = totals.setdefault(sink, [0] * len(COUNTS))
        counts[COUNTS.index("evicted" if state in ("pending", "parked") else state)] += count
        counts[0] += count
    for sink, counts in totals.items():
        _set_totals(disk, sink, counts)


def _set_totals(connection: sqlite3.Connection, name: str, counts: Iterable[int]) -> None:
    values: dict[str, object] = {"name": name}
    values.update(zip(COUNTS, counts, strict=True))
    connection.execute(SQL["set_totals"], values)
