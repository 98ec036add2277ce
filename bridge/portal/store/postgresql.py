"""PostgreSQL as the engine of the portal: one database, and any number of processes.

What it does otherwise than SQLite (`bridge.portal.store.sqlite`, which has the same names) stands here, and nowhere
else; only who has a database of this kind needs psycopg. Writes are READ COMMITTED and take the locks of their rows
first; whoever reads sees one state of the database.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.types.string import StrDumper, StrDumperUnknown
from sqlalchemy import Connection, Engine, create_engine

from bridge.errors import BridgeError, ConfigurationError, SecretUnavailable
from bridge.logs import ThrottledLog
from bridge.portal.schema import CHANNEL
from bridge.system.secrets import Secret, masked
from bridge.text import one_line

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 300
_STATEMENT_SECONDS = 10.0
#: How long a transaction may hold its locks while its process says nothing: that machine may be gone.
_IDLE_SECONDS = 10.0
#: Set here and not among the options of the connection, which not every pooler passes on.
_LIMITS = (
    "SELECT set_config('lock_timeout', %s, false), set_config('statement_timeout', %s, false), "
    "set_config('idle_in_transaction_session_timeout', %s, false)"
)
_LISTEN_SECONDS = 0.5
_AGAIN_SECONDS = 1.0
#: Two transactions waited for each other, or saw each other's changes: one of them is to begin again.
_IN_THE_WAY = frozenset({"40001", "40P01"})
#: What libpq is to do unless the address says otherwise: a server that is silent is gone within seconds.
_DEFAULTS = {
    "application_name": "scheduled-events-portal",
    "client_encoding": "UTF8",
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "5000",
}


class Postgresql:
    """The database at *url*, whose password *secret* has; whoever waits longer than *busy_seconds* fails."""

    writers = 4
    is_shared = True

    def __init__(self, url: str, secret: Secret, *, busy_seconds: float) -> None:
        self._url = url
        self._secret = secret
        self._busy_seconds = busy_seconds
        try:
            given = {name: value for name, value in conninfo.conninfo_to_dict(url).items() if value is not None}
        except psycopg.Error:
            raise ConfigurationError("database.url is no address that PostgreSQL's library can read.") from None
        timeout = str(max(2, round(busy_seconds)))  # of libpq the least
        self._parameters = {"connect_timeout": timeout, **_DEFAULTS, **given}

    def make(self) -> None:
        """Do nothing: whoever runs the server makes the database."""

    def engine(self, **pool: Any) -> Engine:
        """Return what connects to it; a connection that was cut while nobody used it is noticed before it is used."""
        return create_engine("postgresql+psycopg://", creator=self.connect, pool_pre_ping=True, **pool)

    def connect(self, **parameters: Any) -> psycopg.Connection[Any]:
        """Return a connection of its own; the password is read each time, so that a new one needs no restart."""
        password = self._secret.value()
        secret = {} if password is None else {"password": password}
        connection = psycopg.connect(**{**self._parameters, **secret, **parameters})
        for dumper in (_Text, _UnknownText):
            connection.adapters.register_dumper(str, dumper)
        times = (self._busy_seconds, _STATEMENT_SECONDS, _IDLE_SECONDS)
        connection.execute(_LIMITS, [f"{int(1000 * seconds)}ms" for seconds in times])
        connection.commit()
        return connection

    def begin(self, connection: Connection, *, writes: bool) -> None:
        """Begin a transaction as it is to be; psycopg says so to the server with the first statement."""
        raw: Any = connection.connection.dbapi_connection
        level = psycopg.IsolationLevel
        raw.isolation_level = level.READ_COMMITTED if writes else level.REPEATABLE_READ
        raw.read_only = not writes

    def is_in_the_way(self, error: BaseException) -> bool:
        """Return whether a transaction failed only because of another one beside it, and may be done again."""
        return getattr(error, "sqlstate", None) in _IN_THE_WAY

    def why(self, error: BaseException) -> str:
        """Return what *error* says, on one line and without the password."""
        if isinstance(error, SecretUnavailable):
            return f"The portal's database cannot be asked: {error}"
        secrets: tuple[str, ...] = ()
        with contextlib.suppress(SecretUnavailable):
            secrets = self._secret.values()
        lines = masked(str(error), secrets).strip().splitlines() or [type(error).__name__]
        said = one_line(lines[0].strip().rstrip("."), _MOST_CHARACTERS)
        return f"The portal's database cannot do it now: {said}."

    def listener(self, heard: Callable[[], object]) -> Listener:
        """Return what calls *heard* when a process has decided something, until it is stopped."""
        return Listener(self, heard)

    def back_up(self, target: Path) -> None:
        """Refuse, and say what to do instead."""
        raise BridgeError(
            "The portal's database is one of PostgreSQL, which has a program for that. Without its properties, so that "
            "who starts a portal on the copy has agents ask for everything again: pg_dump --format=custom "
            f"--exclude-table-data=properties --file={quote(str(target))} {quote(self._url)}"
        )


class Listener:
    """Calls *heard* when a process has decided something, and when that may have been missed; in a thread of its own.

    A connection that is cut is made again. Until then the portal sees by itself, each second, what was decided.
    """

    def __init__(self, server: Postgresql, heard: Callable[[], object]) -> None:
        self._server = server
        self._heard = heard
        self._stopping = threading.Event()
        self._log = ThrottledLog(logger)
        self._thread = threading.Thread(target=self._run, name="portal-listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end within half a second; one that just connects has its end with the process."""
        self._stopping.set()

    def join(self) -> None:
        """Return when the thread has ended, or will not soon."""
        self._thread.join(2 * _LISTEN_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except (psycopg.Error, OSError, SecretUnavailable) as error:
                why = self._server.why(error)
                self._log.problem("listen", logging.WARNING, f"Decisions of other processes come a second late. {why}")
                self._stopping.wait(_AGAIN_SECONDS)

    def _listen(self) -> None:
        with self._server.connect(autocommit=True) as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            self._log.recovered("listen", "Decisions of other processes come at once again.")
            self._heard()
            while not self._stopping.is_set():
                for _ in connection.notifies(timeout=_LISTEN_SECONDS, stop_after=1):
                    self._heard()


class _Text(StrDumper):
    """A text as PostgreSQL can hold it: without NUL, which no name and no key has."""

    def dump(self, obj: str) -> Any:
        """Return *obj* as it goes to the server."""
        return super().dump(obj.replace("\0", "\ufffd"))


class _UnknownText(StrDumperUnknown):
    """The same, where the server is to find out of which type it is."""

    def dump(self, obj: str) -> Any:
        """Return *obj* as it goes to the server."""
        return super().dump(obj.replace("\0", "\ufffd"))
