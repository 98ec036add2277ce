"""The values of an evaluation: the document by EventId, trust in keys, and the changes that an evaluation returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum

import msgspec

from bridge.approval.digest import digest
from bridge.clock import CLOCK_SKEW_SECONDS
from bridge.errors import RefusalReason
from bridge.events.event import Document, ScheduledEvent
from bridge.events.record import Approval, ApprovalResult, Transition, Verdict
from bridge.outbox.rows import (
    OPEN_DECISIONS,
    ApprovalRecord,
    DecisionStage,
    DecisionUpdate,
    PendingApproval,
    StoredDecision,
)

EXPLAINED = {
    RefusalReason.UNKNOWN_KEY: "The key that signed the decision is no longer trusted.",
    RefusalReason.EXPIRED: "The decision expired before it could be checked. Decide again.",
    RefusalReason.EVENT_UNKNOWN: "The document of this VM does not contain the event. The event may have ended.",
    RefusalReason.EVENT_CHANGED: "The event changed after the decision. Decide again on its newest record.",
    RefusalReason.EVENT_NOT_SCHEDULED: "The event is no longer Scheduled, so it cannot be approved.",
    RefusalReason.SUPERSEDED: "A newer decision on this event wins.",
    RefusalReason.TOO_FEW_APPROVERS: "Too few approvers decided before this decision expired.",
}


class Trust(Enum):
    """Whether the agent still trusts the key behind a stored decision."""

    KEPT = "kept"
    REVOKED = "revoked"
    """The key file is missing or contains another key, or the configuration does not list the key for this approver."""
    UNKNOWN = "unknown"
    """The key file exists and cannot be used. Another program may be writing it."""


class DocumentIndex(msgspec.Struct, frozen=True, kw_only=True):
    """One response of the metadata service by EventId. An EventId that occurs twice cannot be approved."""

    events: dict[str, ScheduledEvent]
    digests: dict[str, str]
    ambiguous: frozenset[str] = frozenset()
    unsettled: frozenset[str] = frozenset()
    """The EventIds with an unconfirmed change: decisions on them stay open, and nothing is posted for them."""
    tracked: DocumentIndex | None = None
    """The tracked document, if it is another document."""

    def why_not(self, event_id: str, event_digest: str) -> RefusalReason | None:
        """Return why this version of the event cannot be approved; None if it can."""
        event = self.events.get(event_id)
        if event is None or event_id in self.ambiguous:
            return RefusalReason.EVENT_UNKNOWN
        if event.event_status != "Scheduled":
            return RefusalReason.EVENT_NOT_SCHEDULED
        return None if self.digests[event_id] == event_digest else RefusalReason.EVENT_CHANGED

    def is_confirmed(self, event_id: str, event_digest: str) -> bool:
        """Return whether the response and the tracked document both show this version of the event as Scheduled."""
        if event_id in self.unsettled or self.why_not(event_id, event_digest) is not None:
            return False
        return self.tracked is None or self.tracked.why_not(event_id, event_digest) is None


def index_document(
    document: Document, *, unsettled: frozenset[str] = frozenset(), tracked: Document | None = None
) -> DocumentIndex:
    """Return the index of *document*, a response, and of the *tracked* document."""
    events: dict[str, ScheduledEvent] = {}
    ambiguous = set()
    for event in document.events:
        if event.event_id is not None:
            if event.event_id in events:
                ambiguous.add(event.event_id)
            events[event.event_id] = event
    return DocumentIndex(
        events=events,
        digests={event_id: digest(event) for event_id, event in events.items()},
        ambiguous=frozenset(ambiguous),
        unsettled=unsettled,
        tracked=None if tracked is None or tracked is document else index_document(tracked),
    )


def newest_holds(decisions: Iterable[StoredDecision]) -> dict[str, StoredDecision]:
    """Return the newest open hold on each EventId, including holds that are not evaluated yet."""
    newest: dict[str, StoredDecision] = {}
    for each in decisions:
        if each.verdict is Verdict.HOLD and each.state in OPEN_DECISIONS:
            known = newest.get(each.event_id)
            if known is None or each.issued_at > known.issued_at:
                newest[each.event_id] = each
    return newest


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that an evaluation depends on, apart from the decisions and approvals."""

    index: DocumentIndex
    now: float
    """Unix seconds."""
    required_approvals: int
    trust: Callable[[StoredDecision], Trust]
    asked_at: float = math.inf
    """The time of the request for the response. The response does not refuse a decision that arrived later."""
    dry_run: bool = False
    has_command: bool = False
    """A command of ``approval.remote`` must succeed before an approval of the portal is posted."""

    def is_expired(self, decision: StoredDecision) -> bool:
        """Return whether *decision* has expired."""
        return self.now >= decision.expires_at + CLOCK_SKEW_SECONDS


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A decision or a rule that the agent does not follow."""

    reason: RefusalReason
    message: str
    source: str
    decision_id: str | None = None
    approvers: tuple[str, ...] = ()
    event_id: str | None = None
    event: ScheduledEvent | None = None
    arrivals: tuple[int, ...] = ()
    """The stored decisions behind it."""


class Evaluation(msgspec.Struct, kw_only=True):
    """Changes to write together; empty if nothing changes."""

    approvals: list[PendingApproval] = msgspec.field(default_factory=list)
    decisions: list[DecisionUpdate] = msgspec.field(default_factory=list)
    records: list[ApprovalRecord] = msgspec.field(default_factory=list)
    refusals: list[Refusal] = msgspec.field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing changes."""
        return not (self.approvals or self.decisions or self.records or self.refusals)

    def update_decisions(
        self, arrivals: Iterable[int], state: DecisionStage, outcome: str | None = None, message: str | None = None
    ) -> None:
        """Add the new progress of the decisions with these *arrivals*."""
        self.decisions += [
            DecisionUpdate(arrival=arrival, state=state, outcome=outcome, message=message) for arrival in arrivals
        ]


def approval_record(
    approval: PendingApproval,
    transition: Transition,
    result: ApprovalResult | RefusalReason,
    *,
    event: ScheduledEvent | None = None,
    message: str | None = None,
    http_status: int | None = None,
) -> ApprovalRecord:
    """Return the record of an outcome of *approval*, with a newer *event* if one is given.

    The reason consists of *message* and the approver's own reason.
    """
    reason = f"{message} ({approval.reason})" if message and approval.reason else message or approval.reason
    return ApprovalRecord(
        transition=transition,
        event=event or approval.event,
        approval=Approval(
            source=approval.source,
            decision_id=approval.decision_id,
            approvers=approval.approvers,
            reason=reason,
            result=result.value,
            http_status=http_status,
        ),
        arrivals=approval.arrivals,
    )
