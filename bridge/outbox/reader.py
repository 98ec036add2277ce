"""What a command may do with the outbox while the agent runs beside it.

Every call opens the database, does one thing and closes it again: a command that stays (`events --follow`) holds
nothing that the agent needs. SQLite keeps the two apart; a write waits up to five seconds for the agent's.

After a write the file ``nudge`` is touched, so that the agent looks at once.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

import msgspec

from bridge.clock import format_time
from bridge.config.loader import read, state_directory
from bridge.errors import OutboxError, OutboxReadOnly
from bridge.events.record import TransitionRecord, decode_record
from bridge.outbox import database, deliveries, meta
from bridge.outbox.approvals import StoredDecision, keep_decision, one_decision
from bridge.outbox.database import DATABASE, SQL, is_damage, is_lock, transaction
from bridge.outbox.deliveries import SinkAccount
from bridge.outbox.meta import SavedState
from bridge.outbox.nudge import is_marked, touch_nudge
from bridge.outbox.snapshot import Snapshot, read_snapshot


class DeliveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one sink has, or has not, of one record."""

    sink: str
    sequence: int
    state: str
    attempts: int
    error: str | None
    changed_at: str
    """When it was accepted, tried last, or finished with: UTC, milliseconds."""
    record: TransitionRecord


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
        """Leave nothing behind: nothing is held between calls."""

    @property
    def is_stale(self) -> bool:
        """Return whether the agent works from memory, because its disk refuses: it knows more than is read here."""
        return is_marked(self._directory)

    def records(self, limit: int | None = None, *, after: int = 0) -> list[TransitionRecord]:
        """Read the records with a sequence above *after*, oldest first; of many, the newest *limit*."""
        with self._reading() as connection:
            if limit is None:
                rows = connection.execute(SQL["list_records"], (after,)).fetchall()
            else:
                rows = connection.execute(SQL["list_last_records"], (after, limit)).fetchall()[::-1]
            return [_record(body) for (body,) in rows]

    def deliveries(
        self, sink: str | None = None, *, state: str | None = None, limit: int | None = None
    ) -> list[DeliveryRow]:
        """Read rows by sink, oldest first; null asks for every sink, every state, all of them."""
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
        """Read what the agent believes and who it is."""
        with self._reading() as connection:
            return meta.load(connection)

    def glance(self) -> Snapshot:
        """Read everything that a person asks at once, all of it from one commit."""
        with self._reading() as connection:
            try:
                return read_snapshot(connection)
            except msgspec.MsgspecError as error:
                raise _unreadable(error) from error

    def decide(self, decision: StoredDecision) -> None:
        """Write down a decision that the running agent shall follow."""
        with self._writing() as connection:
            keep_decision(connection, decision)

    def decision(self, decision: StoredDecision) -> StoredDecision | None:
        """Read what became of a decision."""
        with self._reading() as connection:
            return one_decision(connection, decision.source, decision.decision_id)

    def retry(self, sink: str | None = None, *, record_id: str | None = None) -> int:
        """Have parked records tried again, and a paused sink at once, parked or not; return how many were parked.

        Null asks for every sink. With *record_id* only that record is tried again.
        """
        with self._writing() as connection:
            names = [sink] if sink is not None else [name for (name,) in connection.execute(SQL["known_sinks"])]
            count = 0
            for name in names:
                arguments = {"sink": name, "id": record_id, "now": time.time()}
                moved = connection.execute(SQL["retry"], arguments).rowcount
                count += moved
                if moved or sink is not None or record_id is None:
                    connection.execute(SQL["nudge"], (name,))
            # A record that comes back joins its event, which may have become urgent meanwhile.
            connection.execute(SQL["align_urgency"])
        return count

    def discard(self, sink: str, *, state: str | None = None, record_id: str | None = None) -> int:
        """Give up on what *sink* is owed, pending and parked or one of them; return how many records."""
        arguments = {"sink": sink, "state": state, "id": record_id, "now": time.time()}
        with self._writing() as connection:
            return connection.execute(SQL["discard"], arguments).rowcount

    def _is_there(self) -> bool:
        try:
            self._path.stat()
        except FileNotFoundError:
            return False
        return True

    def _nothing_here(self) -> str:
        said = f"There is no outbox in {self._directory}. "
        usual = state_directory(read({}), {}, is_root=True)
        # lexists: whoever asks may not look through the link that systemd makes
        if usual != self._directory and os.path.lexists(usual):
            said += f"This machine has {usual}, where the agent of the system keeps its own: ask as root for that one. "
        return (
            f"{said}Start the agent with `run` first, or name the right directory with --state-directory or --config."
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
        if self.is_stale:
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
            with transaction(connection):
                yield connection
        except sqlite3.Error as error:
            self._raise(error, "written")
        finally:
            connection.close()
        touch_nudge(self._directory)

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
