"""The volume under the outbox: how much of it the outbox may use, and room made there before it is full."""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

import msgspec

from bridge.outbox import database, retention
from bridge.outbox.database import transaction

logger = logging.getLogger("bridge.outbox.storage")  # the name that logs are filtered by, for all of its parts

#: What a volume has beyond the database: for the -wal, and for pages that are on their way.
_WAL_BYTES = 8 * 1024 * 1024
#: A disk with less is about to be full; so much is given up at once then, or a twentieth if that is more.
_ROOM_BYTES = 1024 * 1024


class VolumeRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What a volume allows."""

    bound_bytes: int
    """How much the outbox may use."""
    is_almost_full: bool


def room_on_volume(directory: Path, *, max_bytes: int) -> VolumeRoom | None:
    """Return what the volume of *directory* allows an outbox of *max_bytes*, which needs room for the -wal too."""
    try:
        found = os.statvfs(directory)
    except (OSError, AttributeError):  # Windows has no such call
        return None
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if not size:
        return None
    return VolumeRoom(bound_bytes=min(max_bytes, size - min(_WAL_BYTES, size // 2)), is_almost_full=free < _ROOM_BYTES)


def make_room(connection: sqlite3.Connection) -> bool:
    """Give up what is delivered for a disk without room, the oldest first; return whether there was any.

    In small steps: to delete takes room in the -wal, and what it has may be all there is.
    """
    deleted = 0
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
