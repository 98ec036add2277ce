"""Runs functions that use the database, each function in one transaction.

The event loop must never wait for the database, so `StoreThreads` runs database functions in a few threads and limits
how many calls can wait for a thread. The `sqlite` and `postgresql` modules contain the database-specific code.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from bridge.errors import BridgeError, SecretUnavailable
from bridge.portal import migrations
from bridge.portal.schema import CHANNEL, EPOCH, properties
from bridge.portal.settings import PortalSettings, database_file
from bridge.portal.store.sqlite import Sqlite
from bridge.system.extras import how_to_install
from bridge.text import without_nul

if TYPE_CHECKING:
    from bridge.portal.store.postgresql import Postgresql

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Work: TypeAlias = Callable[Concatenate[Connection, _P], _T]

#: A transaction that waits for a lock must fail before the time limit for stopping the portal.
_BUSY_SECONDS = 2.0
_THREADS = 4
_MOST_WAITING = 256
_FAILURE_SECONDS = 30.0
#: A statement can have at most 32,766 variables in SQLite, and 65,535 in PostgreSQL.
_MOST_AT_ONCE = 500


class StoreUnavailable(BridgeError):
    """The database is currently unavailable. The client can repeat the request."""


class Store:
    """A database of *kind*, for use from any thread."""

    def __init__(self, kind: Sqlite | Postgresql) -> None:
        self.kind = kind
        self.engine = kind.engine(pool_size=2 * _THREADS, max_overflow=0, pool_timeout=_BUSY_SECONDS)
        self._write_failure = -math.inf, ""

    @classmethod
    def of_file(cls, path: Path) -> Store:
        """Return the SQLite database at *path*."""
        return cls(Sqlite(path, busy_seconds=_BUSY_SECONDS))

    @classmethod
    def of_settings(cls, settings: PortalSettings) -> Store:
        """Return the configured database."""
        url = settings.database.url
        if url is None:
            return cls.of_file(database_file(settings))
        try:
            from bridge.portal.store.postgresql import Postgresql  # noqa: PLC0415  # needs psycopg
        except ImportError as error:
            raise BridgeError(
                f"database.url needs psycopg, which cannot be loaded here: {str(error).splitlines()[0]}. "
                f"{how_to_install('portal-postgresql')}."
            ) from error
        return cls(Postgresql(url, settings.database.password(), busy_seconds=_BUSY_SECONDS))

    def read(self, work: _Work[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return the result of *work* in a consistent read transaction."""
        return self._run(work, *args, writes=False, **kwargs)

    def write(self, work: _Work[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run *work* and commit. Roll back if *work* raises an exception."""
        try:
            return self._run(work, *args, writes=True, **kwargs)
        except StoreUnavailable as error:
            self._write_failure = time.monotonic(), str(error)
            raise

    def why_not_written(self) -> str | None:
        """Return the error of a write within the last 30 s, or None."""
        at, why = self._write_failure
        return why if time.monotonic() - at < _FAILURE_SECONDS else None

    def migrate(self) -> tuple[str | None, str]:
        """Migrate the database. Return the old and the new migration step."""
        return self.write(_migrated)

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def _run(self, work: Callable[..., _T], *args: Any, writes: bool, **kwargs: Any) -> _T:
        try:
            with self.engine.connect() as connection, connection.begin():
                self.kind.begin(connection, writes=writes)
                return work(connection, *args, **kwargs)
        except (DBAPIError, PoolTimeoutError, SecretUnavailable) as error:
            raise StoreUnavailable(self.kind.why(getattr(error, "orig", None) or error)) from error


class StoreThreads:
    """Runs database functions in threads without blocking the event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="store-reader")
        self._writers = ThreadPoolExecutor(store.kind.writers, thread_name_prefix="store-writer")
        self._waiting = 0

    async def read(self, work: _Work[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `Store.read` in a thread. Raise StoreUnavailable if too many calls are waiting."""
        return await self._run(self._readers, lambda: self.store.read(work, *args, **kwargs))

    async def write(self, work: _Work[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `Store.write` in a thread. Raise StoreUnavailable if too many calls are waiting."""
        return await self._run(self._writers, lambda: self.store.write(work, *args, **kwargs))

    def close(self) -> None:
        """Cancel waiting functions, and wait for running functions."""
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
        if self._waiting >= _MOST_WAITING:
            raise StoreUnavailable(f"More than {_MOST_WAITING} requests wait for the portal's database.")
        self._waiting += 1
        try:
            # The thread continues if the client disconnects.
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self._waiting -= 1


def insert(connection: Connection, table: Table) -> Any:
    """Return an INSERT into *table* that supports ON CONFLICT."""
    return (sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert)(table)


def upsert(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert *rows*, or replace the rows with the same primary key."""
    if not rows:
        return
    statement = insert(connection, table)
    key = [column.name for column in table.primary_key]
    others = {name: statement.excluded[name] for name in rows[0] if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=others), list(rows))


def contains_text(column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    """Return whether a case-folded *column* contains *text*."""
    return column.contains(without_nul(text).casefold(), autoescape=True)


def insert_missing(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert the rows whose primary key does not exist yet."""
    if rows:
        connection.execute(insert(connection, table).on_conflict_do_nothing(), list(rows))


def rows_in(
    connection: Connection, query: Select[Any], column: ColumnElement[Any], values: Iterable[Any]
) -> Iterator[Any]:
    """Yield the rows of *query* whose *column* is one of *values*."""
    for part in in_parts(list(dict.fromkeys(values))):
        yield from connection.execute(query.where(column.in_(part))).all()


def in_parts(values: Sequence[_T]) -> list[Sequence[_T]]:
    """Split *values* into parts that fit into one statement."""
    return [values[start : start + _MOST_AT_ONCE] for start in range(0, len(values), _MOST_AT_ONCE)]


def note_alive(connection: Connection, at: str) -> None:
    """Write one row, so that the portal detects a full disk even if it writes nothing else."""
    upsert(connection, properties, [{"name": "alive_at", "value": at}])


def epoch(connection: Connection) -> str:
    """Return the epoch. The numbers of decisions are valid only within one epoch."""
    return str(connection.execute(select(properties.c.value).where(properties.c.name == EPOCH)).scalar_one())


def announce(connection: Connection, index: int) -> None:
    """Notify every process, after the commit, about decisions up to *index*."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_notify(CHANNEL, str(index))))


def _migrated(connection: Connection) -> tuple[str | None, str]:
    before, now = migrations.migrate(connection)
    insert_missing(connection, properties, [{"name": EPOCH, "value": str(uuid.uuid4())}])
    return before, now
