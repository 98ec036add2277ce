"""Decisions and approvals in the outbox: functions over a connection.

A decision is kept before anything else is done with it, and its jti long after it expired: a decision that comes again
must be known again, whatever happened in between. An approval is kept for one event *as it was decided on*: when the
event changes, its digest is another one, and no approval counts for it any more.

Nothing of this is ever written while the outbox lives in memory: what is decided there would be forgotten.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Any

import msgspec

from bridge.clock import CLOCK_SKEW_SECONDS
from bridge.errors import OutboxReadOnly, StreamChanged
from bridge.events.event import ScheduledEvent, encode
from bridge.events.record import Approval, Transition, Verdict
from bridge.outbox.database import SQL, is_in_memory
from bridge.outbox.meta import count_decision_change, created_at, document_of, get, read_meta

#: A jti is remembered so long after its expiry: the clocks' skew, and a day for a clock that is set back.
REMEMBER_SECONDS = CLOCK_SKEW_SECONDS + 86_400.0
_KEEP_APPROVALS_SECONDS = 7 * 86_400.0

EventVersion = tuple[str, str]
"""An EventId, and the digest of the event as it was decided on."""


class DecisionStage(str, Enum):
    """How far a decision has come; the words of the column ``decisions.state``."""

    NEW = "new"
    """Kept, not evaluated yet."""
    WAITING = "waiting"
    """An approval that waits for further approvers, or for Azure."""
    ON_HOLD = "held"
    """A hold in force."""
    FOLLOWED = "followed"
    REFUSED = "refused"


class ApprovalStage(str, Enum):
    """How far an approval has come; the words of the column ``approvals.state``."""

    DRAINING = "draining"
    """A command of a rule, or of ``approval.remote``, runs first."""
    WANTED = "wanted"
    """To be posted."""
    POSTED = "posted"
    """Azure answered 200."""
    DRY_RUN = "dry_run"
    COMMAND_FAILED = "command_failed"
    WITHDRAWN = "withdrawn"
    OVER = "over"
    """The event started, changed or went before Azure took it."""


class ApprovalResult(str, Enum):
    """What came of an approval, as records and metrics name it; a refusal has its reason there."""

    ACCEPTED = "accepted"
    ALREADY_APPROVED = "already_approved"
    DRY_RUN = "dry_run"
    UNANSWERED = "unanswered"
    GAVE_UP = "gave_up"
    REJECTED = "rejected"
    DISABLED = "disabled"
    ENABLED = "enabled"
    """The file ``approvals.disabled`` is gone."""
    UNSAFE_FILES = "unsafe_files"
    COMMAND_FAILED = "command_failed"


class KeepResult(Enum):
    """What `keep_decisions`, or `limit_decisions` after it, found of one decision."""

    NEW = "new"
    KNOWN = "known"
    REPLAYED = "replayed"
    """Its jti was used for something else."""
    TOO_OLD = "too_old"
    """It was issued before this database was made."""
    SURPLUS = "surplus"
    """Its key has signed enough newer ones on the event."""
    NO_ROOM = "no_room"
    """Decisions may not use more of the outbox."""


OPEN_DECISIONS = frozenset({DecisionStage.NEW, DecisionStage.WAITING, DecisionStage.ON_HOLD})
OPEN_STAGES = frozenset({ApprovalStage.DRAINING, ApprovalStage.WANTED})


class StoredDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, and what became of it; the fields are in the order of the columns."""

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
    verdict: Verdict
    issued_at: int
    """Microseconds since 1970."""
    expires_at: float
    """Seconds since 1970."""
    reason: str | None = None
    received_at: float
    state: DecisionStage = DecisionStage.NEW
    outcome: str | None = None
    """An `ApprovalResult`, the reason of a refusal, or held."""
    message: str | None = None
    is_event_known: bool = False
    """Some record tells of this EventId, so this VM has seen the event."""

    @property
    def key(self) -> EventVersion:
        """Return the event it is about, as it was."""
        return self.event_id, self.event_digest


