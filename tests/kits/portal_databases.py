"""Databases of the portal for tests: each test has its own, and opens as many stores on it as it wants."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.portal.settings import PortalSettings, read
from bridge.portal.store.database import Store

#: The one role of the tests' server that must show a password.
LOCKED = "locked"


def settings_of(table: dict[str, str]) -> PortalSettings:
    """Return the settings of a portal whose ``[database]`` is *table*."""
    return read({"database": table, "agents": {"token_env": "NOBODY"}})


class Database:
    """A database whose ``[database]`` is *table*, and the stores that a test opens there."""

    def __init__(self, table: dict[str, str], name: str = "") -> None:
        self.table = table
        self.name = name
        """How its server calls it, if it has one."""
        self._stores: list[Store] = []

    def store(self) -> Store:
        """Return a store of its own on it, as another process has one; `close` ends it."""
        store = Store.of_settings(settings_of(self.table))
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Close the stores."""
        for store in self._stores:
            store.close()


@contextmanager
def of_file(directory: Path, *, is_empty: bool = False) -> Iterator[Database]:
    """Make a database of SQLite below *directory*, as a first start of the portal does, or *is_empty*."""
    database = Database({"file": str(Path(tempfile.mkdtemp(dir=directory)) / "portal.db")})
    try:
        if not is_empty:
            database.store().migrate()
        yield database
    finally:
        database.close()
