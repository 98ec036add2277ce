"""Everything that a person asks of an outbox at once, read in one transaction, so that its parts fit together.

Functions over a connection: the agent beside may write meanwhile, and nothing here holds it up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from bridge.events.record import TransitionRecord, decode_record
from bridge.outbox import deliveries, meta
from bridge.outbox.approvals import PendingApproval, StoredDecision, open_decisions, remembered_consents
from bridge.outbox.database import SQL
from bridge.outbox.deliveries import SinkAccount
from bridge.outbox.meta import SavedState

#: Behind the outcomes of approvals stands the last change that Azure made; so many of them an event has at most.
_MOST_RECORDS = 50


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
    last_errors: dict[str, LastError]
    """By sink; only of sinks that were tried in vain."""
    last_records: dict[str, tuple[TransitionRecord, ...]]
    """By event key, the newest first, for every event of the believed document."""
    consents: tuple[PendingApproval, ...]
    decisions: tuple[StoredDecision, ...]
    """Those that nobody has finished with, and holds."""


def read_snapshot(connection: sqlite3.Connection) -> Snapshot:
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
            last_errors=_last_errors(connection, sinks),
            last_records={key: _last_records(connection, key) for key in keys},
            consents=remembered_consents(connection),
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
