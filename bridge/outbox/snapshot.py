"""Everything that a person asks of an outbox at once, read in one transaction, so that its parts fit together.

Functions over a connection: the agent beside may write meanwhile, and nothing here holds it up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from bridge.events.record import TransitionRecord, decode_record
from bridge.outbox.approvals import PendingApproval, StoredDecision, open_decisions, remembered_consents
from bridge.outbox.database import SQL
from bridge.outbox.deliveries import STATES
from bridge.outbox.meta import Stored, read_state

#: Behind the outcomes of approvals stands the last change that Azure made; so many of them an event has at most.
_MOST_RECORDS = 50


class SinkBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """What one sink has and is owed, and why it has not got it. Times are seconds since 1970."""

    totals: dict[str, int]
    oldest_pending_at: float | None
    last_error: str | None
    """Of what is pending or parked; null when nothing was tried in vain."""
    last_error_at: float | None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An outbox, as of one commit."""

    stored: Stored
    newest_record_at: float | None
    sinks: dict[str, SinkBacklog]
    last_records: dict[str, tuple[TransitionRecord, ...]]
    """By event key, the newest first, for every event of the believed document."""
    consents: tuple[PendingApproval, ...]
    decisions: tuple[StoredDecision, ...]
    """Those that nobody has finished with, and holds."""


def read_snapshot(connection: sqlite3.Connection) -> Snapshot:
    """Return what *connection* has; raise sqlite3.Error or msgspec.MsgspecError when it cannot be read."""
    connection.execute("BEGIN")
    try:
        stored = read_state(connection)
        (newest,) = connection.execute(SQL["newest_record_at"]).fetchone()
        keys = [] if stored.document is None else [event.key for event in stored.document.events]
        return Snapshot(
            stored=stored,
            newest_record_at=newest,
            sinks={
                name: _owing(connection, name, counts) for name, *counts in connection.execute(SQL["totals"]).fetchall()
            },
            last_records={key: _last_records(connection, key) for key in keys},
            consents=remembered_consents(connection),
            decisions=open_decisions(connection),
        )
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _owing(connection: sqlite3.Connection, sink: str, counts: Sequence[int]) -> SinkBacklog:
    (oldest,) = connection.execute(SQL["oldest_pending"], (sink,)).fetchone()
    error, error_at = connection.execute(SQL["last_error"], {"sink": sink}).fetchone() or (None, None)
    return SinkBacklog(
        totals=dict(zip(STATES, counts, strict=True)),
        oldest_pending_at=oldest,
        last_error=error,
        last_error_at=error_at,
    )


def _last_records(connection: sqlite3.Connection, event_key: str) -> tuple[TransitionRecord, ...]:
    rows = connection.execute(SQL["last_records_of_event"], (event_key, _MOST_RECORDS))
    return tuple(decode_record(body) for (body,) in rows)
