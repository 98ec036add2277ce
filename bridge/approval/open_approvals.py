"""Approvals on their way to Azure: what ends them, what withdraws them, and which of them may be posted now.

Trust is asked again at each step, and right before each request (`postable`): an approval that rests on a key
which is gone, or on fewer approvers than are required now, is withdrawn with a record. While it cannot be known whether
a key still counts, because its file is being written, nothing that rests on it is posted, and nothing is given up
before its `exp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from bridge.approval.evaluation_step import DocumentIndex, EvaluationStep, Trust, newest_holds
from bridge.approval.outcomes import EXPLAINED, Evaluation, Refusal, approval_record
from bridge.errors import RefusalReason
from bridge.events.record import Transition, Verdict
from bridge.outbox.approvals import (
    ApprovalResult,
    ApprovalStage,
    ApprovalState,
    DecisionStage,
    PendingApproval,
    StoredDecision,
)


def postable(
    state: ApprovalState,
    index: DocumentIndex,
    due: Iterable[PendingApproval],
    *,
    now: float,
    required_approvals: int,
    trust: Callable[[StoredDecision], Trust],
    stage: ApprovalStage = ApprovalStage.WANTED,
    has_command: bool = False,
) -> list[PendingApproval]:
    """Return those of *due* of which Azure may be told at *now*, given *state* and a document newer than they are.

    A hold on the event stands in the way until it was evaluated. With *stage* DRAINING: those whose command may start.
    With *has_command* the portal's without the result of one are left out.
    """
    step = EvaluationStep(
        state=state,
        index=index,
        now=now,
        settled_now=now,
        required_approvals=required_approvals,
        trust=trust,
        predates=lambda _decision: False,
        done=frozenset(),
        holds=newest_holds(state.decisions),
        waiting={},
        result=Evaluation(),
        by_arrival={each.arrival: each for each in state.decisions},
        has_command=has_command or stage is ApprovalStage.DRAINING,
    )
    new_holds = {
        each.event_id for each in state.decisions if each.state is DecisionStage.NEW and each.verdict is Verdict.HOLD
    }
    return [each for each in due if each.event_id not in new_holds and _is_postable(step, each, stage)]


def _is_postable(step: EvaluationStep, approval: PendingApproval, stage: ApprovalStage) -> bool:
    known = step.state.approvals.get(approval.key)
    if known is None or known.state is not stage or step.index.why_not(*known.key) is not None:
        return False
    before = len(step.result.approvals)
    end_or_withdraw(step, known)
    return len(step.result.approvals) == before and all(
        step.trust(each) is Trust.KEPT for each in _behind(step, known) or ()
    )


def end_or_withdraw(step: EvaluationStep, approval: PendingApproval) -> None:
    """End *approval* if its event or its time is over; withdraw it if it is held or not trusted any more.

    What may go on follows the configuration as it is now.
    """
    why = step.why_over(approval.key)
    if why is not None:
        _end(step, approval, why, EXPLAINED[why])
        return
    if step.is_over_age(approval):
        _end(step, approval, RefusalReason.EXPIRED, "Its time is over: exp, and an hour after NotBefore.")
        return
    if step.is_put_off_too_long(approval):
        message = "approvals.disabled kept it back until NotBefore. Decide again."
        _end(step, approval, RefusalReason.EXPIRED, message)
        return
    if (why := _why_not_trusted(step, approval)) is not None:
        _withdraw_untrusted(step, approval, why)
        return
    hold = step.holds.get(approval.event_id)
    if hold is not None and (approval.oldest_issued_at is None or approval.oldest_issued_at <= hold.issued_at):
        _move(step, approval, ApprovalStage.WITHDRAWN)
        if not approval.arrivals:  # else its decisions are refused one by one, those that are not newer
            because = f": {hold.reason}" if hold.reason else ""
            _refuse_approval(step, approval, RefusalReason.SUPERSEDED, f"{hold.approver} holds this event{because}.")
        return
    _follow_configuration(step, approval)


def _follow_configuration(step: EvaluationStep, approval: PendingApproval) -> None:
    """Have *approval* of the portal wait for a command that is configured now, and not for one that is not any more."""
    if approval.source != "portal":
        return
    if approval.state is ApprovalStage.WANTED and step.must_run_command(approval) and step.may_run_command:
        _move(step, msgspec.structs.replace(approval, put_off_at=None), ApprovalStage.DRAINING)
    elif approval.state is ApprovalStage.DRAINING and not step.has_command:
        _move(step, approval, ApprovalStage.WANTED)


def _behind(step: EvaluationStep, approval: PendingApproval) -> list[StoredDecision] | None:
    """Return the decisions that *approval* rests on; None when one of them is not open any more."""
    found = step.behind(approval)
    return found if len(found) == len(approval.arrivals) else None


def _why_not_trusted(step: EvaluationStep, approval: PendingApproval) -> RefusalReason | None:
    """Return why *approval* does not count any more, None when it does, and for a rule's."""
    if not approval.arrivals:
        return None
    decisions = _behind(step, approval)
    if decisions is None or any(step.trust(each) is Trust.REVOKED for each in decisions):
        return RefusalReason.UNKNOWN_KEY
    is_local = any(each.source == "cli" for each in decisions)
    return None if is_local or len(decisions) >= step.required_approvals else RefusalReason.TOO_FEW_APPROVERS


