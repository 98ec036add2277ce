"""Keeping the outbox within its bounds: by age what is done, by size whatever must go.

When it is full, records that every sink is done with go first; then parked ones, which wait for a person; then the
oldest pending ones. The last two are counted as evicted. A sink that was down for a month must not fill a disk, and
must not lose today for it.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection
from contextlib import suppress

from bridge.outbox.database import SQL, cut_wal, give_back, is_in_memory, transaction, used_bytes
from bridge.outbox.deliveries import clean_start_marks
from bridge.outbox.refresh import active_events, told_sequences
from bridge.outbox.volume import VolumeRoom

logger = logging.getLogger(__name__)

_CHUNK = 64
#: Room is made when this part of the bound is used, down to the other: not with every single record.
_FULL, _TARGET = 0.95, 0.94
_WORTH_GIVING_BACK = 1024
_KEPT_ON_FULL_DISK = 50
_ALL = 2**63 - 1


def enforce_size(connection: sqlite3.Connection, *, max_bytes: int, disk_sequence: int, now: float, newest: int) -> int:
    """Delete and evict until at most *max_bytes* are used; return how many deliveries were evicted.

    Records from the sequence *newest* on were only just seen: they stay, so that each is tried at least once. In memory
    those up to *disk_sequence* stay too: the disk has them as well. The document counts for nothing here: it cannot be
    evicted, and would evict all records in its stead.
    """
    return _enforce_size(
        connection, _Room(connection, max_bytes=max_bytes, after=disk_sequence, before=newest), now=now
    )


def fit_volume(connection: sqlite3.Connection, *, max_bytes: int, finished_bytes: int, now: float) -> list[int]:
    """Have *connection* use *max_bytes* at most, of which what is finished fits *finished_bytes*; return what went.

    For the way back to a disk, inside its transaction.
    """
    room = _Room(connection, max_bytes=finished_bytes, after=0, before=_newest_that_stay(connection))
    if room.is_full:
        room.delete_oldest("oldest_finished", keep=_last_of_active(connection))
    rest = _Room(connection, max_bytes=max_bytes, after=0, before=_ALL)
    _enforce_size(connection, rest, now=now)
    gone = room.gone + rest.gone
    if gone:
        give_back(connection, most_pages=_ALL)
    return gone


def _enforce_size(connection: sqlite3.Connection, room: _Room, *, now: float) -> int:
    if not room.is_full:
        return 0
    room.delete_oldest("oldest_finished", keep=_last_of_active(connection))
    if room.has_kept:
        room.delete_oldest("oldest_finished")
    evicted = room.delete_oldest("oldest_parked", "evict_parked", now)
    evicted += room.delete_oldest("oldest_unfinished", "evict_unfinished", now)
    if evicted:
        logger.error(
            "The outbox is full: the oldest records were evicted undelivered. Mend the sink, or raise state.max_bytes.",
            extra={"evicted": evicted, "max_bytes": room.max_bytes, "in_memory": is_in_memory(connection)},
        )
    return evicted


class _Room:
    """Deletes records with a sequence above *after* and below *before* until *max_bytes* are not full any more."""

    def __init__(self, connection: sqlite3.Connection, *, max_bytes: int, after: int, before: int) -> None:
        self._connection = connection
        self.max_bytes = max_bytes
        self._after = after
        self._before = before
        self.has_kept = False
        """Whether anything was left because it was to be kept."""
        self.gone: list[int] = []

    @property
    def is_full(self) -> bool:
        """Return whether room is to be made."""
        return _used_bytes(self._connection) > self.max_bytes * _FULL

    @property
    def _is_missing(self) -> bool:
        return _used_bytes(self._connection) > self.max_bytes * _TARGET

    def delete_oldest(
        self, choose: str, evict: str | None = None, now: float = 0.0, *, keep: Collection[int] = ()
    ) -> int:
        """Delete what the statement *choose* finds, oldest first; return how many rows *evict* changed before.

        The sequences in *keep* are left.
        """
        evicted, last = 0, self._after
        while self._is_missing:
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
                    self.gone.append(sequence)
            last = chosen[-1]
        return evicted


def _used_bytes(connection: sqlite3.Connection) -> int:
    (document_bytes,) = connection.execute(SQL["document_bytes"]).fetchone()
    return used_bytes(connection) - int(document_bytes or 0)


def delete_delivered(connection: sqlite3.Connection) -> int:
    """Delete some of the oldest records that no sink has still to get, for a full disk; return how many.

    The newest of them stay, and the last of each active event: a change that is seen again is known by them.
    """
    keep, before = _last_of_active(connection), _newest_that_stay(connection)
    chosen = [sequence for (sequence,) in connection.execute(SQL["oldest_finished"], (0, _CHUNK)).fetchall()]
    gone = [sequence for sequence in chosen if sequence < before and sequence not in keep]
    for sequence in gone:
        _delete(connection, sequence)
    return len(gone)


def _newest_that_stay(connection: sqlite3.Connection) -> int:
    """Return the first sequence of the newest finished records, which are kept on a full disk too."""
    boundary = connection.execute(SQL["newest_finished"], (_KEPT_ON_FULL_DISK - 1,)).fetchone()
    return 0 if boundary is None else int(boundary[0])


def make_room(connection: sqlite3.Connection, room: VolumeRoom) -> bool:
    """Give up what is delivered for a disk that is full, the oldest first; return whether room was made.

    In small steps: to delete takes room in the -wal, and what it has may be all there is. On a volume that is seen to
    be full, a -wal that could be moved into the database and cut off is room as well.
    """
    deleted, has_moved = 0, False
    try:
        before = used_bytes(connection)
        while used_bytes(connection) > before - max(room.room_bytes, before // 20):
            has_moved |= cut_wal(connection)
            with transaction(connection):
                count = delete_delivered(connection)
            if not count:
                break
            deleted += count
        if deleted:
            with suppress(sqlite3.Error), transaction(connection):  # to move pages takes room too
                give_back(connection, most_pages=_WORTH_GIVING_BACK)
            cut_wal(connection)
    except sqlite3.Error:
        return has_moved and room.is_almost_full
    if deleted:
        logger.warning(
            "The disk under the outbox is full: %d delivered records were given up before their time.", deleted
        )
    return deleted > 0 or (has_moved and room.is_almost_full)


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
        give_back(connection, most_pages=_WORTH_GIVING_BACK)
    return len(gone)


def _last_of_active(connection: sqlite3.Connection) -> set[int]:
    keys = active_events(connection)
    last = {connection.execute(SQL["last_sequence_of_event"], (key,)).fetchone()[0] for key in keys}
    return last | told_sequences(connection, keys)


def finished(connection: sqlite3.Connection) -> list[int]:
    """Return the records that no sink has still to get, but for those that are kept on a full disk too."""
    keep, before = _last_of_active(connection), _newest_that_stay(connection)
    found = connection.execute(SQL["oldest_finished"], (0, _ALL)).fetchall()
    return [sequence for (sequence,) in found if sequence < before and sequence not in keep]


def forget(connection: sqlite3.Connection, sequences: Collection[int]) -> None:
    """Delete *sequences* and their deliveries in memory, whatever their state: the disk has what became of them."""
    for sequence in sequences:
        connection.execute(SQL["evict_unfinished"], (0.0, sequence))
        _delete(connection, sequence)


def _delete(connection: sqlite3.Connection, sequence: int) -> None:
    connection.execute(SQL["delete_deliveries"], (sequence,))
    connection.execute(SQL["delete_record"], (sequence,))
