"""The database: opened, migrated, asked and written to, synchronously, from a few threads.

Functions over a connection are run in one transaction each, `read` or `write`. A write takes its lock at the beginning
(SQLite: BEGIN IMMEDIATE), so none fails half way because another writes. The event loop never waits for the database:
`StoreThreads` runs the functions aside, and takes no more than it can do soon.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, Table, create_engine, event, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from bridge.errors import BridgeError
from bridge.portal import migrations
from bridge.portal.schema import properties

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Less than what a stop may take.
_BUSY_SECONDS = 2.0
_LOCKED_SECONDS = 0.02
_THREADS = 4
_MOST_WAITING = 256
#: SQLite takes 32,766 variables in a statement, PostgreSQL 65,535.
_MOST_AT_ONCE = 500
_WRITES = "portal_writes"
EPOCH = "epoch"


class StoreUnavailable(BridgeError):
    """The database cannot do it now; it may be tried again soon."""


class Store:
    """The database at *url*; its methods may be called from any thread."""

    def __init__(self, url: URL | str) -> None:
        self.engine = create_engine(url, pool_size=2 * _THREADS, max_overflow=0, pool_timeout=_BUSY_SECONDS)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _prepare)
            event.listen(self.engine, "begin", _begin)

    @classmethod
    def of_file(cls, path: Path) -> Store:
        """Return the SQLite database at *path*; it and its directory are made, for the owner alone."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)  # SQLite gives the files beside it the same mode
        except OSError as error:
            raise BridgeError(
                f"The portal's database {path} cannot be made: {error.strerror or error}. Name another with file in "
                "[database]."
            ) from error
        return cls(URL.create("sqlite", database=str(path)))

    def read(self, work: Callable[Concatenate[Connection, _P], _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return what *work* returns over a connection that sees one state of the database."""
        return self._run({_WRITES: False}, work, *args, **kwargs)

    def write(self, work: Callable[Concatenate[Connection, _P], _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return what *work* returns once all of what it wrote is committed; nothing of it is when it raises."""
        return self._run({_WRITES: True}, work, *args, **kwargs)

    def migrate(self) -> tuple[str | None, str]:
        """Bring the database to this version, and give it an epoch; return the steps before and now."""
        return self.write(_migrated)

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def _run(self, options: dict[str, bool], work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        try:
            with self.engine.connect().execution_options(**options) as connection, connection.begin():
                return work(connection, *args, **kwargs)
        except DBAPIError as error:
            raise StoreUnavailable(f"The portal's database cannot do it now: {error.orig}.") from error


class StoreThreads:
    """Runs functions of a store in a few threads, for the event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="store-reader")
        # SQLite has one writer: who waits for it in a queue gets a turn, who waits for its lock may not.
        writers = 1 if store.engine.dialect.name == "sqlite" else _THREADS
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="store-writer")
        self._lock = threading.Lock()
        self._waiting = 0

    async def read(self, work: Callable[Concatenate[Connection, _P], _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return what `Store.read` returns; raise StoreUnavailable when too much waits already."""
        return await self._run(self._readers, lambda: self.store.read(work, *args, **kwargs))

    async def write(
        self, work: Callable[Concatenate[Connection, _P], _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return what `Store.write` returns; raise StoreUnavailable when too much waits already."""
        return await self._run(self._writers, lambda: self.store.write(work, *args, **kwargs))

    def close(self) -> None:
        """Begin nothing more, and wait for what has begun."""
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
        with self._lock:
            if self._waiting >= _MOST_WAITING:
                raise StoreUnavailable(f"More than {_MOST_WAITING} requests wait for the portal's database.")
            self._waiting += 1
        try:
            # Shielded by the executor: a client that goes away does not undo what was begun.
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            with self._lock:
                self._waiting -= 1


def insert(connection: Connection, table: Table) -> Any:
    """Return an INSERT into *table* that knows ON CONFLICT, for the dialect of *connection*."""
    return (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(table)


def upsert(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Write *rows* into *table*, each in place of the one with its primary key."""
    if not rows:
        return
    statement = insert(connection, table)
    key = [column.name for column in table.primary_key]
    others = {name: statement.excluded[name] for name in rows[0] if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=others), list(rows))


def escaped_like(text: str) -> str:
    """Return *text* for a LIKE that escapes by a backslash, so that it stands for itself alone."""
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def in_parts(values: Sequence[_T]) -> list[Sequence[_T]]:
    """Return *values* in parts that a statement can name at once."""
    return [values[start : start + _MOST_AT_ONCE] for start in range(0, len(values), _MOST_AT_ONCE)]


def epoch(connection: Connection) -> str:
    """Return the name of the history in which indexes of decisions count."""
    return str(connection.execute(select(properties.c.value).where(properties.c.name == EPOCH)).scalar_one())


def back_up(source: Path, target: Path) -> None:
    """Copy the SQLite database at *source*, also while the portal runs, to *target*, which must not exist.

    The copy has no epoch: whoever starts a portal on it gets a new one, so that agents ask for everything again.
    """
    if target.exists():
        raise BridgeError(f"{target} exists already; a backup never goes over a file. Name another.")
    if not source.exists():
        raise BridgeError(f"There is no database at {source} to back up.")
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    part.touch(mode=0o600)
    try:
        with closing(sqlite3.connect(source)) as living, closing(sqlite3.connect(part)) as copy:
            living.backup(copy)
            copy.execute("DELETE FROM properties WHERE name = ?", (EPOCH,))
            copy.commit()
            copy.execute("PRAGMA journal_mode = DELETE")
        part.rename(target)
    except (sqlite3.Error, OSError) as error:
        part.unlink(missing_ok=True)
        raise BridgeError(f"The database {source} cannot be backed up to {target}: {error}.") from error


def _migrated(connection: Connection) -> tuple[str | None, str]:
    before, now = migrations.migrate(connection)
    connection.execute(
        insert(connection, properties).values(name=EPOCH, value=str(uuid.uuid4())).on_conflict_do_nothing()
    )
    return before, now


def _prepare(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the transactions are ours, not the driver's
    connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000)}")
    _use_wal(connection)
    connection.execute("PRAGMA synchronous = FULL")  # what was answered with 204 outlives a power loss
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA case_sensitive_like = ON")  # as PostgreSQL does


def _use_wal(connection: Any) -> None:
    """Turn WAL on; SQLite itself does not wait for another process that does so too."""
    give_up_at = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(_LOCKED_SECONDS)
        else:
            return


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
