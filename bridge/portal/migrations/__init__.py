"""Brings a database to the tables that this version knows, by Alembic, from code and under a lock.

Two processes that start at once wait for each other: SQLite by the transaction that writes, PostgreSQL by an advisory
lock. All steps are one transaction, so a step that fails leaves the database as it was.
"""

from __future__ import annotations

from pathlib import Path

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text

from bridge.errors import BridgeError
from bridge.portal.schema import metadata

#: Any number that no other program of the same database takes.
_POSTGRESQL_LOCK = 7_390_114_725
#: For a process that has begun already, and for its statements.
_WAIT_SECONDS = 60


class DatabaseTooNew(BridgeError):
    """The database was brought further by a later version of the portal."""


def migrate(connection: Connection) -> tuple[str | None, str]:
    """Bring the database of *connection*, inside its transaction, to this version; return the steps before and now.

    None: it was empty. Raises DatabaseTooNew for a step that this version does not have.
    """
    if connection.dialect.name == "postgresql":
        _wait_for_others(connection)
    scripts = _scripts()
    before = current(connection)
    try:
        scripts.get_revision(before or "base")
    except CommandError as error:
        raise DatabaseTooNew(
            f"The database is at step {before!r}, which this version does not know: a later one has used it. Run that "
            "version, or restore a backup."
        ) from error
    head = scripts.get_current_head() or ""
    if before != head:
        with EnvironmentContext(_config(), scripts, fn=lambda at, _: scripts._upgrade_revs(head, at)) as environment:  # noqa: SLF001  # what alembic.command.upgrade does
            environment.configure(connection=connection, target_metadata=metadata)
            environment.run_migrations()
    return before, head


def current(connection: Connection) -> str | None:
    """Return the step that the database is at; None: it is empty."""
    return MigrationContext.configure(connection).get_current_revision()


def _wait_for_others(connection: Connection) -> None:
    encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
    if encoding != "UTF8":
        raise BridgeError(f"The database is made for texts in {encoding}. Make one with ENCODING 'UTF8'.")
    connection.execute(text(f"SET LOCAL lock_timeout = '{_WAIT_SECONDS}s'"))
    connection.execute(text("SET LOCAL statement_timeout = 0"))
    connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _POSTGRESQL_LOCK})


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
