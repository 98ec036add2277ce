"""A damaged database that is still to be read: as it was open, and where its file lies now.

Both may be needed. The open connection still sees a file that was deleted, and pages of one that was overwritten; the
file has what the connection never read. It is kept until all of it is in a new file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bridge.outbox.database import SQL, open_to_read
from bridge.outbox.file_guard import FileGuard
from bridge.outbox.recovery import carry_all


class Wreck(msgspec.Struct, kw_only=True):
    """One damaged database; *aside* is null when its file is gone, or somebody put another in its place."""

    connection: sqlite3.Connection | None = None
    watch: FileGuard | None = None
    aside: Path | None = None

    def close(self) -> None:
        """Let go of it; the file stays where it is."""
        if self.connection is not None:
            self.connection.close()
        if self.watch is not None:
            self.watch.close()


def carry_wrecks(wrecks: Iterable[Wreck], target: sqlite3.Connection) -> None:
    """Copy all that can be read of *wrecks*: from the live connection first, it may know what the file lost."""
    for wreck in wrecks:
        if wreck.connection is not None:
            carry_all(wreck.connection, target, SQL)
        source = open_to_read(wreck.aside)
        if source is not None:
            try:
                carry_all(source, target, SQL)
            finally:
                source.close()