def _withdraw_untrusted(step: EvaluationStep, approval: PendingApproval, why: RefusalReason) -> None:
    """Withdraw *approval* with a record of its own; what else was decided on the event counts as before."""
    _move(step, approval, ApprovalStage.WITHDRAWN)
    if why is RefusalReason.UNKNOWN_KEY:
        message = EXPLAINED[why]
        revoked = [each for each in _behind(step, approval) or () if step.trust(each) is Trust.REVOKED]
        step.result.update_decisions((each.arrival for each in revoked), DecisionStage.REFUSED, why.value, message)
    else:
        message = f"{step.required_approvals} approvers are required now; it waits for further ones."
    if approval.attempts:
        message += f" StartRequests had been sent {approval.attempts} times before, so Azure may have taken it."
    record = approval_record(approval, Transition.APPROVAL_REFUSED, why, event=step.event_of(approval), message=message)
    step.result.records.append(record)


def _end(step: EvaluationStep, approval: PendingApproval, why: RefusalReason, explained: str) -> None:
    _move(step, approval, ApprovalStage.OVER)
    if approval.attempts == 0:
        message = f"The approval was not posted before: {explained}"
        _refuse_approval(step, approval, why, message)
        _refuse_behind(step, approval, why.value, message)
        return
    if approval.http_status is None:
        result = ApprovalResult.UNANSWERED
        message = "StartRequests was sent and no answer came, so Azure may have taken it. "
    else:
        result = ApprovalResult.GAVE_UP
        message = f"Azure answered {approval.http_status} to the last of {approval.attempts} tries. "
    message += explained
    step.result.records.append(
        approval_record(
            approval,
            Transition.APPROVAL_FAILED,
            result,
            event=step.event_of(approval),
            message=message,
            http_status=approval.http_status,
        )
    )
    _refuse_behind(step, approval, result.value, message)


def _refuse_behind(step: EvaluationStep, approval: PendingApproval, outcome: str, message: str) -> None:
    arrivals = [each.arrival for each in step.behind(approval)]
    step.result.update_decisions(arrivals, DecisionStage.REFUSED, outcome, message)


def _move(step: EvaluationStep, approval: PendingApproval, stage: ApprovalStage) -> None:
    step.result.approvals.append(msgspec.structs.replace(approval, state=stage, changed_at=step.now))


def _refuse_approval(step: EvaluationStep, approval: PendingApproval, why: RefusalReason, message: str) -> None:
    step.result.refusals.append(
        Refusal(
            reason=why,
            message=message,
            source=approval.source,
            decision_id=approval.decision_id,
            approvers=approval.approvers,
            event=step.event_of(approval),
            arrivals=approval.arrivals,
        )
    )
