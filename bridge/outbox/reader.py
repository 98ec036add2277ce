"""The outbox as commands see it, while the agent runs beside them or not.

Every call opens the database, does one thing and closes it again: a command that stays (`events --follow`) keeps
nothing open that the agent needs. SQLite keeps the two apart; a write waits up to five seconds for the agent's, and
tells it by the file ``nudge``.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import NoReturn

import msgspec

from bridge.clock import format_time
from bridge.config.loader import service_directory
from bridge.errors import OutboxError, OutboxReadOnly
from bridge.events.record import TransitionRecord, decode_record
from bridge.outbox import database, deliveries, locks, meta
from bridge.outbox.approvals import (
    PendingApproval,
    StoredDecision,
    keep_overruling,
    one_decision,
    open_decisions,
    remembered_approvals,
)
from bridge.outbox.database import DATABASE, SQL, is_damage, is_lock, transaction
from bridge.outbox.deliveries import SinkAccount
from bridge.outbox.meta import SavedState

#: Behind the outcomes of approvals stands the last change that Azure made; so many of them an event has at most.
_MOST_RECORDS = 50
_AS_ROOT = "you may not look into that, so ask as root, with sudo before the command"


class DeliveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One record for one sink, and what became of it."""

    sink: str
    sequence: int
    state: str
    attempts: int
    error: str | None
    changed_at: str
    """When it was accepted, tried last, or finished with: UTC, milliseconds."""
    record: TransitionRecord


class LastError(msgspec.Struct, frozen=True, kw_only=True):
    """Why one sink has not got what is pending or parked, when it was tried last."""

    message: str
    at: float
    """Seconds since 1970."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An outbox, as of one commit."""

    stored: SavedState
    newest_record_at: float | None
    sinks: dict[str, SinkAccount]
    oldest_pending_at: dict[str, float]
    """By sink, in seconds since 1970; only of sinks that something is pending for."""
    last_errors: dict[str, LastError]
    """By sink; only of sinks that were tried in vain."""
    last_records: dict[str, tuple[TransitionRecord, ...]]
    """By event key, the newest first, for every event of the last document."""
    approvals: tuple[PendingApproval, ...]
    decisions: tuple[StoredDecision, ...]
    """Those that are not finished with, and holds."""


