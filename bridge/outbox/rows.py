"""The rows of the outbox: the values in the tables of `State`, which are also the rows of the file."""

from __future__ import annotations

from enum import Enum
from functools import cached_property

import msgspec

from bridge.events.event import ScheduledEvent
from bridge.events.record import Approval, Transition, TransitionRecord, Verdict, decode_record

EventVersion = tuple[str, str]
"""An EventId, and the digest of the event that the decision names."""


class DeliveryState(str, Enum):
    """The state of one record at one sink. The values are stored."""

    PENDING = "pending"
    DELIVERED = "delivered"
    PARKED = "parked"
    EXPIRED = "expired"
    EVICTED = "evicted"
    DISCARDED = "discarded"


NEEDED = frozenset({DeliveryState.PENDING, DeliveryState.PARKED})


class MetaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One value that is not a row of another table, as text."""

    key: str
    value: str


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's memory of one event, kept until 7 days after its ending."""

    key: str
    ended_at: float | None = None
    """Unix seconds; None while the event is active."""
    was_started: bool = False
    """True if the event was Started at any time."""
    has_ended: bool = False
    """True after the first recorded ending, also if the event came back."""
    counts: dict[str, int] = {}
    """By `repeat_key`, the number of records with that content: the next n."""
    last_sequence: int | None = None
    """The newest record of the event."""
    last_state_sequence: int | None = None
    """The newest record that Azure caused: not the outcome of an approval."""
    sinks: dict[str, int] = {}
    """By sink, the newest such record that the sink receives or received."""

    @property
    def references(self) -> set[int]:
        """Return the records that stay in memory for this event."""
        if self.ended_at is not None:
            return set()
        named = (self.last_sequence, self.last_state_sequence)
        return {*self.sinks.values(), *(sequence for sequence in named if sequence is not None)}


class RecordRow(msgspec.Struct, frozen=True, kw_only=True):
    """One transition record."""

    sequence: int
    id: str
    event_key: str
    observed_at: float
    """Unix seconds."""
    is_routed: bool
    """False while the sinks are not chosen, because the name of this VM is not known."""
    n: int = 0
    body: bytes
    """The record as JSON."""

    @property
    def record(self) -> TransitionRecord:
        """Return the decoded record."""
        return decode_record(self.body)