class PendingApproval(msgspec.Struct, frozen=True, kw_only=True):
    """One approval of one event as it was decided on; kept as JSON under these names."""

    event_id: str
    event_digest: str
    state: ApprovalStage
    source: str
    decision_id: str | None = None
    approvers: tuple[str, ...] = ()
    reason: str | None = None
    arrivals: tuple[int, ...] = ()
    """The decisions behind it."""
    payloads_sha256: tuple[str, ...] = ()
    """Of each of them; empty in what was written before these were kept."""
    oldest_issued_at: int | None = None
    """Of those decisions; a hold that is not older withdraws it. None: a rule."""
    attempts: int = 0
    """How often StartRequests was, or may have been, sent."""
    http_status: int | None = None
    """The last answer; None when there was none, or none to the last attempt."""
    command_result: str | None = None
    """A sentence: how the command of ``approval.remote`` ended. None: it did not, or there is none."""
    is_told: bool = False
    """A record says that it failed at first."""
    changed_at: float = 0.0
    put_off_at: float | None = None
    """When ``approvals.disabled`` first stopped it; None: it did not, or Azure could be asked since."""
    posted_at: float | None = None
    """When Azure took an approval of this event first; None: it did not yet."""
    event: ScheduledEvent

    @property
    def key(self) -> EventVersion:
        """Return the event it is for, as it was."""
        return self.event_id, self.event_digest

    def rests_on(self, decision: StoredDecision, at: int) -> bool:
        """Return whether *decision* is the one behind it that `arrivals` names *at* this place: numbers come again."""
        return (
            decision.key == self.key
            and decision.verdict is Verdict.APPROVE
            and self.approvers[at : at + 1] == (decision.approver,)
            and self.payloads_sha256[at : at + 1] in ((), (decision.payload_sha256,))
        )


class ApprovalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record to be written about an approval."""

    transition: Transition
    event: ScheduledEvent | None
    approval: Approval
    arrivals: tuple[int, ...] = ()
    """The decisions behind it, which the record names by their signed texts."""


class DecisionUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one decision."""

    arrival: int
    state: DecisionStage
    outcome: str | None = None
    message: str | None = None


class ApprovalState(msgspec.Struct, frozen=True, kw_only=True):
    """The open decisions and every approval that is remembered, from one commit."""

    stream_id: str
    decisions: tuple[StoredDecision, ...]
    approvals: dict[EventVersion, PendingApproval]


# Reading.


def read_state(connection: sqlite3.Connection) -> ApprovalState:
    """Return what is open: decisions that are not followed or refused, and every approval that is remembered."""
    return ApprovalState(
        stream_id=get(connection, "stream_id") or "",
        decisions=open_decisions(connection),
        approvals={approval.key: approval for approval in remembered_approvals(connection)},
    )


def read_open(connection: sqlite3.Connection) -> ApprovalState:
    """Return `read_state` without the approvals that are no longer on their way: what is asked right before a request.

    An agent that approved hundreds of events remembers them all, and Azure is to be told within milliseconds.
    """
    return ApprovalState(
        stream_id=get(connection, "stream_id") or "",
        decisions=open_decisions(connection),
        approvals=_open_approvals(connection),
    )


def _open_approvals(connection: sqlite3.Connection) -> dict[EventVersion, PendingApproval]:
    return {approval.key: approval for approval in map(approval_of, connection.execute(SQL["open_approvals"]))}


def open_decisions(connection: sqlite3.Connection) -> tuple[StoredDecision, ...]:
    """Return the decisions that are not followed or refused yet, holds among them, in the order they came."""
    return tuple(decision_of(row) for row in connection.execute(SQL["open_decisions"]))


def remembered_approvals(connection: sqlite3.Connection) -> tuple[PendingApproval, ...]:
    """Return every approval that is remembered, the one that changed last at the end."""
    return tuple(approval_of(row) for row in connection.execute(SQL["remembered_approvals"]))


