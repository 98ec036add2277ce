"""The volume under the outbox: how much of it the outbox may use, and how much room there is to keep.

What SQLite needs beside the database goes by the volume too: with a -wal as long as usual, a small one is filled by
the -wal alone, and then nothing can be moved into the database any more, nor deleted.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

#: What a volume has beyond the database: for the -wal, and for pages that are on their way.
_BESIDE_BYTES = 8 * 1024 * 1024
#: As many bytes as SQLite lets gather in the -wal with pages of 4 KiB.
_WAL_BYTES = 4 * 1024 * 1024
#: A disk with less is about to be full; so much is given up at once then, or a twentieth if that is more.
_ROOM_BYTES = 1024 * 1024
_SMALL_PART = 8
#: On a larger one a -wal that nothing holds up is far from filling it.
_SMALL_VOLUME_BYTES = 2 * _BESIDE_BYTES
#: On less there is hardly room for a document and the records of a day.
SMALLEST_BYTES = 2 * 1024 * 1024


class VolumeRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What a volume allows."""

    bound_bytes: int
    """How much the outbox may use."""
    finished_bytes: int
    """How much it may use with what is finished: beside what others have there."""
    room_bytes: int
    """How much is to be free."""
    longest_wal_bytes: int | None
    """What the -wal may take before the database has no room to grow by it; None where that is not to be feared."""
    is_almost_full: bool


def room_on_volume(path: Path, *, max_bytes: int) -> VolumeRoom:
    """Return what the volume allows an outbox of *max_bytes* at *path*, which needs room for the -wal too."""
    size, free = _size_and_free(path.parent)
    if not size:
        return VolumeRoom(
            bound_bytes=max_bytes,
            finished_bytes=max_bytes,
            room_bytes=_ROOM_BYTES,
            longest_wal_bytes=None,
            is_almost_full=False,
        )
    room = min(_ROOM_BYTES, size // _SMALL_PART)
    bound = min(max_bytes, _most(size))
    longest_wal = size - bound - room if size < _SMALL_VOLUME_BYTES else None
    return VolumeRoom(
        bound_bytes=bound,
        finished_bytes=min(bound, _most(free + _taken(path))),
        room_bytes=room,
        longest_wal_bytes=longest_wal,
        is_almost_full=free < room,
    )


def _most(size: int) -> int:
    return size - min(_BESIDE_BYTES, size // 2)


def _taken(path: Path) -> int:
    return file_bytes(path) + file_bytes(wal_of(path))


def wal_of(path: Path) -> Path:
    """Return where the -wal of the database at *path* is."""
    return Path(f"{path}-wal")


def file_bytes(path: Path) -> int:
    """Return how long the file at *path* is; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def wal_bytes(directory: Path) -> int:
    """Return how long the -wal of an outbox in *directory* may become before it is moved into the database."""
    size, _ = _size_and_free(directory)
    return min(_WAL_BYTES, size // _SMALL_PART) if size else _WAL_BYTES


def volume_bytes(directory: Path) -> int | None:
    """Return how large the volume of *directory* is; None when that cannot be told."""
    return _size_and_free(directory)[0] or None


def _size_and_free(directory: Path) -> tuple[int, int]:
    try:
        found = os.statvfs(directory)
    except (OSError, AttributeError):  # Windows has no such call
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
