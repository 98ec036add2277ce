"""Fixtures of the portal's tests. Without the extra [portal], as on Python 3.10, the tests are skipped.

Tests with the fixture `database` run on SQLite and on PostgreSQL. Without PostgreSQL, the second run is skipped, unless
POSTGRESQL=required.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from closing import closing_each

if TYPE_CHECKING:
    from attested_fleet import AttestedFleet
    from azure_documents import Authority
    from portal_databases import Database
    from postgresql_server import Server
    from verifier_kit import VerifierKit

    from bridge.portal.store.database import Store
    from bridge.testing import ManualClock

_IS_INSTALLED = all(
    find_spec(name) is not None for name in ("sqlalchemy", "alembic", "asn1crypto", "starlette", "uvicorn")
)


class _Skipped(pytest.Module):
    """A test file that is skipped without an import."""

    def collect(self) -> NoReturn:
        raise pytest.skip.Exception("the extra [portal] is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the file if the libraries are missing."""
    return None if _IS_INSTALLED else _Skipped.from_parent(parent, path=module_path)


def _missing(what: str) -> NoReturn:
    if os.environ.get("POSTGRESQL") == "required":
        pytest.fail(f"{what}, and POSTGRESQL=required")
    pytest.skip(what)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A PostgreSQL server for the tests."""
    if find_spec("psycopg") is None:
        _missing("the extra [portal-postgresql] is not installed")
    from postgresql_server import Server, programs  # noqa: PLC0415  # needs the extra

    binaries = programs()
    if binaries is None:
        _missing("no PostgreSQL is installed here (Debian: postgresql)")
    server = Server(binaries)
    yield server
    server.close()


@pytest.fixture
def postgresql_database(postgresql: Server) -> Iterator[Database]:
    """A PostgreSQL database, migrated as on the first start of the portal."""
    with postgresql.database() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., AbstractContextManager[Database]]:
    """A context manager that creates a migrated database of each engine."""
    from portal_databases import of_file  # noqa: PLC0415  # needs the extra

    if request.param == "sqlite":
        return partial(of_file, tmp_path)
    server: Server = request.getfixturevalue("postgresql")
    return server.database


@pytest.fixture
def database(new_database: Callable[..., AbstractContextManager[Database]]) -> Iterator[Database]:
    """A database of each engine, migrated as on the first start of the portal."""
    with new_database() as found:
        yield found


@pytest.fixture
def store(database: Database) -> Store:
    """A store with a database of each engine."""
    return database.store()


@pytest.fixture
def fleet_of(database: Database, tmp_path: Path) -> Iterator[Callable[..., AttestedFleet]]:
    """Return a function that creates the portals of an `AttestedFleet` with tables."""
    from attested_fleet import AttestedFleet, at_11_01  # noqa: PLC0415  # needs the extra

    def fleet(*, clock: ManualClock | None = None, **tables: Any) -> AttestedFleet:
        return AttestedFleet(tmp_path / "fleet", database, clock or at_11_01(), **tables)

    with closing_each(fleet) as make:
        yield make


@pytest.fixture(scope="module")
def azure() -> Authority:
    """An authority that issues attested documents, as Azure does."""
    from azure_documents import Authority  # noqa: PLC0415  # needs the extra
    from verifier_kit import NOW  # noqa: PLC0415  # needs the extra

    return Authority(NOW)


@pytest.fixture(scope="module")
def stranger() -> Authority:
    """Another authority with the same names."""
    from azure_documents import Authority  # noqa: PLC0415  # needs the extra
    from verifier_kit import NOW  # noqa: PLC0415  # needs the extra

    return Authority(NOW)


@pytest.fixture
def verifier(azure: Authority) -> VerifierKit:
    """A verifier that trusts the authority `azure`."""
    from verifier_kit import VerifierKit  # noqa: PLC0415  # needs the extra

    return VerifierKit(azure)
