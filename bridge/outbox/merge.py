"""The way back to the disk: what happened in memory is written into the file, beside what the file has.

The rows of memory are written into the file, not over it: a command may have committed a decision in the very moment
when the disk was left. Totals are kept by the triggers of the file; rows that came and went in memory alone are counted
by what the totals lack (`deleted_rows`).

A file that is not the one memory came from is set aside, and so is one that is damaged, or has lost what the agent had
committed there.
"""

from __future__ import annotations

import copy
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from bridge.errors import OutboxError
from bridge.events.event import encode
from bridge.events.record import decode_record
from bridge.outbox import database, meta, recovery, retention, salvage_note
from bridge.outbox.database import SQL, is_damage, transaction
from bridge.outbox.disk_file import DiskFile
from bridge.outbox.leaf_pages import open_damaged
from bridge.outbox.locks import prepare_nudge
from bridge.outbox.memory_copy import set_totals
from bridge.outbox.recovery import COUNTS, FileGuard
from bridge.outbox.stalls import COMMIT_SECONDS, WORK_SECONDS
from bridge.outbox.stream import Stream
from bridge.outbox.volume import VolumeRoom

logger = logging.getLogger("bridge.outbox.storage")  # the name that logs are filtered by, for all of its parts

#: Of meta, what a file knows better than memory.
_OF_THE_FILE = ("stream_id", "created_at", meta.CREATED_AT_CORRECTED, meta.DECISION_CHANGES)

DeletedRows = Counter[tuple[str, str]]
"""(sink, state) -> how many rows were counted there and are deleted now."""


class MemoryOrigin:
    """How an outbox in memory began, and what is kept for its way back."""

    def __init__(self) -> None:
        self.is_blind = False
        """The disk could not even be read, so memory began a stream of its own."""
        self.is_whole = False
        """It began as a copy of all that the disk has."""
        self.unread: list[sqlite3.Connection] = []
        """Damaged databases that are too large for memory; they are read on the way back to the disk."""
        self.deleted_before: DeletedRows = Counter()
        self.written_back: DeletedRows | None = None
        """What `deleted_rows` found when all of memory was last written into the file."""
        self.given_up: list[int] = []
        """The sequences that were deleted in the file then, for its volume."""

    @property
    def is_sure(self) -> bool:
        """Return whether the file that memory came from was read, and there is no other to be read."""
        return not self.is_blind and not self.unread

    def copy(self) -> MemoryOrigin:
        """Return one that changes by itself."""
        own = copy.copy(self)
        own.unread, own.deleted_before = list(self.unread), DeletedRows(self.deleted_before)
        own.written_back, own.given_up = None, []
        return own

    def follow(self, before: MemoryOrigin, memory: sqlite3.Connection) -> None:
        """Go on from what *before* has written into the file; what it gave up there goes in *memory* too."""
        self.deleted_before = DeletedRows(before.written_back)
        self.deleted_before.subtract(deleted_rows(memory))
        with transaction(memory):
            retention.forget(memory, before.given_up)
        self.deleted_before.update(deleted_rows(memory))

    def close_unread(self) -> None:
        """Close the damaged databases: they were read, or are not to be read any more."""
        for connection in self.unread:
            connection.close()
        self.unread.clear()


class OpenDisk(NamedTuple):
    """A connection to the file that memory came from, and what notices when that is another."""

    connection: sqlite3.Connection
    guard: FileGuard | None

    @property
    def is_in_place(self) -> bool:
        """Return whether the file is the one that was opened."""
        return self.guard is not None and self.guard.trouble() is None

    def close(self) -> None:
        """Close both, the guard last."""
        self.connection.close()
        if self.guard is not None:
            self.guard.close()