def one_decision(connection: sqlite3.Connection, source: str, decision_id: str) -> StoredDecision | None:
    """Return the decision called *decision_id*, None when there is none."""
    row = connection.execute(SQL["one_decision"], (source, decision_id)).fetchone()
    return None if row is None else decision_of(row)


def token_digests(connection: sqlite3.Connection, arrivals: Iterable[int]) -> tuple[str, ...]:
    """Return the SHA-256, hexadecimal, of the text that each decision of *arrivals* came as; a local one has none."""
    found = (connection.execute(SQL["one_token"], (arrival,)).fetchone() for arrival in arrivals)
    return tuple(hashlib.sha256(row[0].encode()).hexdigest() for row in found if row is not None)


def is_known(connection: sqlite3.Connection, *, approver: str, decision_id: str, payload_sha256: str) -> bool:
    """Return whether exactly this decision of the portal was kept before."""
    return _find(connection, "portal", approver, decision_id) == payload_sha256


def _find(connection: sqlite3.Connection, source: str, approver: str, decision_id: str) -> str | None:
    row = connection.execute(SQL["find_decision"], (source, approver, decision_id)).fetchone()
    return None if row is None else str(row[0])


def decision_of(row: Sequence[Any]) -> StoredDecision:
    """Return the decision in *row*, whose last column is `StoredDecision.is_event_known`; sqlite3.DatabaseError."""
    try:
        values = dict(zip(StoredDecision.__struct_fields__, row, strict=True))
        values["is_event_known"] = bool(values["is_event_known"])
        return msgspec.convert(values, StoredDecision)
    except msgspec.ValidationError as error:
        raise sqlite3.DatabaseError(f"The outbox is malformed: a decision cannot be read: {error}") from error


def approval_of(row: Sequence[Any]) -> PendingApproval:
    """Return the approval in *row*; raise sqlite3.DatabaseError when it is none."""
    try:
        approval = msgspec.json.decode(row[4], type=PendingApproval)
        return msgspec.structs.replace(approval, state=ApprovalStage(row[2]), changed_at=row[3])
    except (msgspec.MsgspecError, ValueError) as error:
        raise sqlite3.DatabaseError(f"The outbox is malformed: an approval cannot be read: {error}") from error


# Writing.


def keep_decisions(
    connection: sqlite3.Connection, decisions: Sequence[StoredDecision], tokens: Sequence[str]
) -> list[KeepResult]:
    """Keep each of *decisions* that is new, with its token of *tokens*; no approval that is older than this database.

    Raise OutboxReadOnly while in memory.
    """
    _refuse_memory(connection)
    # What was approved before this database was made may have been followed already. To hold again does no harm.
    oldest = int(created_at(read_meta(connection)).timestamp() * 1_000_000)
    return [
        KeepResult.TOO_OLD
        if decision.issued_at < oldest and decision.verdict is not Verdict.HOLD
        else keep_decision(connection, decision, token)
        for decision, token in zip(decisions, tokens, strict=True)
    ]


def keep_decision(connection: sqlite3.Connection, decision: StoredDecision, token: str | None = None) -> KeepResult:
    """Keep *decision*, and the *token* that it came as, unless its jti is known."""
    found = _find(connection, decision.source, decision.approver, decision.decision_id)
    if found is None:
        arrival = connection.execute(SQL["add_decision"], msgspec.to_builtins(decision)).lastrowid
        if token is not None:
            connection.execute(SQL["add_token"], (arrival, token))
        count_decision_change(connection)
        return KeepResult.NEW
    return KeepResult.KNOWN if found == decision.payload_sha256 else KeepResult.REPLAYED


