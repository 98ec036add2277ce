"""Turns decisions into approvals or refusals. No function performs I/O.

An approve decision first waits until its event is in the document. It can then wait for more approvers
(`bridge.approval.two_person_rule`), for another approval to end, or for Azure to respond, until it expires. A hold
applies until its event disappears from the document (`bridge.approval.holds`).

An approve decision applies to only one version of an event. If Azure changes the event, the agent refuses the decision.

In each evaluation and before each request, the agent checks the keys that signed the decisions. If a key file cannot be
read, approvals that depend on the key wait until the file is readable or the approvals expire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum

import msgspec

from bridge.approval.changes import ApprovalRecord, Changes, approval_record, refusal_of
from bridge.approval.document_index import DocumentIndex
from bridge.approval.holds import newest_holds, wins_over
from bridge.approval.refusal_reasons import EXPLAINED, RefusalReason
from bridge.approval.two_person_rule import sufficient_decisions
from bridge.clock import CLOCK_SKEW_SECONDS
from bridge.events.record import ApprovalResult, Transition, Verdict
from bridge.outbox.rows import (
    OPEN_STAGES,
    ApprovalStage,
    ApprovalState,
    DecisionStage,
    EventVersion,
    PendingApproval,
    StoredDecision,
)

#: A document justifies a refusal for one of these reasons only if it was requested after the decision arrived.
_OF_THE_DOCUMENT = frozenset(
    {RefusalReason.EVENT_UNKNOWN, RefusalReason.EVENT_CHANGED, RefusalReason.EVENT_NOT_SCHEDULED}
)


class Trust(Enum):
    """The agent's trust in the key that signed a stored decision."""

    KEPT = "kept"
    REVOKED = "revoked"
    """The key file is missing or contains another key, or the configuration does not list the key."""
    UNKNOWN = "unknown"
    """The key file exists but is not valid. Another program may be writing the file."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The document, the time, and the settings for an evaluation."""

    index: DocumentIndex
    now: float
    """Unix seconds."""
    required_approvals: int
    trust: Callable[[StoredDecision], Trust]
    asked_at: float = math.inf
    """When the document was requested. The agent does not refuse a later decision because of this document."""
    dry_run: bool = False
    has_command: bool = False
    """True if the command of ``approval.remote`` must succeed before the agent posts an approval from the portal."""

    def is_expired(self, decision: StoredDecision) -> bool:
        """Return whether *decision* has expired."""
        return self.now >= decision.expires_at + CLOCK_SKEW_SECONDS


def evaluate(state: ApprovalState, context: Context) -> Changes:
    """Return the next changes. Write them and call this again, until there are no more."""
    step = _Step(state, context)
    for approval in state.approvals.values():
        if approval.state in OPEN_STAGES:
            step.end_or_withdraw(approval)
    if not step.result.is_empty:
        return step.result
    for decision in state.decisions:
        if decision.state is DecisionStage.NEW:
            step.receive(decision)
        elif decision.state is DecisionStage.WAITING:
            step.check_waiting(decision)
    if step.result.is_empty:
        for key in step.waiting:
            step.want_if_enough(key)
    return step.result


def postable(state: ApprovalState, context: Context, due: Iterable[PendingApproval]) -> list[PendingApproval]:
    """Return the approvals in *due* that may be posted now, or whose command may start now.

    Both the newest document and the tracked document must show the event as Scheduled and unchanged. A hold blocks the
    approval even if `evaluate` has not processed the hold yet.
    """
    step = _Step(state, context)
    return [each for each in due if step.is_postable(each)]


