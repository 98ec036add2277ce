"""The PostgreSQL database, which any number of portal processes can share.

Write transactions use READ COMMITTED and first lock their rows in a fixed order. Read transactions use REPEATABLE READ,
so that all queries in a transaction see the same state of the database.
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
from sqlalchemy import Connection, Engine, create_engine

from bridge.errors import BridgeError, ConfigurationError, SecretUnavailable
from bridge.logs import ThrottledLog
from bridge.portal.schema import CHANNEL
from bridge.system.secrets import Secret, masked
from bridge.text import one_line

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 300
_STATEMENT_SECONDS = 10.0
#: The server ends a transaction that is idle for this time, so that a killed process does not keep its locks.
_IDLE_SECONDS = 10.0
#: A statement sets the limits, because some connection poolers drop connection options.
_LIMITS = (
    "SELECT set_config('lock_timeout', %s, false), set_config('statement_timeout', %s, false), "
    "set_config('idle_in_transaction_session_timeout', %s, false)"
)
_LISTEN_SECONDS = 0.5
_AGAIN_SECONDS = 1.0
#: With these parameters of libpq, a server that does not respond is detected within seconds.
_DEFAULTS = {
    "application_name": "scheduled-events-portal",
    "client_encoding": "UTF8",
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "5000",
}


class Postgresql:
    """A PostgreSQL database. Transactions wait at most *busy_seconds* for a lock."""

    writers = 4
    is_shared = True

    def __init__(self, url: str, secret: Secret, *, busy_seconds: float) -> None:
        self._url = url
        self._secret = secret
        self._busy_seconds = busy_seconds
        try:
            given = {name: value for name, value in conninfo.conninfo_to_dict(url).items() if value is not None}
        except psycopg.Error:
            raise ConfigurationError("database.url is not a valid PostgreSQL URL.") from None
        timeout = str(max(2, round(busy_seconds)))  # the minimum of libpq
        self._parameters = {"connect_timeout": timeout, **_DEFAULTS, **given}

    def engine(self, **pool: Any) -> Engine:
        """Return the engine, which checks an idle connection before it uses the connection again."""
        return create_engine("postgresql+psycopg://", creator=self.connect, pool_pre_ping=True, **pool)

    def connect(self, **parameters: Any) -> psycopg.Connection[Any]:
        """Return a new connection.

        The password is read for each new connection, so you can change it without a restart.
        """
        password = self._secret.value()
        secret = {} if password is None else {"password": password}
        connection = psycopg.connect(**{**self._parameters, **secret, **parameters})
        times = (self._busy_seconds, _STATEMENT_SECONDS, _IDLE_SECONDS)
        connection.execute(_LIMITS, [f"{int(1000 * seconds)}ms" for seconds in times])
        connection.commit()
        return connection

    def begin(self, connection: Connection, *, writes: bool) -> None:
        """Set the isolation level of the next transaction."""
        raw: Any = connection.connection.dbapi_connection
        level = psycopg.IsolationLevel
        raw.isolation_level = level.READ_COMMITTED if writes else level.REPEATABLE_READ
        raw.read_only = not writes

    def why(self, error: BaseException) -> str:
        """Return the message of *error* on one line, without the password."""
        if isinstance(error, SecretUnavailable):
            return f"The portal's database is not available: {error}"
        secrets: tuple[str, ...] = ()
        with contextlib.suppress(SecretUnavailable):
            secrets = self._secret.values()
        lines = masked(str(error), secrets).strip().splitlines() or [type(error).__name__]
        message = one_line(lines[0].strip().rstrip("."), _MOST_CHARACTERS)
        return f"The portal's database is not available: {message}."

    def listener(self, heard: Callable[[], object]) -> Listener:
        """Return a listener that calls *heard* after new decisions of any process, until `stop`."""
        return Listener(self, heard)

    def back_up(self, target: Path) -> None:
        """Raise BridgeError with a `pg_dump` command that, like a SQLite backup, omits the epoch."""
        raise BridgeError(
            "Back up a PostgreSQL database with: pg_dump --format=custom "
            f"--exclude-table-data=properties --file={quote(str(target))} {quote(self._url)}"
        )


class Listener:
    """Calls *heard* in a thread when new decisions might exist.

    If the connection is lost, the portal might miss notifications, so it also checks for new decisions every second.
    """

    def __init__(self, server: Postgresql, heard: Callable[[], object]) -> None:
        self._server = server
        self._heard = heard
        self._stopping = threading.Event()
        self._log = ThrottledLog(logger)
        self._thread = threading.Thread(target=self._run, name="portal-listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for it at most one second."""
        self._stopping.set()
        self._thread.join(2 * _LISTEN_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except (psycopg.Error, OSError, SecretUnavailable) as error:
                why = self._server.why(error)
                self._log.problem(
                    "listen",
                    logging.WARNING,
                    f"Decisions from other portal processes arrive up to one second late. {why}",
                )
                self._stopping.wait(_AGAIN_SECONDS)

    def _listen(self) -> None:
        with self._server.connect(autocommit=True) as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            self._log.recovered("listen", "Decisions from other portal processes arrive immediately again.")
            self._heard()
            while not self._stopping.is_set():
                for _ in connection.notifies(timeout=_LISTEN_SECONDS, stop_after=1):
                    self._heard()