class Delivery(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One record for one sink."""

    sink: str
    sequence: int
    state: DeliveryState
    urgent: bool
    not_before: float | None
    """Unix seconds."""
    aged_from: float
    """Unix seconds of the record, or of the last retry by a person."""
    attempts: int = 0
    error: str | None = None
    changed_at: float
    """Unix seconds."""
    event_key: str = ""
    body: bytes = b""
    """The body of the record. The file does not repeat the body and the event key for each sink."""

    @cached_property
    def record(self) -> TransitionRecord:
        """Return the decoded record."""
        return decode_record(self.body)


class SinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of one sink."""

    name: str
    delivered: int = 0
    pending: int = 0
    parked: int = 0
    expired: int = 0
    evicted: int = 0
    discarded: int = 0
    event_over: int = 0
    """How many of the expired records were replaced by a newer record of their event."""
    accepted_under: str | None = None
    """The digest of the configuration under which the destination last accepted a record."""

    @property
    def accepted(self) -> int:
        """Return the number of records that were added for the sink."""
        return sum(self.count(state) for state in DeliveryState)

    def count(self, state: DeliveryState) -> int:
        """Return the number of records in *state*."""
        return int(getattr(self, state.value))

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of accepted records, and the number of records in each state."""
        return {"accepted": self.accepted, **{state.value: self.count(state) for state in DeliveryState}}


class DecisionStage(str, Enum):
    """The progress of a decision. The values are stored."""

    NEW = "new"
    """Stored, not evaluated yet."""
    WAITING = "waiting"
    """An approval that waits for more approvers, or for Azure."""
    ON_HOLD = "held"
    """A hold in force."""
    FOLLOWED = "followed"
    REFUSED = "refused"


class ApprovalStage(str, Enum):
    """The progress of an approval. The values are stored."""

    DRAINING = "draining"
    """A command of a rule, or of ``approval.remote``, runs first."""
    WANTED = "wanted"
    """The approval is to be posted."""
    POSTED = "posted"
    """Azure responded with 200."""
    DRY_RUN = "dry_run"
    COMMAND_FAILED = "command_failed"
    WITHDRAWN = "withdrawn"
    OVER = "over"
    """The event started, changed, or ended before Azure accepted the approval."""


class ApprovalResult(str, Enum):
    """The result of an approval in records and metrics. A refusal has its reason there instead."""

    ACCEPTED = "accepted"
    ALREADY_APPROVED = "already_approved"
    DRY_RUN = "dry_run"
    UNANSWERED = "unanswered"
    GAVE_UP = "gave_up"
    REJECTED = "rejected"
    DISABLED = "disabled"
    UNSAFE_FILES = "unsafe_files"
    COMMAND_FAILED = "command_failed"


OPEN_DECISIONS = frozenset({DecisionStage.NEW, DecisionStage.WAITING, DecisionStage.ON_HOLD})
OPEN_STAGES = frozenset({ApprovalStage.DRAINING, ApprovalStage.WANTED})


class StoredDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision and its progress."""

    arrival: int = 0
    """The number of the decision in this outbox; 0 until it is stored."""
    source: str
    """portal or cli."""
    approver: str
    kid: str | None = None
    key_sha256: str | None = None
    decision_id: str
    """The jti."""
    payload_sha256: str
    token: str | None = None
    """The signed text (compact JWS); None for a local decision."""
    event_id: str
    event_digest: str
    verdict: Verdict
    issued_at: int
    """Microseconds since 1970: the newest decision wins, so the value is not rounded."""
    expires_at: float
    """Unix seconds."""
    reason: str | None = None
    received_at: float
    state: DecisionStage = DecisionStage.NEW
    outcome: str | None = None
    """The result of the approval, the reason of a refusal, or held."""
    message: str | None = None

    @property
    def key(self) -> EventVersion:
        """Return the event and its version."""
        return self.event_id, self.event_digest


class PendingApproval(msgspec.Struct, frozen=True, kw_only=True):
    """The approval of one version of an event."""

    event_id: str
    event_digest: str
    state: ApprovalStage
    source: str
    decision_id: str | None = None
    approvers: tuple[str, ...] = ()
    reason: str | None = None
    arrivals: tuple[int, ...] = ()
    """The decisions behind it; empty for a rule."""
    oldest_issued_at: int | None = None
    """The oldest of their issue times. A hold that is not older withdraws the approval. None for a rule."""
    attempts: int = 0
    """The number of StartRequests that were, or may have been, sent."""
    http_status: int | None = None
    """The last response; None without a response to the last attempt."""
    is_told: bool = False
    """True after a record reported the first failure."""
    changed_at: float = 0.0
    event: ScheduledEvent

    @property
    def key(self) -> EventVersion:
        """Return the event and its version."""
        return self.event_id, self.event_digest


class ApprovalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a record about an approval."""

    transition: Transition
    event: ScheduledEvent | None
    approval: Approval
    arrivals: tuple[int, ...] = ()
    """The decisions behind it. The record names them by the digests of their signed texts."""


class DecisionUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The new progress of one decision."""

    arrival: int
    state: DecisionStage
    outcome: str | None = None
    message: str | None = None


class ApprovalState(msgspec.Struct, frozen=True, kw_only=True):
    """The open decisions and every approval, from one moment."""

    stream_id: str
    decisions: tuple[StoredDecision, ...]
    approvals: dict[EventVersion, PendingApproval]
    known_event_ids: frozenset[str] = frozenset()
    """The EventIds of open decisions about which this VM has a record."""
