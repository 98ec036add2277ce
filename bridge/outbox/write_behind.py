"""What is in memory is written into the file of a slow disk, now and then and beside the work.

A disk that answers, but takes longer for each commit than the work may wait, is not gone back to: every record would
wait for it. All that memory has by then is written there together, by a thread of its own, and the work goes on in
memory meanwhile. What is there when the agent is killed is lost only from the last time on. It still counts as memory:
nothing is approved, and commands that write refuse.

The connection stays open from one writing to the next, and is the one to go back by: a new one makes the directory and
the head of the -wal durable too, three times what a commit costs, and a stop has ten seconds for it.
"""

from __future__ import annotations

import copy
import logging
import math
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import NamedTuple

from bridge.errors import OutboxError
from bridge.outbox import database, meta, retention
from bridge.outbox.disk_file import DiskFile
from bridge.outbox.memory_copy import COPIED_BYTES
from bridge.outbox.merge import MemoryOrigin, Merge, OpenDisk
from bridge.outbox.stream import Stream
from bridge.system.threads import run_daemon

logger = logging.getLogger("bridge.outbox.storage")  # the name that logs are filtered by, for all of its parts

_PAUSE_SECONDS = 5.0
#: Above this, memory forgets what is finished and written: the disk has it.
_KEPT_BYTES = 4 * 1024 * 1024


class _Written(NamedTuple):
    """What one writing came to."""

    origin: MemoryOrigin
    disk: OpenDisk


class WriteBehind:
    """The way of what is in memory to a slow disk, one writing after the other; used by the outbox's thread."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._job: Future[_Written] | None = None
        self._disk: OpenDisk | None = None
        self._began_at = self._next_at = -math.inf
        self._written_changes = -1

    @property
    def is_on_its_way(self) -> bool:
        """Return whether a writing has not ended: nothing else may write to the file."""
        return self._job is not None and not self._job.done()

    @property
    def has_ended(self) -> bool:
        """Return whether there is something to `take`."""
        return self._job is not None and self._job.done()

    def wait(self, seconds: float) -> None:
        """Wait until the writing on its way has ended, so long at most."""
        if self._job is not None:
            wait_for([self._job], seconds)

    def take(self) -> MemoryOrigin | None:
        """Return what the writing that has ended wrote, once; None when there is none, or it failed."""
        job, self._job = self._job, None
        if job is None:
            return None
        now = self._monotonic()
        self._next_at = now + max(_PAUSE_SECONDS, now - self._began_at)
        try:
            written = job.result()
        except (sqlite3.Error, OSError, OutboxError) as error:
            self._written_changes = -1
            logger.info("What is in memory could not be written to the slow disk yet.", extra={"why": str(error)})
            return None
        self._disk = written.disk
        return written.origin

    def give_up_disk(self) -> OpenDisk | None:
        """Return the connection of the last writing, for whoever writes next; None when there is none."""
        disk, self._disk = self._disk, None
        return disk

    def close(self) -> None:
        """Close that connection."""
        disk = self.give_up_disk()
        if disk is not None:
            disk.close()

    def start(
        self,
        memory: sqlite3.Connection,
        known: Mapping[str, str],
        origin: MemoryOrigin,
        *,
        file: DiskFile,
        stream: Stream,
        now: float,
    ) -> int | None:
        """Begin to write all of *memory* where it is time to; return its last sequence, or None when nothing was begun.

        What belongs to no file that is there is not written, nor what is too large to be copied.
        """
        may_write = origin.is_sure and stream.on_disk is None and file.path.exists()
        has_news = memory.total_changes != self._written_changes and self._monotonic() >= self._next_at
        if not (may_write and has_news) or self._job is not None or database.used_bytes(memory) > COPIED_BYTES:
            return None
        snapshot = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        memory.backup(snapshot)
        finished = retention.finished(memory) if database.used_bytes(memory) > _KEPT_BYTES else []
        # Nothing that the thread does to its own is anything to the storage, which goes on meanwhile.
        own_origin, own_file = origin.copy(), copy.copy(file)
        own_file.guard = own_file.reader = None
        merge = Merge(
            snapshot,
            dict(known),
            own_origin,
            file=own_file,
            stream=copy.copy(stream),
            room=None,
            now=now,
            enter_step=lambda _limit_seconds: None,
            opened=self.give_up_disk(),
        )
        self._began_at, self._written_changes = self._monotonic(), memory.total_changes
        self._job = run_daemon("outbox-write-behind", _write, merge, snapshot, own_origin, own_file, finished)
        return meta.next_sequence(known) - 1


def _write(
    merge: Merge, snapshot: sqlite3.Connection, origin: MemoryOrigin, file: DiskFile, finished: list[int]
) -> _Written:
    try:
        disk = merge.write_into_own()
    finally:
        snapshot.close()
    file.close_reader()
    origin.given_up = finished
    return _Written(origin, OpenDisk(connection=disk, guard=file.guard))
