"""Whether the file under an open outbox is still the one that was opened, and still whole.

SQLite does not notice when its file is deleted, replaced or written over: it goes on with what it has in memory, and
what it commits is lost when the agent ends. So the agent looks now and then, while memory still knows better.

One descriptor stays open for that. Opening the file and closing it again would drop the POSIX locks that this process
holds on it (sqlite.org, "How To Corrupt An SQLite Database File", 2.2), and the next command that ends beside the
agent would take the -wal away under it.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

from bridge.outbox.database import check, is_damage, open_to_read

_MAGIC = b"SQLite format 3\x00"


class FileGuard:
    """Notices that what is at a path is no longer the file that was opened there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._look_again_at = 0.0
        self._wal = Path(f"{path}-wal")
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._file, self._wal_file = _identity(path), _identity(self._wal)
        self._looked_at = self._written_at

    def trouble(self) -> str | None:
        """Return what happened to the file, null when nothing did."""
        if _identity(self._path) is None:
            return "the file was deleted"
        if self.is_replaced:
            return "the file, or the -wal beside it, was deleted or replaced"
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        if os.read(self._descriptor, len(_MAGIC)) != _MAGIC:
            return "the file was overwritten or cut off"
        return None

    @property
    def is_replaced(self) -> bool:
        """Return whether the path leads to another file or -wal, or to none."""
        return (_identity(self._path), _identity(self._wal)) != (self._file, self._wal_file)

    def look_through(self, *, at_once: bool = False) -> str | None:
        """Return what a fresh look finds in a file that was written since the last one, null when nothing.

        It may take 1 % of the time, unless it is wanted *at_once*.
        """
        started, written_at = time.monotonic(), self._written_at
        if written_at == self._looked_at or (started < self._look_again_at and not at_once):
            return None
        damage = _damage_in(self._path)
        self._looked_at, self._look_again_at = written_at, started + 100 * (time.monotonic() - started)
        return damage

    @property
    def _written_at(self) -> int:
        # A checkpoint writes the file now and then; whoever else does is a stranger.
        return os.fstat(self._descriptor).st_mtime_ns

    def close(self) -> None:
        """Let go of the file; only after every connection to it is closed."""
        os.close(self._descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _damage_in(path: Path) -> str | None:
    connection = open_to_read(path)
    if connection is None:
        return "the file cannot be opened a second time"
    try:
        check(connection, path)
    except sqlite3.Error as error:
        return str(error) if is_damage(error) else None
    finally:
        connection.close()
    return None
