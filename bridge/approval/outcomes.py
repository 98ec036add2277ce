"""What becomes of decisions and approvals: the values that evaluation, rules and the submitter return.

An `Evaluation` is what is to be written, in one transaction with its records; `applied` is the state after it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bridge.errors import RefusalReason
from bridge.events.event import ScheduledEvent
from bridge.events.record import Approval, Transition
from bridge.outbox.approvals import (
    OPEN_DECISIONS,
    ApprovalRecord,
    ApprovalResult,
    ApprovalState,
    DecisionStage,
    DecisionUpdate,
    PendingApproval,
    StoredDecision,
)

EXPLAINED = {
    RefusalReason.UNKNOWN_KEY: "The key that signed the decision is not trusted any more.",
    RefusalReason.EXPIRED: "The decision expired before it could be checked. Decide again.",
    RefusalReason.EVENT_UNKNOWN: "The document of this VM has no such event: it is over, or was never there.",
    RefusalReason.EVENT_CHANGED: "The event is not any more what was decided on. Decide again on its newest record.",
    RefusalReason.EVENT_NOT_SCHEDULED: "The event is not Scheduled any more, so nobody can approve it.",
    RefusalReason.SUPERSEDED: "A newer decision on this event wins.",
    RefusalReason.TOO_FEW_APPROVERS: "Too few approvers decided before this decision expired.",
}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A decision or a rule that was not followed; it becomes a record, at most one a minute and reason."""

    reason: RefusalReason
    message: str
    source: str
    decision_id: str | None = None
    approvers: tuple[str, ...] = ()
    event_id: str | None = None
    event: ScheduledEvent | None = None
    arrivals: tuple[int, ...] = ()
    """The decisions behind it that are kept."""


class Evaluation(msgspec.Struct, kw_only=True):
    """What is to be written; empty when nothing changed."""

    approvals: list[PendingApproval] = msgspec.field(default_factory=list)
    decisions: list[DecisionUpdate] = msgspec.field(default_factory=list)
    records: list[ApprovalRecord] = msgspec.field(default_factory=list)
    refusals: list[Refusal] = msgspec.field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing changed."""
        return not (self.approvals or self.decisions or self.records or self.refusals)

    def extend(self, following: Evaluation) -> None:
        """Add the step that comes after this one."""
        self.approvals += following.approvals
        self.decisions += following.decisions
        self.records += following.records
        self.refusals += following.refusals

    def update_decisions(
        self, arrivals: Iterable[int], state: DecisionStage, outcome: str | None = None, message: str | None = None
    ) -> None:
        """Add what became of the decisions that are known by *arrivals*."""
        self.decisions += [
            DecisionUpdate(arrival=arrival, state=state, outcome=outcome, message=message) for arrival in arrivals
        ]


def applied(state: ApprovalState, evaluation: Evaluation) -> ApprovalState:
    """Return *state* as the outbox has it once *evaluation* is written."""
    approvals = state.approvals | {each.key: each for each in evaluation.approvals}
    updates = {each.arrival: each for each in evaluation.decisions}
    decisions = [_updated(each, updates.get(each.arrival)) for each in state.decisions]
    return ApprovalState(
        stream_id=state.stream_id,
        decisions=tuple(each for each in decisions if each.state in OPEN_DECISIONS),
        approvals=dict(sorted(approvals.items(), key=lambda item: (item[1].changed_at, item[0]))),
    )


def _updated(decision: StoredDecision, update: DecisionUpdate | None) -> StoredDecision:
    if update is None:
        return decision
    return msgspec.structs.replace(decision, state=update.state, outcome=update.outcome, message=update.message)


def approval_record(
    approval: PendingApproval,
    transition: Transition,
    result: ApprovalResult | RefusalReason,
    *,
    event: ScheduledEvent | None = None,
    message: str | None = None,
    http_status: int | None = None,
) -> ApprovalRecord:
    """Return the record of what became of *approval*; *event* is the one that it is for, unless a newer is given.

    Its reason is *message*, how the command of ``approval.remote`` ended, and what the approver gave as theirs.
    """
    said = " ".join(text for text in (message, approval.command_result) if text)
    own = f"({approval.reason})" if said and approval.reason else approval.reason
    reason = " ".join(text for text in (said, own) if text) or None
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
