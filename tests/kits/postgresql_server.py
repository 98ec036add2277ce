"""A PostgreSQL server for the tests on a Unix socket, with Debian's programs, and databases of the portal.

A test that takes the fixture `database` or `store` (tests/portal/conftest.py) runs on SQLite and on PostgreSQL.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from portal_databases import LOCKED, Database

_PLACES = "/usr/lib/postgresql/*/bin"
_UP_SECONDS = 60.0
_OWNER = "owner"
_TEMPLATE = "template"
#: Test data does not need to survive a crash of the machine.
_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "listen_addresses": "",
    "shared_buffers": "16MB",
    "max_connections": "120",
    "autovacuum": "off",
    "jit": "off",
}
_ACCESS = f"local all {LOCKED} scram-sha-256\nlocal all all trust\n"


def programs() -> Path | None:
    """Return the directory of the newest installed PostgreSQL programs, or None."""
    on_path = shutil.which("initdb")
    found = [Path(on_path).parent] if on_path else []
    found += sorted(Path("/").glob(_PLACES.lstrip("/")), key=_version)
    return next((each for each in reversed(found) if (each / "initdb").exists()), None)


def _version(path: Path) -> int:
    number = re.search(r"/(\d+)/", f"{path}/")
    return int(number[1]) if number else 0


class Server:
    """A server for the tests. PostgreSQL refuses to run as root, so root runs it as another user."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self.directory = Path(tempfile.mkdtemp(prefix="postgresql-"))
        self._numbers = itertools.count(1)
        self._user: dict[str, Any] = {}
        if os.name == "posix" and os.geteuid() == 0:
            self._user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            shutil.chown(self.directory, "nobody", "nogroup")
        self._data = self.directory / "data"
        self._run(
            "initdb", "--no-sync", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-U", _OWNER, "-D", self._data
        )
        (self._data / "pg_hba.conf").write_text(_ACCESS, encoding="utf-8")
        self.start()
        self._make(_TEMPLATE, template="template0")
        template = Database({"url": self.url(_TEMPLATE)})
        template.store().migrate()
        template.close()

    def start(self) -> None:
        """Start the server, and wait until it responds."""
        options = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._data, "-k", self.directory, *options],
                stdout=log,
                stderr=log,
                cwd=self.directory,
                **self._user,
            )
        until = time.monotonic() + _UP_SECONDS
        while subprocess.run(
            [self._binaries / "pg_isready", "-q", "-h", self.directory], check=False, timeout=30
        ).returncode:
            assert self._process.poll() is None, (self.directory / "log").read_text(encoding="utf-8")
            assert time.monotonic() < until, "PostgreSQL did not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server like a failing machine, and close every connection."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def close(self) -> None:
        """Stop the server, and remove its files."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, name: str, role: str = _OWNER) -> str:
        """Return the URL of the database *name*."""
        return f"postgresql:///{name}?host={quote(str(self.directory), safe='')}&user={role}"

    @contextmanager
    def database(self, *, is_empty: bool = False) -> Iterator[Database]:
        """Create a database, migrated unless *is_empty*, and drop it at the end."""
        name = f"portal{next(self._numbers)}"
        self._make(name, template="template0" if is_empty else _TEMPLATE)
        if not is_empty:  # an epoch that differs from the template's
            self.sql(name, "UPDATE properties SET value = gen_random_uuid() WHERE name = 'epoch'")
        database = Database({"url": self.url(name)}, name)
        try:
            yield database
        finally:
            database.close()
            self.sql("postgres", f'DROP DATABASE "{name}" WITH (FORCE)')

    def sql(self, name: str, statement: Any, *parameters: object) -> list[tuple[Any, ...]]:
        """Run *statement* with *parameters* in the database *name*, and return its rows."""
        with psycopg.connect(self.url(name), autocommit=True) as connection:
            done = connection.execute(statement, parameters or None)
            return done.fetchall() if done.description else []

    def run(self, program: str, *words: object) -> str:
        """Run a PostgreSQL program as the user of the tests, and return its output."""
        done = subprocess.run(
            [self._binaries / program, *map(str, words)], check=True, capture_output=True, text=True, timeout=120
        )
        return done.stdout

    def shell(self, command: str) -> None:
        """Run a shell command from a message."""
        path = f"{self._binaries}{os.pathsep}{os.environ.get('PATH', '')}"
        subprocess.run(command, shell=True, check=True, timeout=120, env={**os.environ, "PATH": path})

    def _make(self, name: str, *, template: str) -> None:
        self.sql("postgres", f'CREATE DATABASE "{name}" TEMPLATE "{template}"')

    def _run(self, program: str, *words: object) -> str:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [self._binaries / program, *map(str, words)],
            check=False,
            capture_output=True,
            text=True,
            cwd=self.directory,
            timeout=120,
            **self._user,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
