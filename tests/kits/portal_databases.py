"""Databases of the portal for tests. Each test has its own database and can open several stores."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.portal.audit import Fault, first_fault
from bridge.portal.settings import PortalSettings, read
from bridge.portal.store.audit import all_entries, count
from bridge.portal.store.database import Store

#: The only role of the test server with a password.
LOCKED = "locked"


def settings_of(table: dict[str, str]) -> PortalSettings:
    """Return the settings of a portal with the `[database]` *table*."""
    return read({"database": table, "agents": {"token_env": "NOBODY"}})


def audit_fault(store: Store) -> Fault | None:
    """Return the first fault of the audit."""
    total = store.read(count)
    return store.read(lambda connection: first_fault(all_entries(connection), count=total))


class Database:
    """A database with the `[database]` *table*, and the stores of a test."""

    def __init__(self, table: dict[str, str], name: str = "") -> None:
        self.table = table
        self.name = name
        """The name of the database on its server, if it has one."""
        self._stores: list[Store] = []

    def store(self) -> Store:
        """Return a new store, like the store of another process. `close` closes it."""
        store = Store.of_settings(settings_of(self.table))
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Close the stores."""
        for store in self._stores:
            store.close()


@contextmanager
def of_file(directory: Path) -> Iterator[Database]:
    """Create a migrated SQLite database below *directory*."""
    database = Database({"file": str(Path(tempfile.mkdtemp(dir=directory)) / "portal.db")})
    try:
        database.store().migrate()
        yield database
    finally:
        database.close()
