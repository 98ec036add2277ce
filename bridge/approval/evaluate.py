"""Evaluation: the changes that follow from the decisions, the approvals, and the newest document. Pure.

- The newest ``iat`` for an event wins. On a tie, a hold beats an approve.
- Several required approvals mean several people: different kids, different keys, and different approvers. Each of them
  decided after the newest hold, and none of the decisions had expired when the last one arrived.
- A decision counts for the version of the event that it names. A hold counts for the EventId, and it stays open.

A decision is ``new`` until a fresh response contains its event. A decision that arrives before its event waits until it
expires. An approve decision is ``waiting`` until enough others arrive and Azure responds. While an approval of the same
version of the event is under way, the other decisions wait for its end.

Trust is verified again in each evaluation and before each request (`postable`). While it is unknown whether a key is
trusted, nothing that depends on the key is posted, and nothing is given up before its ``exp``.

`evaluate` makes one step. The caller writes the step and calls again, until a step is empty.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bridge.approval.evaluation import EXPLAINED, Context, Evaluation, Refusal, Trust, approval_record, newest_holds
from bridge.clock import CLOCK_SKEW_SECONDS
from bridge.errors import RefusalReason
from bridge.events.event import ScheduledEvent
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

#: A response that was requested before a decision arrived cannot refuse the decision for these reasons.
_OF_THE_DOCUMENT = frozenset(
    {RefusalReason.EVENT_UNKNOWN, RefusalReason.EVENT_CHANGED, RefusalReason.EVENT_NOT_SCHEDULED}
)


def evaluate(state: ApprovalState, context: Context) -> Evaluation:
    """Return the next step from *state*; empty if nothing follows."""
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


def postable(
    state: ApprovalState,
    context: Context,
    due: Iterable[PendingApproval],
    *,
    stage: ApprovalStage = ApprovalStage.WANTED,
) -> list[PendingApproval]:
    """Return those of *due* that may be posted now.

    The response and the tracked document must both show the event as Scheduled and unchanged. A hold prevents the
    request even before it is evaluated. With *stage* DRAINING, return the approvals whose command may start.
    """
    step = _Step(state, context)
    return [each for each in due if step.is_postable(each, stage)]


class _Step:
    """One step: its input, and the changes found so far in `result`."""

    def __init__(self, state: ApprovalState, context: Context) -> None:
        self.result = Evaluation()
        self.waiting: dict[EventVersion, list[StoredDecision]] = {}
        """The waiting approve decisions by event, in the order of arrival."""
        self._state, self._context, self._index = state, context, context.index
        self._holds = newest_holds(state.decisions)
        self._by_arrival = {each.arrival: each for each in state.decisions}
        self._newly_held: set[str] = set()
        for each in state.decisions:
            if each.state is DecisionStage.WAITING:
                self.waiting.setdefault(each.key, []).append(each)
            elif each.state is DecisionStage.NEW and each.verdict is Verdict.HOLD:
                self._newly_held.add(each.event_id)

    # Decisions.

    def receive(self, decision: StoredDecision) -> None:
        """Evaluate a new decision. Without a result, it stays new until the next response."""
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
        elif self._is_held(decision):
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
        """Return whether this VM may see the event later."""
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
        """Close a waiting decision that no longer counts, or that arrived after the approval."""
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
        if why is None and self._is_held(decision):
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
        self.result.update_decisions([decision.arrival], DecisionStage.FOLLOWED, result.value, message)
        late = msgspec.structs.replace(
            approval,
            source=decision.source,
            decision_id=decision.decision_id,
            approvers=(decision.approver,),
            reason=decision.reason,
            arrivals=(decision.arrival,),
        )
        self.result.records.append(
            approval_record(
                late,
                Transition.APPROVED,
                result,
                event=self._event_of(approval),
                message=message,
                http_status=approval.http_status,
            )
        )

    def _refuse(self, decision: StoredDecision, why: RefusalReason, more: str = "") -> None:
        message = EXPLAINED[why] + more
        self.result.update_decisions([decision.arrival], DecisionStage.REFUSED, why.value, message)
        self._record_refusal(decision, why, message)

    def _record_refusal(self, decision: StoredDecision, why: RefusalReason, message: str) -> None:
        self.result.refusals.append(
            Refusal(
                reason=why,
                message=message,
                source=decision.source,
                decision_id=decision.decision_id,
                approvers=(decision.approver,),
                event=self._index.events.get(decision.event_id),
                arrivals=(decision.arrival,),
            )
        )

    # From decisions to an approval.

    def want_if_enough(self, key: EventVersion) -> None:
        """Add an approval if enough people approved this version of the event and none of them has one under way."""
        if self._index.why_not(*key) is not None:
            return
        approval = self._state.approvals.get(key)
        enough = self._sufficient(key)
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

    def _sufficient(self, key: EventVersion) -> list[StoredDecision]:
        """Return enough decisions for an approval, in the order of arrival; empty if there are too few."""
        approves = [
            each
            for each in self.waiting.get(key, ())
            if self._context.trust(each) is Trust.KEPT and not self._context.is_expired(each)
        ]
        local = [each for each in approves if each.source == "cli"]
        if local:  # a user who can write to the outbox owns this VM
            return local[:1]
        chosen: list[StoredDecision] = []
        for each in approves:
            if not any(
                each.kid == other.kid or each.approver == other.approver or each.key_sha256 == other.key_sha256
                for other in chosen
            ):
                chosen.append(each)
        required = self._context.required_approvals
        return chosen[:required] if len(chosen) >= required else []

    # Approvals under way.

    def is_postable(self, approval: PendingApproval, stage: ApprovalStage) -> bool:
        """Return whether *approval* is in *stage* and nothing prevents its request."""
        known = self._state.approvals.get(approval.key)
        if known is None or known.state is not stage or not self._index.is_confirmed(*known.key):
            return False
        before = len(self.result.approvals)
        self.end_or_withdraw(known)
        if known.event_id in self._newly_held or len(self.result.approvals) > before:
            return False
        return all(self._context.trust(each) is Trust.KEPT for each in self._behind(known))

    def end_or_withdraw(self, approval: PendingApproval) -> None:
        """End *approval* if its event or its time is over, and withdraw it if it is held or no longer trusted."""
        why = self._why_over(approval.key)
        if why is not None:
            self._end(approval, why, EXPLAINED[why])
        elif self._is_over_age(approval):
            self._end(approval, RefusalReason.EXPIRED, "It was not accepted before exp or NotBefore.")
        elif (why := self._why_not_trusted(approval)) is not None:
            self._withdraw_untrusted(approval, why)
        elif self._is_withdrawn_by_hold(approval):
            self._withdraw_held(approval, self._holds[approval.event_id])
        elif approval.state is ApprovalStage.DRAINING and approval.arrivals and not self._context.has_command:
            self._move(approval, ApprovalStage.WANTED)  # the configuration was changed

    def _is_withdrawn_by_hold(self, approval: PendingApproval) -> bool:
        """Return whether a hold is not older than *approval*. Every hold withdraws the approval of a rule."""
        hold, issued_at = self._holds.get(approval.event_id), approval.oldest_issued_at
        return hold is not None and (issued_at is None or issued_at <= hold.issued_at)

    def _withdraw_held(self, approval: PendingApproval, hold: StoredDecision) -> None:
        self._move(approval, ApprovalStage.WITHDRAWN)
        if approval.arrivals:  # `check_waiting` refuses the decisions behind it one by one
            return
        because = f": {hold.reason}" if hold.reason else ""
        message = f"{hold.approver} holds this event{because}.{_sent_before(approval)}"
        self._refuse_approval(approval, RefusalReason.SUPERSEDED, message)

    def _is_over_age(self, approval: PendingApproval) -> bool:
        """Return whether ``exp`` and NotBefore have passed. The approval of a rule has no end."""
        expiries = [each.expires_at for each in self._behind(approval)]
        if not expiries:
            return False
        ends_at = min(expiries) + CLOCK_SKEW_SECONDS
        if approval.event.not_before is not None:
            ends_at = max(ends_at, approval.event.not_before.timestamp())
        return self._context.now >= ends_at

    def _why_not_trusted(self, approval: PendingApproval) -> RefusalReason | None:
        """Return why *approval* no longer counts. The approval of a rule always counts."""
        if not approval.arrivals:
            return None
        decisions = self._behind(approval)
        if len(decisions) < len(approval.arrivals) or self._revoked(approval):
            return RefusalReason.UNKNOWN_KEY
        if any(each.source == "cli" for each in decisions) or len(decisions) >= self._context.required_approvals:
            return None
        return RefusalReason.TOO_FEW_APPROVERS

    def _withdraw_untrusted(self, approval: PendingApproval, why: RefusalReason) -> None:
        """Withdraw *approval* with a record. The other decisions on the event still count."""
        self._move(approval, ApprovalStage.WITHDRAWN)
        if why is RefusalReason.UNKNOWN_KEY:
            message = EXPLAINED[why]
            self.result.update_decisions(self._revoked(approval), DecisionStage.REFUSED, why.value, message)
        else:
            message = f"{self._context.required_approvals} approvers are required now. The approval waits for others."
        event, message = self._event_of(approval), message + _sent_before(approval)
        self.result.records.append(
            approval_record(approval, Transition.APPROVAL_REFUSED, why, event=event, message=message)
        )

    def _end(self, approval: PendingApproval, why: RefusalReason, explained: str) -> None:
        self._move(approval, ApprovalStage.OVER)
        if approval.attempts == 0:
            self._refuse_approval(approval, why, f"The approval was not posted: {explained}")
            return
        if approval.http_status is None:
            result = ApprovalResult.UNANSWERED
            message = f"StartRequests was sent without a response, so Azure may have accepted it. {explained}"
        else:
            result = ApprovalResult.GAVE_UP
            message = (
                f"Azure responded with {approval.http_status} to the last of {approval.attempts} attempts. {explained}"
            )
        self.result.records.append(
            approval_record(
                approval,
                Transition.APPROVAL_FAILED,
                result,
                event=self._event_of(approval),
                message=message,
                http_status=approval.http_status,
            )
        )
        self.result.update_decisions(approval.arrivals, DecisionStage.REFUSED, result.value, message)

    def _refuse_approval(self, approval: PendingApproval, why: RefusalReason, message: str) -> None:
        """Refuse *approval* and the decisions behind it, in one record."""
        self.result.update_decisions(approval.arrivals, DecisionStage.REFUSED, why.value, message)
        self.result.refusals.append(
            Refusal(
                reason=why,
                message=message,
                source=approval.source,
                decision_id=approval.decision_id,
                approvers=approval.approvers,
                event=self._event_of(approval),
                arrivals=approval.arrivals,
            )
        )

    def _move(self, approval: PendingApproval, stage: ApprovalStage) -> None:
        self.result.approvals.append(msgspec.structs.replace(approval, state=stage, changed_at=self._context.now))

    # Facts.

    def _is_held(self, decision: StoredDecision) -> bool:
        """Return whether a hold on the event was issued together with *decision* or later."""
        hold = self._holds.get(decision.event_id)
        return hold is not None and decision.issued_at <= hold.issued_at

    def _why_over(self, key: EventVersion) -> RefusalReason | None:
        """Return why decisions on this version of the event are over; None if they are not, or this is unconfirmed."""
        return None if key[0] in self._index.unsettled else self._index.why_not(*key)

    def _behind(self, approval: PendingApproval) -> list[StoredDecision]:
        """Return the open decisions behind *approval*."""
        return [self._by_arrival[each] for each in approval.arrivals if each in self._by_arrival]

    def _revoked(self, approval: PendingApproval) -> list[int]:
        """Return the decisions behind *approval* whose key is no longer trusted."""
        return [each.arrival for each in self._behind(approval) if self._context.trust(each) is Trust.REVOKED]

    def _event_of(self, approval: PendingApproval) -> ScheduledEvent:
        """Return the newest form of the event."""
        return self._index.events.get(approval.event_id) or approval.event


def _stays(approval: PendingApproval, last: StoredDecision) -> bool:
    """Return whether *approval* is under way and stays, instead of a new approval by *last*.

    A decision replaces the approval of a rule, and a person on the VM does not wait for a command. Other decisions wait
    for a running command, because two drains of one VM conflict with each other.
    """
    if approval.state is ApprovalStage.WANTED:
        return bool(approval.arrivals)
    return approval.state is ApprovalStage.DRAINING and last.source == "portal"


def _sent_before(approval: PendingApproval) -> str:
    if not approval.attempts:
        return ""
    return f" StartRequests was sent {approval.attempts} times before, so Azure may have accepted it."
