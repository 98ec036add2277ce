"""Migrates the database with Alembic in one transaction.

If two portal processes start at the same time, a lock makes the second process wait for the first. SQLite uses its
write lock, and PostgreSQL uses an advisory lock.
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

_POSTGRESQL_LOCK = 7_390_114_725
_WAIT_SECONDS = 60


def migrate(connection: Connection) -> tuple[str | None, str]:
    """Migrate the database. Return the old and the new migration step."""
    if connection.dialect.name == "postgresql":
        _wait_for_others(connection)
    scripts = ScriptDirectory(str(Path(__file__).parent))
    before = current(connection)
    try:
        scripts.get_revision(before or "base")
    except CommandError as error:
        raise BridgeError(
            f"The database is at step {before!r} of a later version. Run that version, or restore a backup."
        ) from error
    head = scripts.get_current_head() or ""
    if before != head:
        with EnvironmentContext(Config(), scripts, fn=lambda at, _: scripts._upgrade_revs(head, at)) as environment:  # noqa: SLF001  # what alembic.command.upgrade does
            environment.configure(connection=connection, target_metadata=metadata)
            environment.run_migrations()
    return before, head


def current(connection: Connection) -> str | None:
    """Return the step of the database, or None if the database is empty."""
    return MigrationContext.configure(connection).get_current_revision()


def _wait_for_others(connection: Connection) -> None:
    connection.execute(text(f"SET LOCAL lock_timeout = '{_WAIT_SECONDS}s'"))
    connection.execute(text("SET LOCAL statement_timeout = 0"))
    connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _POSTGRESQL_LOCK})