class OutboxFile(AbstractContextManager["OutboxFile"]):
    """The outbox in *directory*, from outside; raise OutboxError when there is none.

    Every method raises OutboxError when the outbox cannot be read, the writing ones OutboxReadOnly when the disk
    refuses writes.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / DATABASE
        with self._reading():
            pass

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing stays open between calls."""

    @property
    def is_agent_in_memory(self) -> bool:
        """Return whether the agent works from memory, because its disk refuses: it knows more than is read here."""
        return locks.is_in_memory(self._directory)

    def records(
        self,
        limit: int | None = None,
        *,
        after: int = 0,
        wanted: Callable[[TransitionRecord], bool] = lambda _record: True,
    ) -> list[TransitionRecord]:
        """Read the *wanted* records with a sequence above *after*, oldest first; of many, the newest *limit*."""
        with self._reading() as connection:
            rows = connection.execute(SQL["list_last_records"], (after, -1))
            found = (record for record in (_record(body) for (body,) in rows) if wanted(record))
            return list(islice(found, limit))[::-1]

    def last_sequence(self) -> int:
        """Return the sequence of the newest record, 0 when there is none."""
        newest = self.records(limit=1)
        return newest[0].sequence if newest else 0

    def deliveries(
        self, sink: str | None = None, *, state: str | None = None, limit: int | None = None
    ) -> list[DeliveryRow]:
        """Read rows by sink, oldest first; None asks for every sink, every state, all of them."""
        arguments = {"sink": sink, "state": state, "limit": -1 if limit is None else limit}
        with self._reading() as connection:
            rows = connection.execute(SQL["list_deliveries"], arguments).fetchall()
        return [
            DeliveryRow(
                sink=sink_name,
                sequence=sequence,
                state=its_state,
                attempts=attempts,
                error=error,
                changed_at=format_time(datetime.fromtimestamp(changed_at, timezone.utc)),
                record=_record(body),
            )
            for sink_name, sequence, its_state, attempts, error, changed_at, body in rows
            if body
        ]

    def accounts(self) -> dict[str, SinkAccount]:
        """Read sink -> its account, sinks that are no longer configured included."""
        with self._reading() as connection:
            return deliveries.accounts(connection)

    def state(self) -> SavedState:
        """Read the last document and who this VM is."""
        with self._reading() as connection:
            return meta.load(connection)

    def snapshot(self) -> Snapshot:
        """Read everything that a person asks at once, all of it from one commit."""
        with self._reading() as connection:
            try:
                return _snapshot(connection)
            except msgspec.MsgspecError as error:
                raise _unreadable(error) from error

    def decide(self, decision: StoredDecision, overruled: Collection[int] = ()) -> tuple[StoredDecision, ...]:
        """Write down a decision that the running agent shall follow, in spite of the holds known by *overruled*.

        With other holds on its event it is not written down, and those are returned.
        """
        with self._writing() as connection:
            return keep_overruling(connection, decision, overruled)

    def decision(self, decision: StoredDecision) -> StoredDecision | None:
        """Read what became of a decision."""
        with self._reading() as connection:
            return one_decision(connection, decision.source, decision.decision_id)

    def retry(self, sink: str | None = None, *, record_id: str | None = None) -> int:
        """Have parked records tried again, and a paused sink at once, parked or not; return how many were parked.

        None asks for every sink. With *record_id* only that record is tried again.
        """
        with self._writing() as connection:
            return deliveries.retry(connection, sink, record_id=record_id, now=time.time())

    def discard(self, sink: str, *, state: str | None = None, record_id: str | None = None) -> int:
        """Give up on records of *sink*, pending and parked or in one *state*; return how many."""
        with self._writing() as connection:
            return deliveries.discard(connection, sink, state=state, record_id=record_id, now=time.time())

    def _is_there(self) -> bool:
        try:
            self._path.stat()
        except FileNotFoundError:
            return False
        return True

    def _nothing_here(self) -> str:
        message = f"There is no outbox in {self._directory}. "
        usual = service_directory()
        # lexists: the user may not be allowed to follow the link that systemd makes
        if usual != self._directory and os.path.lexists(usual):
            how = f"name it with --state-directory {usual}" if os.access(usual, os.R_OK | os.X_OK) else _AS_ROOT
            return f"{message}The service's agent of this machine keeps its own in {usual}: {how}."
        return message + (
            "Start the agent with `run` first, or name the right directory with --state-directory or --config."
        )

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            if not self._is_there():
                raise OutboxError(self._nothing_here())
            connection = database.open_to_read(self._path)
        except OSError as error:
            raise OutboxError(
                f"The outbox {self._path} cannot be read: {error.strerror or error}. Ask as the owner of the directory "
                "or as root."
            ) from error
        if connection is None:
            can_read = os.access(self._path, os.R_OK)
            raise OutboxError(
                f"The outbox {self._path} cannot be opened. "
                + (
                    "It is damaged, or its disk fails: `run` sets a damaged one aside and starts a new one."
                    if can_read
                    else "You may not read it: ask as its owner or as root."
                )
            )
        try:
            self._refuse_empty(connection)
            database.create_schema(connection)
            yield connection
        except sqlite3.Error as error:
            self._raise(error, "read")
        finally:
            connection.close()

    def _refuse_empty(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            raise OutboxError(
                f"The outbox {self._path} holds nothing. Either an agent is just making it (try again), or what it "
                "held is gone: `run` starts a new one."
            )

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        if self.is_agent_in_memory:
            raise OutboxReadOnly(
                "The agent works from memory because its disk refuses writes, so nothing can be changed beside it. "
                "Free the disk or make it writable, then try again."
            )
        try:
            connection = database.connect(self._path)
        except sqlite3.Error as error:
            self._raise(error, "opened")
        try:
            database.create_schema(connection)
            database.add_tables(connection)
            with transaction(connection):
                yield connection
        except sqlite3.Error as error:
            self._raise(error, "written")
        finally:
            connection.close()
        locks.notify_agent(self._directory)

    def _raise(self, error: sqlite3.Error, what: str) -> NoReturn:
        where = f"The outbox {self._path} cannot be {what}: {str(error).rstrip('.')}."
        if is_damage(error):
            raise OutboxError(f"{where} It is damaged; a running agent sets it aside and goes on by itself.") from error
        if is_lock(error):
            raise OutboxError(f"{where} Another program writes to it; try again.") from error
        if what == "read":
            raise OutboxError(f"{where} Ask as the owner of the directory or as root.") from error
        raise OutboxReadOnly(f"{where} Free the disk, or ask as the owner of the directory or as root.") from error


def _record(body: str) -> TransitionRecord:
    try:
        return decode_record(body)
    except msgspec.MsgspecError as error:
        raise _unreadable(error) from error


def _unreadable(error: msgspec.MsgspecError) -> OutboxError:
    return OutboxError(f"A record in the outbox cannot be read: {error}. The file is damaged.")


def _snapshot(connection: sqlite3.Connection) -> Snapshot:
    """Return what *connection* has; raise sqlite3.Error or msgspec.MsgspecError when it cannot be read."""
    connection.execute("BEGIN")
    try:
        stored = meta.load(connection)
        (newest,) = connection.execute(SQL["newest_record_at"]).fetchone()
        sinks = deliveries.accounts(connection)
        keys = [] if stored.document is None else [event.key for event in stored.document.events]
        return Snapshot(
            stored=stored,
            newest_record_at=newest,
            sinks=sinks,
            oldest_pending_at=deliveries.oldest_pending(connection),
            last_errors=_last_errors(connection, sinks),
            last_records={key: _last_records(connection, key) for key in keys},
            approvals=remembered_approvals(connection),
            decisions=open_decisions(connection),
        )
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _last_errors(connection: sqlite3.Connection, sinks: Iterable[str]) -> dict[str, LastError]:
    found = {sink: connection.execute(SQL["last_error"], {"sink": sink}).fetchone() for sink in sinks}
    return {sink: LastError(message=row[0], at=row[1]) for sink, row in found.items() if row is not None}


def _last_records(connection: sqlite3.Connection, event_key: str) -> tuple[TransitionRecord, ...]:
    rows = connection.execute(SQL["last_records_of_event"], (event_key, _MOST_RECORDS))
    return tuple(decode_record(body) for (body,) in rows)
