"""What a command may do with the outbox while the agent runs beside it.

Every call opens the database, does one thing and closes it again: a command that stays (`events --follow`) holds
nothing that the agent needs. SQLite keeps the two apart; a write waits up to five seconds for the agent's.

After a write the file ``nudge`` is touched, so that the agent looks at once.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

from bridge import database
from bridge.approval_rows import KeptDecision, keep_decision, one_decision
from bridge.database import DATABASE, SQL, is_damage, is_lock, transaction
from bridge.errors import OutboxError, OutboxReadOnly
from bridge.nudge import is_marked, touch_nudge
from bridge.record import TransitionRecord, decode_record
from bridge.remembered import Stored, read_state
from bridge.rows import STATES


class DeliveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one sink has, or has not, of one record."""

    sink: str
    sequence: int
    state: str
    attempts: int
    error: str | None
    changed_at: float
    """When the row was written last, in seconds since 1970."""
    record: TransitionRecord


class Beside(AbstractContextManager["Beside"]):
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
                changed_at=changed_at,
                record=_record(body),
            )
            for sink_name, sequence, its_state, attempts, error, changed_at, body in rows
            if body
        ]

    def totals(self) -> dict[str, dict[str, int]]:
        """Read sink -> total by state, sinks that are no longer configured included."""
        with self._reading() as connection:
            rows = connection.execute(SQL["totals"]).fetchall()
        return {name: dict(zip(STATES, counts, strict=True)) for name, *counts in rows}

    def state(self) -> Stored:
        """Read what the agent believes and who it is."""
        with self._reading() as connection:
            return read_state(connection)

    def decide(self, decision: KeptDecision) -> None:
        """Write down a decision that the running agent shall follow."""
        with self._writing() as connection:
            keep_decision(connection, decision)

    def decision(self, decision: KeptDecision) -> KeptDecision | None:
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

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            if not self._path.exists():
                raise OutboxError(
                    f"There is no outbox in {self._directory}. Start the agent with `run` first, or name the right "
                    "directory with --state-directory or --config."
                )
            connection = database.open_to_read(self._path)
            if connection is None:
                raise OutboxError(
                    f"The outbox {self._path} cannot be opened. Either you may not read it (ask as its owner or as "
                    "root), or it is damaged: `run` sets a damaged one aside and starts a new one."
                )
        except OSError as error:
            raise OutboxError(f"The outbox {self._path} cannot be read: {error}.") from error
        try:
            database.create_schema(connection)
            yield connection
        except sqlite3.Error as error:
            self._raise(error, "read")
        finally:
            connection.close()

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
        raise OutboxError(f"A record in the outbox cannot be read: {error}. The file is damaged.") from error