def keep_overruling(
    connection: sqlite3.Connection, decision: StoredDecision, overruled: Collection[int]
) -> tuple[StoredDecision, ...]:
    """Keep a person's *decision* on this VM, which ends the holds known by *overruled*; return other holds, if any.

    With another hold on the event nothing is kept: nobody was told of it. One that is overruled and dated ahead, by a
    clock or by mistake, is dated back, so that it does not win, and one that is signed from now on does.
    """
    holds = [
        each
        for each in open_decisions(connection)
        if each.event_id == decision.event_id and each.verdict is Verdict.HOLD
    ]
    unnamed = tuple(hold for hold in holds if hold.arrival not in overruled)
    if not unnamed:
        for hold in holds:
            if hold.issued_at >= decision.issued_at:
                connection.execute(SQL["date_decision"], (decision.issued_at - 1, hold.arrival))
        keep_decision(connection, decision)
    return unnamed


def write_changes(
    connection: sqlite3.Connection,
    stream_id: str,
    *,
    approvals: Sequence[PendingApproval] = (),
    decisions: Sequence[DecisionUpdate] = (),
) -> None:
    """Write what became of approvals and decisions; raise StreamChanged when they are not this outbox's."""
    _refuse_memory(connection)
    if get(connection, "stream_id") != stream_id:
        raise StreamChanged("The outbox was started over; approvals are evaluated anew.")
    for approval in approvals:
        arguments = (*approval.key, approval.state.value, approval.changed_at, encode(approval).decode())
        connection.execute(SQL["put_approval"], arguments)
    for update in decisions:
        change = (update.state.value, update.outcome, update.message, update.arrival)
        connection.execute(SQL["update_decision"], change)
    if approvals or decisions:
        count_decision_change(connection)


def begin_attempt(
    connection: sqlite3.Connection, stream_id: str, approvals: Sequence[PendingApproval], now: float
) -> list[PendingApproval]:
    """Count an attempt for each of *approvals* that may still be posted, and return those, as they are now.

    One with a hold beside it that was not evaluated yet is left out.
    """
    on_their_way = _open_approvals(connection)
    ready = [
        msgspec.structs.replace(known, attempts=known.attempts + 1, http_status=None, put_off_at=None, changed_at=now)
        for approval in approvals
        if (known := on_their_way.get(approval.key)) is not None
        and known.state is ApprovalStage.WANTED
        and connection.execute(SQL["has_new_hold"], (known.event_id,)).fetchone() is None
    ]
    write_changes(connection, stream_id, approvals=ready)
    return ready


def prune(connection: sqlite3.Connection, active_event_ids: Collection[str], now: float) -> None:
    """Forget decisions and approvals whose time is long over; nothing of an event that is still there."""
    if is_in_memory(connection):
        return
    document = document_of(read_meta(connection))  # with the events whose absence is not believed yet
    known = () if document is None else [event.event_id for event in document.events if event.event_id is not None]
    active = json.dumps(sorted({*active_event_ids, *known}))
    connection.execute(SQL["prune_decisions"], (now - REMEMBER_SECONDS, active))
    connection.execute(SQL["prune_approvals"], (now - _KEEP_APPROVALS_SECONDS, active))


def _refuse_memory(connection: sqlite3.Connection) -> None:
    """Raise OutboxReadOnly while the outbox lives in memory."""
    if is_in_memory(connection):
        raise OutboxReadOnly(
            "The outbox lives in memory only, because its disk refuses, so nothing is approved. Free the disk."
        )


def cli_decision(
    *,
    approver: str,
    decision_id: str,
    event: ScheduledEvent,
    event_digest: str,
    valid_seconds: float,
    reason: str | None = None,
    issued_at: float | None = None,
) -> StoredDecision:
    """Return an approval that a person gives on this VM, now.

    *issued_at*, a Unix time, is when they were shown what there is against it: what is signed later wins. None: now.
    """
    now = time.time()
    return StoredDecision(
        source="cli",
        approver=approver,
        decision_id=decision_id,
        payload_sha256=decision_id,
        event_id=event.event_id or "",
        event_digest=event_digest,
        verdict=Verdict.APPROVE,
        issued_at=int((now if issued_at is None else issued_at) * 1_000_000),
        expires_at=now + valid_seconds,
        reason=reason,
        received_at=now,
    )
