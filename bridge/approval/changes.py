"""Collects changes to decisions and approvals, which the outbox stores together."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bridge.approval.refusal_reasons import RefusalReason
from bridge.events.event import ScheduledEvent
from bridge.events.record import Approval, ApprovalResult, Transition
from bridge.outbox.rows import DecisionStage, DecisionUpdate, PendingApproval, StoredDecision


class ApprovalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a record about an approval."""

    transition: Transition
    event: ScheduledEvent | None
    approval: Approval
    arrivals: tuple[int, ...] = ()
    """The numbers of the decisions. The record contains the digest of the signed text of each decision."""


class Changes(msgspec.Struct, kw_only=True):
    """Changes that the agent writes to the outbox in one step."""

    approvals: list[PendingApproval] = msgspec.field(default_factory=list)
    decisions: list[DecisionUpdate] = msgspec.field(default_factory=list)
    records: list[ApprovalRecord] = msgspec.field(default_factory=list)
    refusals: list[ApprovalRecord] = msgspec.field(default_factory=list)
    """Records of refusals. The recorder combines them if there are too many."""

    @property
    def is_empty(self) -> bool:
        """Return whether this object contains no changes."""
        return not (self.approvals or self.decisions or self.records or self.refusals)

    def update_decisions(
        self, arrivals: Iterable[int], state: DecisionStage, outcome: str | None = None, message: str | None = None
    ) -> None:
        """Set the stage *state* for the decisions with the numbers *arrivals*."""
        self.decisions += [
            DecisionUpdate(arrival=arrival, state=state, outcome=outcome, message=message) for arrival in arrivals
        ]

    def add_outcome(
        self,
        approval: PendingApproval,
        transition: Transition,
        result: ApprovalResult,
        *,
        decisions: DecisionStage,
        message: str,
    ) -> None:
        """Add a record of *result*, and move the approval's decisions to the stage *decisions*."""
        self.records.append(approval_record(approval, transition, result, message=message))
        self.update_decisions(approval.arrivals, decisions, result.value, message)


def approval_record(
    approval: PendingApproval,
    transition: Transition,
    result: ApprovalResult | RefusalReason,
    *,
    message: str | None = None,
) -> ApprovalRecord:
    """Return a record of *approval*. The reason includes *message* and the approver's reason."""
    reason = f"{message} ({approval.reason})" if message and approval.reason else message or approval.reason
    return ApprovalRecord(
        transition=transition,
        event=approval.event,
        approval=Approval(
            source=approval.source,
            decision_id=approval.decision_id,
            approvers=approval.approvers,
            reason=reason,
            result=result.value,
            http_status=approval.http_status,
        ),
        arrivals=approval.arrivals,
    )


def refusal_of(
    decision: StoredDecision, reason: RefusalReason, message: str, event: ScheduledEvent | None
) -> ApprovalRecord:
    """Return the record for the refusal of *decision* on *event*."""
    return ApprovalRecord(
        transition=Transition.APPROVAL_REFUSED,
        event=event,
        approval=Approval(
            source=decision.source,
            decision_id=decision.decision_id,
            approvers=(decision.approver,),
            reason=message,
            result=reason.value,
        ),
        arrivals=(decision.arrival,) if decision.arrival else (),
    )
