"""Keeping the outbox within its bounds: by age what is done, by size whatever must go.

When it is full, records that every sink is done with go first; then parked ones, which wait for a person; then the
oldest pending ones. The last two are counted as evicted. A sink that was down for a month must not fill a disk, and
must not lose today for it.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection

from bridge.outbox.database import SQL, is_in_memory, used_bytes
from bridge.outbox.deliveries import clean_start_marks
from bridge.outbox.refresh import active_events, told_sequences

logger = logging.getLogger(__name__)

_CHUNK = 64
#: Room is made when this part of the bound is used, down to the other: not with every single record.
_FULL, _TARGET = 0.95, 0.94
_WORTH_GIVING_BACK = 1024
_KEPT_ON_FULL_DISK = 50


def enforce_size(connection: sqlite3.Connection, *, max_bytes: int, disk_sequence: int, now: float, newest: int) -> int:
    """Delete and evict until at most *max_bytes* are used; return how many deliveries were evicted.

    Records from the sequence *newest* on were only just seen: they stay, so that each is tried at least once. In memory
    those up to *disk_sequence* stay too: the disk has them as well. The document counts for nothing here: it cannot be
    evicted, and would evict all records in its stead.
    """
    if _used_bytes(connection) <= max_bytes * _FULL:
        return 0
    room = _Room(connection, target_bytes=max_bytes * _TARGET, after=disk_sequence, before=newest)
    room.delete_oldest("oldest_finished", keep=_last_of_active(connection))
    if room.has_kept:
        room.delete_oldest("oldest_finished")
    evicted = room.delete_oldest("oldest_parked", "evict_parked", now)
    evicted += room.delete_oldest("oldest_unfinished", "evict_unfinished", now)
    if evicted:
        logger.error(
            "The outbox is full: the oldest records were evicted undelivered. Mend the sink, or raise state.max_bytes.",
            extra={"evicted": evicted, "max_bytes": max_bytes, "in_memory": is_in_memory(connection)},
        )
    return evicted


class _Room:
    """Deletes records with a sequence above *after* and below *before* until *target_bytes* are used."""

    def __init__(self, connection: sqlite3.Connection, *, target_bytes: float, after: int, before: int) -> None:
        self._connection = connection
        self._target_bytes = target_bytes
        self._after = after
        self._before = before
        self.has_kept = False
        """Whether anything was left because it was to be kept."""

    @property
    def is_missing(self) -> bool:
        """Return whether more than the target is used."""
        return _used_bytes(self._connection) > self._target_bytes

    def delete_oldest(
        self, choose: str, evict: str | None = None, now: float = 0.0, *, keep: Collection[int] = ()
    ) -> int:
        """Delete what the statement *choose* finds, oldest first; return how many rows *evict* changed before.

        The sequences in *keep* are left.
        """
        evicted, last = 0, self._after
        while self.is_missing:
            found = self._connection.execute(SQL[choose], (last, _CHUNK)).fetchall()
            chosen = [sequence for (sequence,) in found if sequence < self._before]
            if not chosen:
                break
            for sequence in chosen:
                if sequence in keep:
                    self.has_kept = True
                    continue
                if evict is not None:
                    evicted += self._connection.execute(SQL[evict], (now, sequence)).rowcount
                if not self._connection.execute(SQL["is_unfinished"], (sequence,)).fetchone():
                    _delete(self._connection, sequence)
            last = chosen[-1]
        return evicted


def _used_bytes(connection: sqlite3.Connection) -> int:
    (document_bytes,) = connection.execute(SQL["document_bytes"]).fetchone()
    return used_bytes(connection) - int(document_bytes or 0)


def delete_delivered(connection: sqlite3.Connection) -> int:
    """Delete some of the oldest records that no sink has still to get, for a full disk; return how many.

    The newest of them stay, and the last of each active event: a change that is seen again is known by them.
    """
    boundary = connection.execute(SQL["newest_finished"], (_KEPT_ON_FULL_DISK - 1,)).fetchone()
    if boundary is None:
        return 0
    keep = _last_of_active(connection)
    chosen = [sequence for (sequence,) in connection.execute(SQL["oldest_finished"], (0, _CHUNK)).fetchall()]
    gone = [sequence for sequence in chosen if sequence < boundary[0] and sequence not in keep]
    for sequence in gone:
        _delete(connection, sequence)
    return len(gone)


def delete_expired(connection: sqlite3.Connection, *, before: float, limit: int) -> int:
    """Delete up to *limit* records observed before *before* that no sink has still to get; return how many.

    The last record of an active event stays: a sink that is configured tomorrow gets it. So does the last one of its
    life that each sink was told: it may have to be told again. In memory nothing goes: there the disk's own rows are
    only known in part.
    """
    if is_in_memory(connection):
        return 0
    clean_start_marks(connection)
    keep = _last_of_active(connection)
    chosen = connection.execute(SQL["finished_before"], (before, limit)).fetchall()
    gone = [sequence for (sequence,) in chosen if sequence not in keep]
    for sequence in gone:
        _delete(connection, sequence)
    if gone and int(connection.execute("PRAGMA freelist_count").fetchone()[0]) > _WORTH_GIVING_BACK:
        connection.execute(f"PRAGMA incremental_vacuum({_WORTH_GIVING_BACK})").fetchall()
    return len(gone)


def _last_of_active(connection: sqlite3.Connection) -> set[int]:
    keys = active_events(connection)
    last = {connection.execute(SQL["last_sequence_of_event"], (key,)).fetchone()[0] for key in keys}
    return last | told_sequences(connection, keys)


def _delete(connection: sqlite3.Connection, sequence: int) -> None:
    connection.execute(SQL["delete_deliveries"], (sequence,))
    connection.execute(SQL["delete_record"], (sequence,))