class Merge:
    """One try to bring *memory*, which remembers *known*, to the disk.

    *enter_step* is called before a step that must not happen once another thread goes on instead. *opened* is a
    connection that is open already; it is closed unless it is what the way back leads to.
    """

    def __init__(
        self,
        memory: sqlite3.Connection,
        known: Mapping[str, str],
        origin: MemoryOrigin,
        *,
        file: DiskFile,
        stream: Stream,
        room: VolumeRoom | None,
        now: float,
        enter_step: Callable[[float], None],
        commit_seconds: float = COMMIT_SECONDS,
        opened: OpenDisk | None = None,
    ) -> None:
        self._memory = memory
        self._known = known
        self._origin = origin
        self._file = file
        self._stream = stream
        self._room = room
        self._now = now
        self._enter_step = enter_step
        self._commit_seconds = commit_seconds
        self._may_replace = True
        self._opened = opened
        self._guard: FileGuard | None = None
        """That of the connection in use, where it was open already."""

    def run(self) -> sqlite3.Connection | None:
        """Return the disk's database with all that happened in memory, or None when that cannot be had now."""
        try:
            return self._merge()
        except (sqlite3.Error, OSError, OutboxError) as error:
            if not is_damage(error):
                if isinstance(error, OutboxError):
                    logger.error("The outbox stays in memory: %s", error)  # noqa: TRY400  # the sentence says it all
                return None
            aside = self._file.set_aside("damaged", str(error), in_memory=True)
            if not self._origin.is_whole:
                self._origin.unread.extend(open_damaged(aside))
        try:
            return self._merge()
        except (sqlite3.Error, OSError, OutboxError):
            return None

    def write_into_own(self) -> sqlite3.Connection:
        """Return the file that memory came from with all that happened; raise when there is another, or any trouble."""
        self._may_replace = False
        return self._merge()

    def _merge(self) -> sqlite3.Connection:
        """Return the file with what can be read of damaged ones and all of memory; raise and change nothing."""
        disk = self._file_to_return_to()
        try:
            self._prepare_volume(disk)
            with transaction(disk):
                is_new = meta.get(disk, "stream_id") is None
                if not is_new:
                    self._join_streams(disk)
                is_alone = is_new and not self._origin.unread  # there is nothing but memory to tell what was
                if self._origin.unread:
                    recovery.copy_readable(self._origin.unread, disk)
                deleted = deleted_rows(self._memory)
                if not is_alone:
                    deleted.subtract(self._origin.deleted_before)
                _write_back(self._memory, disk, is_blind=self._origin.is_blind and not is_alone, deleted=deleted)
                if is_new:
                    recovery.copy_decisions([*self._origin.unread, self._memory], disk)
                    self._stream.forget_decisions(disk)
                given_up = self._fit_volume(disk)
                counted = deleted_rows(self._memory)
                self._enter_step(self._commit_seconds)
            self._origin.written_back, self._origin.given_up = counted, given_up
            salvage_note.end(self._file.directory)
            disk.execute("PRAGMA cache_spill = ON")
            self._enter_step(WORK_SECONDS)
            self._file.watch(self._guard)
        except BaseException:
            self._close(disk)
            raise
        prepare_nudge(self._file.directory)
        return disk

    def _prepare_volume(self, disk: sqlite3.Connection) -> None:
        """See to it that what comes can be written, if there is room for it; raise sqlite3.Error if there is not."""
        room = self._room
        if room is None:
            return
        if room.is_almost_full:
            database.cut_wal(disk)
        if room.longest_wal_bytes is not None:
            database.check_wal(disk, self._file.path, room.longest_wal_bytes)
        if not self._origin.unread and database.used_bytes(self._memory) > room.finished_bytes // 2:
            disk.execute("PRAGMA cache_spill = OFF")  # what `_fit_volume` gives up is not written at all

    def _fit_volume(self, disk: sqlite3.Connection) -> list[int]:
        if self._room is None:
            return []
        return retention.fit_volume(
            disk, max_bytes=self._room.bound_bytes, finished_bytes=self._room.finished_bytes, now=self._now
        )

    def _join_streams(self, disk: sqlite3.Connection) -> None:
        """Have *disk* go on with the stream of memory, where that is not the same, or with one that is sure."""
        if self._origin.is_blind:
            self._stream.go_on_in(disk)
        elif meta.get(disk, "stream_id") != self._known["stream_id"]:
            meta.put(disk, "stream_id", self._known["stream_id"])

    def _file_to_return_to(self) -> sqlite3.Connection:
        self._file.claim_directory()
        database.refuse_emptied(self._file.path)
        disk = self._open()
        try:
            database.check(disk, self._file.path)
            theirs = meta.read_meta(disk)
            if self._is_ours(theirs):
                self._refuse_older(theirs)
                return disk
        except BaseException:
            self._close(disk)
            raise
        self._close(disk)
        if not self._may_replace:
            raise OutboxError(f"{self._file.path} is another outbox.")
        aside = self._file.rename("other-vm")
        logger.error("The state directory holds another outbox; it is set aside.", extra={"set_aside_as": str(aside)})
        return self._file.open_new()

    def _open(self) -> sqlite3.Connection:
        opened, self._opened = self._opened, None
        if opened is not None and opened.is_in_place:
            self._guard = opened.guard
            return opened.connection
        disk = database.open_file(self._file.path)
        if opened is not None:
            opened.close()
        return disk

    def _close(self, disk: sqlite3.Connection) -> None:
        guard, self._guard = self._guard, None
        OpenDisk(connection=disk, guard=guard).close()

    def _refuse_older(self, theirs: dict[str, str]) -> None:
        """Raise sqlite3.DatabaseError for a file that has lost decisions which the agent had committed there.

        A -wal that was cut off looks like a disk that fails, and leaves a sound database of an earlier time behind.
        """
        if self._is_of_stream(theirs) and meta.decision_changes(theirs) < meta.decision_changes(self._known):
            raise sqlite3.DatabaseError(f"{self._file.path.name} is malformed: it has lost its last decisions")

    def _is_ours(self, theirs: dict[str, str]) -> bool:
        their_vm, my_vm = meta.vm_id_of(theirs), meta.vm_id_of(self._known)
        is_mine = theirs.get("stream_id") is None or self._is_of_stream(theirs)
        return is_mine or (self._origin.is_blind and (None in (their_vm, my_vm) or their_vm == my_vm))

    def _is_of_stream(self, theirs: dict[str, str]) -> bool:
        """Return whether the file that remembers *theirs* is the one that memory came from."""
        return theirs.get("stream_id") in {self._known["stream_id"], self._stream.on_disk} - {None}


def _write_back(memory: sqlite3.Connection, disk: sqlite3.Connection, *, is_blind: bool, deleted: DeletedRows) -> None:
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


def deleted_rows(connection: sqlite3.Connection) -> DeletedRows:
    """Return how many rows the totals count that are not there any more."""
    deleted: DeletedRows = Counter()
    for name, *counts in connection.execute(SQL["copy_sinks"]):
        for state, count in zip(COUNTS[1:-1], counts[1:-1], strict=True):
            deleted[name, state] += count
    for sink, state, count in connection.execute(SQL["count_rows"]):
        deleted[sink, state] -= count
    return deleted


def _add_deleted(disk: sqlite3.Connection, deleted: DeletedRows) -> None:
    """Count in the totals of *disk* the rows that came and went in memory alone; what no sink got is evicted."""
    totals = {name: counts for name, *counts in disk.execute(SQL["copy_sinks"])}
    for (sink, state), count in deleted.items():
        counts = totals.setdefault(sink, [0] * len(COUNTS))
        counts[COUNTS.index("evicted" if state in ("pending", "parked") else state)] += count
        counts[0] += count
    for sink, counts in totals.items():
        set_totals(disk, sink, counts)
