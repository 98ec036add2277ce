"""The SQLite database, which is one file with a single writer.

`bridge.portal.store.postgresql` has the same methods for PostgreSQL.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event

from bridge.errors import BridgeError
from bridge.portal.schema import EPOCH


class Sqlite:
    """An SQLite file. Transactions wait at most *busy_seconds* for a lock."""

    #: The queue of a single writer thread serves writes in order. SQLite's lock does not.
    writers = 1
    is_shared = False

    def __init__(self, path: Path, *, busy_seconds: float) -> None:
        self.path = path
        self._busy_seconds = busy_seconds

    def engine(self, **pool: Any) -> Engine:
        """Create the file and its directory, readable only by the owner. Return the engine."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.touch(mode=0o600)  # SQLite gives its other files the same mode
        except OSError as error:
            raise BridgeError(
                f"The portal's database {self.path} cannot be created: {error.strerror or error}. Set another file in "
                "[database]."
            ) from error

        engine = create_engine(URL.create("sqlite", database=str(self.path)), **pool)
        event.listen(engine, "connect", self._prepare)
        return engine

    def begin(self, connection: Connection, *, writes: bool) -> None:
        """Begin a transaction. If it *writes*, lock the database at once."""
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    def why(self, error: BaseException) -> str:
        """Return the message of *error* on one line."""
        return f"The portal's database is not available: {error}."

    def listener(self, _heard: Callable[[], object]) -> None:
        """Return None, because a single process needs no notifications."""

    def back_up(self, target: Path) -> None:
        """Copy the database to *target*, even while the portal is running.

        The backup does not contain the epoch, which identifies the numbering of decisions. After a restore, the portal
        creates a new epoch, so the agents request all decisions again.
        """
        if target.exists():
            raise BridgeError(f"{target} already exists, and a backup does not overwrite a file. Choose another name.")
        if not self.path.exists():
            raise BridgeError(f"No database exists at {self.path}.")
        part = target.with_name(f"{target.name}.part")
        part.unlink(missing_ok=True)
        try:
            part.touch(mode=0o600)
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
        connection.isolation_level = None  # `begin` starts the transactions
        connection.execute(f"PRAGMA busy_timeout = {int(self._busy_seconds * 1000)}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # records must survive a power loss after a 204 response
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA case_sensitive_like = ON")  # as in PostgreSQL