class _Step:
    def __init__(self, state: ApprovalState, context: Context) -> None:
        self.result = Changes()
        self.waiting: dict[EventVersion, list[StoredDecision]] = {}
        """The waiting approve decisions on each version of an event, in the order of arrival."""
        self._state, self._context, self._index = state, context, context.index
        self._holds = newest_holds(state.decisions)
        self._by_arrival = {each.arrival: each for each in state.decisions}
        self._newly_held: set[str] = set()
        for each in state.decisions:
            if each.state is DecisionStage.WAITING:
                self.waiting.setdefault(each.key, []).append(each)
            elif each.state is DecisionStage.NEW and each.verdict is Verdict.HOLD:
                self._newly_held.add(each.event_id)

    def receive(self, decision: StoredDecision) -> None:
        """Evaluate a new decision, or leave it for the next document."""
        if decision.verdict is Verdict.HOLD:
            self._hold(decision)
            return
        if self._context.trust(decision) is Trust.UNKNOWN:
            if self._context.is_expired(decision):
                self._refuse(decision, RefusalReason.EXPIRED)
            return
        why = self._why_not(decision)
        is_unsettled = decision.event_id in self._index.unsettled
        if why in _OF_THE_DOCUMENT and (is_unsettled or decision.received_at > self._context.asked_at):
            return
        if why is RefusalReason.EVENT_UNKNOWN and self._may_come(decision):
            return
        if why is not None:
            self._refuse(decision, why)
        elif wins_over(self._holds.get(decision.event_id), decision.issued_at):
            self._refuse(decision, RefusalReason.SUPERSEDED)
        else:
            self.result.update_decisions([decision.arrival], DecisionStage.WAITING)

    def _hold(self, hold: StoredDecision) -> None:
        stage = DecisionStage.ON_HOLD
        self.result.update_decisions([hold.arrival], stage, stage.value, "The event is held.")
        now = hold.event_id, self._index.digests.get(hold.event_id, "")
        if any(each.issued_at > hold.issued_at for each in self.waiting.get(now, ())):
            self._record_refusal(hold, RefusalReason.SUPERSEDED, EXPLAINED[RefusalReason.SUPERSEDED])

    def _may_come(self, decision: StoredDecision) -> bool:
        event_id = decision.event_id
        is_known = event_id in self._index.events or event_id in self._state.known_event_ids
        return not (is_known or self._context.is_expired(decision))

    def _why_not(self, decision: StoredDecision) -> RefusalReason | None:
        if self._context.trust(decision) is Trust.REVOKED:
            return RefusalReason.UNKNOWN_KEY
        if self._context.is_expired(decision) and decision.event_id in self._index.events:
            return RefusalReason.EXPIRED
        return self._index.why_not(*decision.key)

    def check_waiting(self, decision: StoredDecision) -> None:
        """Close a waiting decision that can no longer lead to an approval."""
        approval = self._state.approvals.get(decision.key)
        if approval is not None and approval.state in OPEN_STAGES:
            return
        done = {ApprovalStage.POSTED, ApprovalStage.DRY_RUN} if self._context.dry_run else {ApprovalStage.POSTED}
        if approval is not None and approval.state in done:
            self._follow_late(decision, approval)
            return
        why = self._why_over(decision.key)
        if why is None and self._context.trust(decision) is Trust.REVOKED:
            why = RefusalReason.UNKNOWN_KEY
        if why is None and wins_over(self._holds.get(decision.event_id), decision.issued_at):
            why = RefusalReason.SUPERSEDED
        if why is None and self._context.is_expired(decision):
            why = RefusalReason.TOO_FEW_APPROVERS
        if why is not None:
            was_sent = approval is not None and decision.arrival in approval.arrivals
            self._refuse(decision, why, _sent_before(approval) if approval is not None and was_sent else "")

    def _follow_late(self, decision: StoredDecision, approval: PendingApproval) -> None:
        is_dry_run = approval.state is ApprovalStage.DRY_RUN
        result = ApprovalResult.DRY_RUN if is_dry_run else ApprovalResult.ALREADY_APPROVED
        message = f"The event was already approved by {approval.source}."
        late = msgspec.structs.replace(
            self._with_newest_event(approval),
            source=decision.source,
            decision_id=decision.decision_id,
            approvers=(decision.approver,),
            reason=decision.reason,
            arrivals=(decision.arrival,),
        )
        self.result.add_outcome(late, Transition.APPROVED, result, decisions=DecisionStage.FOLLOWED, message=message)

    def _refuse(self, decision: StoredDecision, why: RefusalReason, more: str = "") -> None:
        message = EXPLAINED[why] + more
        self.result.update_decisions([decision.arrival], DecisionStage.REFUSED, why.value, message)
        self._record_refusal(decision, why, message)

    def _record_refusal(self, decision: StoredDecision, why: RefusalReason, message: str) -> None:
        event = self._index.events.get(decision.event_id)
        self.result.refusals.append(refusal_of(decision, why, message, event))

    def want_if_enough(self, key: EventVersion) -> None:
        """Start an approval if enough people have approved this version of the event."""
        if self._index.why_not(*key) is not None:
            return
        approval = self._state.approvals.get(key)
        approves = [
            each
            for each in self.waiting.get(key, ())
            if self._context.trust(each) is Trust.KEPT and not self._context.is_expired(each)
        ]
        enough = sufficient_decisions(approves, self._context.required_approvals)
        if not enough or (approval is not None and _stays(approval, enough[-1])):
            return
        last = enough[-1]
        runs_command = self._context.has_command and last.source == "portal"
        may_have_been_sent = approval is not None and approval.state in {*OPEN_STAGES, ApprovalStage.WITHDRAWN}
        self.result.approvals.append(
            PendingApproval(
                event_id=key[0],
                event_digest=key[1],
                state=ApprovalStage.DRAINING if runs_command else ApprovalStage.WANTED,
                source=last.source,
                decision_id=last.decision_id,
                approvers=tuple(each.approver for each in enough),
                reason=last.reason,
                arrivals=tuple(each.arrival for each in enough),
                oldest_issued_at=min(each.issued_at for each in enough),
                attempts=approval.attempts if approval is not None and may_have_been_sent else 0,
                changed_at=self._context.now,
                event=self._index.events[key[0]],
            )
        )

    def is_postable(self, approval: PendingApproval) -> bool:
        """Return whether *approval* is still open and nothing prevents its request or its command."""
        known = self._state.approvals.get(approval.key)
        if known is None or known.state is not approval.state or known.state not in OPEN_STAGES:
            return False
        if not self._index.is_confirmed(*known.key):
            return False
        before = len(self.result.approvals)
        self.end_or_withdraw(known)
        if known.event_id in self._newly_held or len(self.result.approvals) > before:
            return False
        return all(self._context.trust(each) is Trust.KEPT for each in self._behind(known))

    def end_or_withdraw(self, approval: PendingApproval) -> None:
        """End or withdraw *approval* if it must no longer be posted.

        An approval ends when it expires, or when its event starts, changes, or disappears. The agent withdraws an
        approval if a hold overrides it or if a key that signed it is no longer trusted.
        """
        why = self._why_over(approval.key)
        if why is not None:
            self._end(approval, why, EXPLAINED[why])
        elif self._is_over_age(approval):
            self._end(approval, RefusalReason.EXPIRED, "It was not accepted before exp or NotBefore.")
        elif (why := self._why_not_trusted(approval)) is not None:
            self._withdraw_untrusted(approval, why)
        elif wins_over(self._holds.get(approval.event_id), approval.oldest_issued_at):
            self._withdraw_held(approval, self._holds[approval.event_id])
        elif approval.state is ApprovalStage.DRAINING and approval.arrivals and not self._context.has_command:
            self._move(approval, ApprovalStage.WANTED)  # the configuration was changed

    def _withdraw_held(self, approval: PendingApproval, hold: StoredDecision) -> None:
        self._move(approval, ApprovalStage.WITHDRAWN)
        if approval.arrivals:  # `check_waiting` refuses each of its decisions
            return
        because = f": {hold.reason}" if hold.reason else ""
        message = f"{hold.approver} holds this event{because}.{_sent_before(approval)}"
        self._refuse_approval(approval, RefusalReason.SUPERSEDED, message)

    def _is_over_age(self, approval: PendingApproval) -> bool:
        expiries = [each.expires_at for each in self._behind(approval)]
        if not expiries:
            return False
        ends_at = min(expiries) + CLOCK_SKEW_SECONDS
        if approval.event.not_before is not None:
            ends_at = max(ends_at, approval.event.not_before.timestamp())
        return self._context.now >= ends_at

    def _why_not_trusted(self, approval: PendingApproval) -> RefusalReason | None:
        if not approval.arrivals:
            return None
        decisions = self._behind(approval)
        if len(decisions) < len(approval.arrivals) or self._revoked(approval):
            return RefusalReason.UNKNOWN_KEY
        if any(each.source == "cli" for each in decisions) or len(decisions) >= self._context.required_approvals:
            return None
        return RefusalReason.TOO_FEW_APPROVERS

    def _withdraw_untrusted(self, approval: PendingApproval, why: RefusalReason) -> None:
        self._move(approval, ApprovalStage.WITHDRAWN)
        if why is RefusalReason.UNKNOWN_KEY:
            message = EXPLAINED[why]
            self.result.update_decisions(self._revoked(approval), DecisionStage.REFUSED, why.value, message)
        else:
            message = f"{self._context.required_approvals} approvers are now required. The approval waits for more."
        self.result.records.append(self._refusal(approval, why, message + _sent_before(approval)))

    def _end(self, approval: PendingApproval, why: RefusalReason, explained: str) -> None:
        self._move(approval, ApprovalStage.OVER)
        if approval.attempts == 0:
            self._refuse_approval(approval, why, f"The approval was not posted: {explained}")
            return
        if approval.http_status is None:
            result = ApprovalResult.UNANSWERED
            message = f"Azure did not respond to StartRequests, but may have accepted it. {explained}"
        else:
            result = ApprovalResult.GAVE_UP
            message = (
                f"Azure responded with {approval.http_status} to the last of {approval.attempts} attempts. {explained}"
            )
        self.result.add_outcome(
            self._with_newest_event(approval),
            Transition.APPROVAL_FAILED,
            result,
            decisions=DecisionStage.REFUSED,
            message=message,
        )

    def _refuse_approval(self, approval: PendingApproval, why: RefusalReason, message: str) -> None:
        self.result.update_decisions(approval.arrivals, DecisionStage.REFUSED, why.value, message)
        self.result.refusals.append(self._refusal(approval, why, message))

    def _refusal(self, approval: PendingApproval, why: RefusalReason, message: str) -> ApprovalRecord:
        current = self._with_newest_event(approval)
        return approval_record(current, Transition.APPROVAL_REFUSED, why, message=message)

    def _move(self, approval: PendingApproval, stage: ApprovalStage) -> None:
        self.result.approvals.append(msgspec.structs.replace(approval, state=stage, changed_at=self._context.now))

    def _why_over(self, key: EventVersion) -> RefusalReason | None:
        """Return why the version cannot be approved, or None if it can or a change is unconfirmed."""
        return None if key[0] in self._index.unsettled else self._index.why_not(*key)

    def _behind(self, approval: PendingApproval) -> list[StoredDecision]:
        return [self._by_arrival[each] for each in approval.arrivals if each in self._by_arrival]

    def _revoked(self, approval: PendingApproval) -> list[int]:
        return [each.arrival for each in self._behind(approval) if self._context.trust(each) is Trust.REVOKED]

    def _with_newest_event(self, approval: PendingApproval) -> PendingApproval:
        event = self._index.events.get(approval.event_id)
        return approval if event is None else msgspec.structs.replace(approval, event=event)


def _stays(approval: PendingApproval, last: StoredDecision) -> bool:
    """Return whether *approval* is under way, so that the decision *last* must not replace it.

    A person's decision replaces an approval that a rule started. While a drain command is running, however, only a
    decision made on this VM takes effect immediately. A decision from the portal waits until the command ends, because
    two drains of the same VM would conflict.
    """
    if approval.state is ApprovalStage.WANTED:
        return bool(approval.arrivals)
    return approval.state is ApprovalStage.DRAINING and last.source == "portal"


def _sent_before(approval: PendingApproval) -> str:
    if not approval.attempts:
        return ""
    return f" StartRequests was sent {approval.attempts} times before, so Azure may have accepted it."
