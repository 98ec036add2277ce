"""Defines the rows of `State` and of the outbox file. All times are in Unix seconds."""

from __future__ import annotations

from enum import Enum
from functools import cached_property

import msgspec

from bridge.events.event import ScheduledEvent
from bridge.events.record import EventHistory, TimelineEntry, TransitionRecord, Verdict, decode_record

EventVersion = tuple[str, str]
"""The EventId and the digest of an event."""


class DeliveryState(str, Enum):
    """The state of one delivery, as stored in the outbox file."""

    PENDING = "pending"
    DELIVERED = "delivered"
    PARKED = "parked"
    EXPIRED = "expired"
    EVICTED = "evicted"
    DISCARDED = "discarded"


NEEDED = frozenset({DeliveryState.PENDING, DeliveryState.PARKED})


class MetaRow(msgspec.Struct, frozen=True, kw_only=True):
    """A named text value, for example the stream ID."""

    key: str
    value: str


class EventRow(EventHistory, frozen=True, kw_only=True):
    """The history of one event. The agent deletes this row 7 days after the event ends."""

    key: str
    ended_at: float | None = None
    """None while the event is active."""
    last_state_sequence: int | None = None
    """The sequence of the newest record that Azure caused. Records about approvals do not count."""
    sinks: dict[str, int] = {}  # noqa: RUF012  # msgspec copies an empty default
    """For each sink that receives the event, the sequence of the newest record that Azure caused."""
    timeline: tuple[TimelineEntry, ...] = ()
    """The transitions of the event since it appeared, oldest first. Empty after the ending, to save space."""

    @property
    def references(self) -> set[int]:
        """Return the sequences of the records that must stay in memory for this event."""
        if self.ended_at is not None:
            return set()
        return {*self.sinks.values(), self.last_state_sequence or 0}


class RecordRow(msgspec.Struct, frozen=True, kw_only=True):
    """A transition record."""

    sequence: int
    id: str
    event_key: str
    observed_at: float
    body: bytes

    @property
    def record(self) -> TransitionRecord:
        """Return the decoded record."""
        return decode_record(self.body)


class Delivery(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The delivery of a record to a sink."""

    sink: str
    sequence: int
    state: DeliveryState
    urgent: bool
    not_before: float | None
    aged_from: float
    """The time of the record, or of the last `outbox retry`."""
    attempts: int = 0
    error: str | None = None
    changed_at: float
    event_key: str = ""
    body: bytes = b""
    """The body of the record. The file stores the body and the event key only once, with the record."""

    @cached_property
    def record(self) -> TransitionRecord:
        """Return the decoded record."""
        return decode_record(self.body)


class SinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a sink."""

    name: str
    delivered: int = 0
    pending: int = 0
    parked: int = 0
    expired: int = 0
    evicted: int = 0
    discarded: int = 0
    event_over: int = 0
    """How many records expired because a newer record of the same event replaced them."""
    accepted_under: str | None = None
    """The digest of the configuration with which the sink last delivered a record."""

    @property
    def accepted(self) -> int:
        """Return the number of all records that were ever added for the sink."""
        return self.delivered + self.pending + self.parked + self.expired + self.evicted + self.discarded

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of accepted records, and the number of records in each state."""
        return {"accepted": self.accepted, **{state.value: getattr(self, state.value) for state in DeliveryState}}


class DecisionStage(str, Enum):
    """The progress of a decision. The file contains these values."""

    NEW = "new"
    """The decision is stored, but not evaluated."""
    WAITING = "waiting"
    """The decision waits for more approvers or for Azure."""
    ON_HOLD = "held"
    FOLLOWED = "followed"
    REFUSED = "refused"


class ApprovalStage(str, Enum):
    """The progress of an approval. The file contains these values."""

    DRAINING = "draining"
    """The drain command of the rule or of ``approval.remote`` must succeed first."""
    WANTED = "wanted"
    POSTED = "posted"
    """Azure has accepted the approval."""
    DRY_RUN = "dry_run"
    COMMAND_FAILED = "command_failed"
    WITHDRAWN = "withdrawn"
    OVER = "over"
    """The event started, changed, or ended before Azure accepted the approval."""


OPEN_DECISIONS = frozenset({DecisionStage.NEW, DecisionStage.WAITING, DecisionStage.ON_HOLD})
OPEN_STAGES = frozenset({ApprovalStage.DRAINING, ApprovalStage.WANTED})


class _OfEventVersion(msgspec.Struct, frozen=True, kw_only=True):
    event_id: str
    event_digest: str

    @property
    def key(self) -> EventVersion:
        return self.event_id, self.event_digest


class StoredDecision(_OfEventVersion, frozen=True, kw_only=True):
    """A decision and its progress."""

    arrival: int = 0
    """The number of the decision in this outbox. A decision that is not stored has the number 0."""
    source: str
    """"portal" or "cli"."""
    approver: str
    kid: str | None = None
    key_sha256: str | None = None
    decision_id: str
    payload_sha256: str
    token: str | None = None
    """The signed text (compact JWS), or None for a local decision."""
    verdict: Verdict
    issued_at: int
    """Microseconds since 1970. The value is not rounded, because the newest decision wins."""
    expires_at: float
    reason: str | None = None
    received_at: float
    state: DecisionStage = DecisionStage.NEW
    outcome: str | None = None
    """The result of the approval, the reason of a refusal, or "held"."""
    message: str | None = None


class PendingApproval(_OfEventVersion, frozen=True, kw_only=True):
    """The approval of one version of an event, and its progress."""

    state: ApprovalStage
    source: str
    decision_id: str | None = None
    approvers: tuple[str, ...] = ()
    reason: str | None = None
    arrivals: tuple[int, ...] = ()
    """The numbers of the decisions that led to this approval. Empty if a rule started the approval."""
    oldest_issued_at: int | None = None
    """When the oldest of these decisions was issued, or None for a rule. A newer hold withdraws the approval."""
    attempts: int = 0
    """The number of StartRequests that the agent has sent or might have sent."""
    http_status: int | None = None
    """The status of the last response, or None if the last attempt received no response."""
    is_told: bool = False
    """True after a record has reported the first failure."""
    changed_at: float = 0.0
    event: ScheduledEvent


class DecisionUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The new progress of a decision."""

    arrival: int
    state: DecisionStage
    outcome: str | None = None
    message: str | None = None


class ApprovalState(msgspec.Struct, frozen=True, kw_only=True):
    """All open decisions and all approvals at one moment."""

    stream_id: str
    decisions: tuple[StoredDecision, ...]
    approvals: dict[EventVersion, PendingApproval]
    known_event_ids: frozenset[str] = frozenset()
    """The EventIds of open decisions for which this VM has recorded an event."""
