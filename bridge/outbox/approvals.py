"""What the outbox keeps of approvals: decisions, and approvals on their way. Functions over a connection.

A decision is kept before anybody looks at what it is about, and its jti long after it expired: a decision that comes
again must be known again, whatever happened in between. An approval is kept for one event *as it was decided on*: when
the event changes, its digest is another one, and nothing here speaks for it any more.

Nothing of this is ever written while the outbox lives in memory: what is decided there would be forgotten.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from bridge.clock import CLOCK_SKEW_SECONDS, parse_time
from bridge.errors import OutboxReadOnly, StreamChanged
from bridge.events.event import ScheduledEvent, encode
from bridge.events.record import Approval, Transition
from bridge.outbox.database import SQL, is_in_memory
from bridge.outbox.meta import get

#: A jti is remembered so long after its expiry: the clocks' skew, and a day for a clock that is set back.
REMEMBER_SECONDS = CLOCK_SKEW_SECONDS + 86_400.0
_KEEP_APPROVALS_SECONDS = 7 * 86_400.0

DRAINING, WANTED, POSTED, DRY_RUN = "draining", "wanted", "posted", "dry_run"
COMMAND_FAILED, WITHDRAWN, OVER = "command_failed", "withdrawn", "over"
NEW, WAITING, HELD, FOLLOWED, REFUSED = "new", "waiting", "held", "followed", "refused"


class StoredDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, and what became of it."""

    arrival: int = 0
    source: str
    """portal or cli."""
    approver: str
    kid: str | None = None
    key_sha256: str | None = None
    decision_id: str
    """The jti."""
    payload_sha256: str
    event_id: str
    event_digest: str
    verdict: str
    """approve or hold."""
    issued_at: int
    """Microseconds since 1970."""
    expires_at: float
    """Seconds since 1970."""
    reason: str | None = None
    received_at: float
    state: str = NEW
    outcome: str | None = None
    said: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Return the event it is about, as it was."""
        return self.event_id, self.event_digest


class PendingApproval(msgspec.Struct, frozen=True, kw_only=True):
    """One approval of one event as it was decided on."""

    event_id: str
    event_digest: str
    state: str
    """draining (a rule's command runs first), wanted (to be posted), posted (200); the others are ends."""
    source: str
    decision_id: str | None = None
    approvers: tuple[str, ...] = ()
    reason: str | None = None
    arrivals: tuple[int, ...] = ()
    """The decisions behind it."""
    oldest_issued_at: int | None = None
    """Of those decisions; a hold that is not older withdraws it. Null: a rule."""
    attempts: int = 0
    """How often StartRequests was, or may have been, sent."""
    http_status: int | None = None
    """The last answer; null when there was none, or none to the last attempt."""
    is_told: bool = False
    """A record says that it failed at first."""
    changed_at: float = 0.0
    posted_at: float | None = None
    event: ScheduledEvent

    @property
    def key(self) -> tuple[str, str]:
        """Return the event it is for, as it was."""
        return self.event_id, self.event_digest


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A record to be written about an approval."""

    transition: Transition
    event: ScheduledEvent | None
    approval: Approval


class DecisionUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one decision."""

    arrival: int
    state: str
    outcome: str | None = None
    said: str | None = None


class ApprovalState(msgspec.Struct, frozen=True, kw_only=True):
    """All that is open, from one commit."""

    stream_id: str
    decisions: tuple[StoredDecision, ...]
    consents: dict[tuple[str, str], PendingApproval]


def made_at(connection: sqlite3.Connection) -> str:
    """Return when this database was made: what was decided earlier may have been followed already."""
    return get(connection, "created_at") or ""


def keep_decisions(connection: sqlite3.Connection, decisions: Sequence[StoredDecision]) -> list[str]:
    """Keep each decision that is new; return new, known, replayed or too_old for each."""
    refuse_memory(connection)
    created_at = int(parse_time(made_at(connection)).timestamp() * 1_000_000)
    return [
        "too_old" if decision.issued_at < created_at else keep_decision(connection, decision) for decision in decisions
    ]


def keep_decision(connection: sqlite3.Connection, decision: StoredDecision) -> str:
    """Keep *decision* unless its jti is known; return new, known or replayed."""
    found = _find(connection, decision.source, decision.approver, decision.decision_id)
    if found is None:
        connection.execute(SQL["add_decision"], msgspec.to_builtins(decision))
        return "new"
    return "known" if found == decision.payload_sha256 else "replayed"


def is_known(connection: sqlite3.Connection, *, approver: str, decision_id: str, payload_sha256: str) -> bool:
    """Return whether exactly this decision of the portal was kept before."""
    return _find(connection, "portal", approver, decision_id) == payload_sha256


def _find(connection: sqlite3.Connection, source: str, approver: str, decision_id: str) -> str | None:
    row = connection.execute(SQL["find_decision"], (source, approver, decision_id)).fetchone()
    return None if row is None else str(row[0])


def read_approvals(connection: sqlite3.Connection) -> ApprovalState:
    """Return what is open: decisions nobody has finished with, holds, and every approval that is remembered."""
    return ApprovalState(
        stream_id=get(connection, "stream_id") or "",
        decisions=open_decisions(connection),
        consents={consent.key: consent for consent in remembered_consents(connection)},
    )


def open_decisions(connection: sqlite3.Connection) -> tuple[StoredDecision, ...]:
    """Return the decisions that nobody has finished with, and holds."""
    return tuple(_decision(row) for row in connection.execute(SQL["open_decisions"]))


def remembered_consents(connection: sqlite3.Connection) -> tuple[PendingApproval, ...]:
    """Return every approval that is remembered."""
    return tuple(_consent(row) for row in connection.execute(SQL["copy_approvals"]))


def one_decision(connection: sqlite3.Connection, source: str, decision_id: str) -> StoredDecision | None:
    """Return the decision called *decision_id*."""
    row = connection.execute(SQL["one_decision"], (source, decision_id)).fetchone()
    return None if row is None else _decision(row)


def _decision(row: Sequence[Any]) -> StoredDecision:
    return StoredDecision(**dict(zip(StoredDecision.__struct_fields__, row, strict=True)))


def _consent(row: Sequence[Any]) -> PendingApproval:
    try:
        consent = msgspec.json.decode(row[4], type=PendingApproval)
    except msgspec.MsgspecError as error:
        raise sqlite3.DatabaseError(f"The outbox is malformed: an approval cannot be read: {error}") from error
    return msgspec.structs.replace(consent, state=row[2], changed_at=row[3])


def write_approvals(
    connection: sqlite3.Connection,
    stream_id: str,
    *,
    consents: Iterable[PendingApproval] = (),
    settled: Iterable[DecisionUpdate] = (),
) -> None:
    """Write down what became of approvals and decisions; raise StreamChanged when they are not this outbox's."""
    refuse_memory(connection)
    if get(connection, "stream_id") != stream_id:
        raise StreamChanged("The outbox was started over; approvals are looked at anew.")
    for consent in consents:
        arguments = (*consent.key, consent.state, consent.changed_at, encode(consent).decode())
        connection.execute(SQL["put_approval"], arguments)
    for each in settled:
        connection.execute(SQL["settle_decision"], (each.state, each.outcome, each.said, each.arrival))


def begin_posting(
    connection: sqlite3.Connection, stream_id: str, consents: Sequence[PendingApproval], now: float
) -> list[PendingApproval]:
    """Count an attempt for each of *consents* that may still be posted, and return those, as they stand now.

    One with a decision beside it that nobody has looked at yet is left out: it may be a hold.
    """
    state = read_approvals(connection)
    ready = [
        msgspec.structs.replace(known, attempts=known.attempts + 1, http_status=None, changed_at=now)
        for consent in consents
        if (known := state.consents.get(consent.key)) is not None
        and known.state == WANTED
        and connection.execute(SQL["has_new_decision"], (known.event_id,)).fetchone() is None
    ]
    write_approvals(connection, stream_id, consents=ready)
    return ready


def prune(connection: sqlite3.Connection, active_event_ids: Collection[str], now: float) -> None:
    """Forget what nobody can use any more; nothing of an event that is still there."""
    if is_in_memory(connection):
        return
    active = json.dumps(sorted(active_event_ids))
    connection.execute(SQL["prune_decisions"], (now - REMEMBER_SECONDS, active))
    connection.execute(SQL["prune_approvals"], (now - _KEEP_APPROVALS_SECONDS, active))


def refuse_memory(connection: sqlite3.Connection) -> None:
    """Raise OutboxReadOnly while the outbox lives in memory."""
    if is_in_memory(connection):
        raise OutboxReadOnly(
            "The outbox lives in memory only, because its disk refuses, so nothing is approved. Free the disk."
        )


def cli_decision(
    *, approver: str, decision_id: str, event: ScheduledEvent, event_digest: str, valid_seconds: float
) -> StoredDecision:
    """Return an approval that a person gives on this VM, now."""
    now = time.time()
    return StoredDecision(
        source="cli",
        approver=approver,
        decision_id=decision_id,
        payload_sha256=decision_id,
        event_id=event.event_id or "",
        event_digest=event_digest,
        verdict="approve",
        issued_at=int(now * 1_000_000),
        expires_at=now + valid_seconds,
        received_at=now,
    )
