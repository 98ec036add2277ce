"""SQLite as the engine of the portal: one file, one process that writes at a time.

What it does otherwise than PostgreSQL (`bridge.portal.store.postgresql`, which has the same names) stands here.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event

from bridge.errors import BridgeError
from bridge.portal.schema import EPOCH

_LOCKED_SECONDS = 0.02


class Sqlite:
    """The file at *path*; whoever waits for its lock longer than *busy_seconds* fails."""

    #: SQLite has one writer: who waits for it in a queue gets a turn, who waits for its lock may not.
    writers = 1
    #: Whether other processes may serve agents and people beside this one.
    is_shared = False

    def __init__(self, path: Path, *, busy_seconds: float) -> None:
        self.path = path
        self._busy_seconds = busy_seconds

    def make(self) -> None:
        """Make the file and its directory, for the owner alone."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.touch(mode=0o600)  # SQLite gives the files beside it the same mode
        except OSError as error:
            raise BridgeError(
                f"The portal's database {self.path} cannot be made: {error.strerror or error}. Name another with file "
                "in [database]."
            ) from error

    def engine(self, **pool: Any) -> Engine:
        """Return what connects to it."""
        engine = create_engine(URL.create("sqlite", database=str(self.path)), **pool)
        event.listen(engine, "connect", self._prepare)
        return engine

    def begin(self, connection: Connection, *, writes: bool) -> None:
        """Begin a transaction; one that writes takes the lock at once, so that it cannot fail half way."""
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    def is_in_the_way(self, _error: BaseException) -> bool:
        """Return whether a transaction failed only because of another one beside it, and may be done again."""
        return False

    def why(self, error: BaseException) -> str:
        """Return what *error* says, on one line."""
        return f"The portal's database cannot do it now: {error}."

    def listener(self, _heard: Callable[[], object]) -> None:
        """Return nothing: who decides something here wakes by itself whoever waits for it."""

    def back_up(self, target: Path) -> None:
        """Copy the database, also while the portal runs, to *target*, which must not exist.

        The copy has no epoch: whoever starts a portal on it gets a new one, so that agents ask for everything again.
        """
        if target.exists():
            raise BridgeError(f"{target} exists already; a backup never goes over a file. Name another.")
        if not self.path.exists():
            raise BridgeError(f"There is no database at {self.path} to back up.")
        part = target.with_name(f"{target.name}.part")
        part.unlink(missing_ok=True)
        part.touch(mode=0o600)
        try:
            with closing(sqlite3.connect(self.path)) as living, closing(sqlite3.connect(part)) as copy:
                living.backup(copy)
                copy.execute("DELETE FROM properties WHERE name = ?", (EPOCH,))
                copy.commit()
                copy.execute("PRAGMA journal_mode = DELETE")
            part.rename(target)
        except (sqlite3.Error, OSError) as error:
            part.unlink(missing_ok=True)
            raise BridgeError(f"The database {self.path} cannot be backed up to {target}: {error}.") from error

    def _prepare(self, connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the transactions are ours, not the driver's
        connection.execute(f"PRAGMA busy_timeout = {int(self._busy_seconds * 1000)}")
        self._use_wal(connection)
        connection.execute("PRAGMA synchronous = FULL")  # what was answered with 204 outlives a power loss
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA case_sensitive_like = ON")  # as PostgreSQL does

    def _use_wal(self, connection: Any) -> None:
        """Turn WAL on; SQLite itself does not wait for another process that does so too."""
        give_up_at = time.monotonic() + self._busy_seconds
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() >= give_up_at:
                    raise
                time.sleep(_LOCKED_SECONDS)
            else:
                return
