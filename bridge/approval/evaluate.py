"""Evaluation: what follows from the open decisions and the document as it is now. Pure: no clock, no I/O.

Three promises are kept here. The newest ``iat`` for an event wins, and on a tie a hold beats an approval. Two approvals
mean two people: different kids, different keys, different approvers, each decided after the newest hold, and none of
them expired when the last one came. And nothing is carried over to an event that is not the one that was decided on.

A decision is ``new`` until it was evaluated beside a fresh document that has its event; one that comes before the
event waits for it until it expires. An approval is ``waiting`` until enough others have come and Azure has answered.

A hold is the opposite of an approval: it binds the EventId whatever else of the event changes, no date and no missing
event makes it count less, and it stays on hold, because it must outlive everything that it forbids.

`evaluate` makes one step. `applied` is the state after it; what follows from that state is the next step, until one is
empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from bridge.approval.evaluation_step import DocumentIndex, EvaluationStep, Trust, newest_holds
from bridge.approval.open_approvals import end_or_withdraw
from bridge.approval.outcomes import EXPLAINED, Evaluation, Refusal, approval_record
from bridge.errors import RefusalReason
from bridge.events.record import Transition, Verdict
from bridge.outbox.approvals import (
    OPEN_STAGES,
    ApprovalResult,
    ApprovalStage,
    ApprovalState,
    DecisionStage,
    EventVersion,
    PendingApproval,
    StoredDecision,
)

#: What only an answer of the metadata service can tell that was asked for after the decision came.
_OF_THE_DOCUMENT = frozenset(
    {RefusalReason.EVENT_UNKNOWN, RefusalReason.EVENT_CHANGED, RefusalReason.EVENT_NOT_SCHEDULED}
)


def evaluate(
    state: ApprovalState,
    index: DocumentIndex,
    *,
    now: float,
    settled_now: float | None = None,
    required_approvals: int,
    trust: Callable[[StoredDecision], Trust],
    predates: Callable[[StoredDecision], bool] = lambda _decision: False,
    dry_run: bool = False,
    has_command: bool = False,
    may_run_command: bool = True,
) -> Evaluation:
    """Return the next step from *state*, given a fresh document and the Unix time *now*; empty at the end.

    *settled_now* is the same without a jump of the clock that may not last: nothing ends by a later time than that.
    *predates* returns whether the document was asked for before a new decision came: it refuses no such decision.
    With *has_command* a command must succeed before Azure is told what the portal approved; while not
    *may_run_command*, none is begun, and what waits for one is put off like everything else.
    """
    stages = {ApprovalStage.POSTED, ApprovalStage.DRY_RUN} if dry_run else {ApprovalStage.POSTED}
    step = EvaluationStep(
        state=state,
        index=index,
        now=now,
        settled_now=now if settled_now is None else settled_now,
        required_approvals=required_approvals,
        trust=trust,
        predates=predates,
        done=frozenset(stages),
        holds=newest_holds(state.decisions),
        waiting=_waiting(state.decisions),
        result=Evaluation(),
        by_arrival={each.arrival: each for each in state.decisions},
        has_command=has_command,
        may_run_command=may_run_command,
    )
    for approval in state.approvals.values():
        if approval.state in OPEN_STAGES:
            end_or_withdraw(step, approval)
    if not step.result.is_empty:
        return step.result  # what is over first; what is new follows in another step
    for decision in state.decisions:
        if decision.state is DecisionStage.NEW:
            _receive(step, decision)
        elif decision.state is DecisionStage.WAITING:
            _check_waiting(step, decision)
    if step.result.is_empty:
        for key in step.waiting:
            _want_if_enough(step, key)
    return step.result


def _waiting(decisions: Iterable[StoredDecision]) -> dict[EventVersion, list[StoredDecision]]:
    """Return the approvals that wait, by event, in the order they came."""
    waiting: dict[EventVersion, list[StoredDecision]] = {}
    for each in decisions:
        if each.state is DecisionStage.WAITING:
            waiting.setdefault(each.key, []).append(each)
    return waiting


def _receive(step: EvaluationStep, decision: StoredDecision) -> None:
    if decision.verdict is Verdict.HOLD:
        _hold(step, decision)
        return
    if step.trust(decision) is Trust.UNKNOWN:
        if step.is_expired(decision):
            _refuse(step, decision, RefusalReason.EXPIRED)
        return  # else it stays new: its key file may be usable again
    why = _why_not(step, decision)
    if why in _OF_THE_DOCUMENT and (decision.event_id in step.index.unsettled or step.predates(decision)):
        return  # it stays new: the next answer of the metadata service tells
    if why is RefusalReason.EVENT_UNKNOWN and _may_come(step, decision):
        return  # it stays new
    if why is not None:
        _refuse(step, decision, why)
    elif step.is_held(decision):
        _refuse(step, decision, RefusalReason.SUPERSEDED)
    else:
        step.result.update_decisions([decision.arrival], DecisionStage.WAITING)


def _hold(step: EvaluationStep, hold: StoredDecision) -> None:
    """Put the event on hold, whatever became of it: its signature was good when it came, and a hold does no harm."""
    stage = DecisionStage.ON_HOLD
    step.result.update_decisions([hold.arrival], stage, stage.value, "The event is held.")
    now = hold.event_id, step.index.digests.get(hold.event_id, "")
    if any(each.issued_at > hold.issued_at for each in step.waiting.get(now, ())):
        _record_refusal(step, hold, RefusalReason.SUPERSEDED)


def _may_come(step: EvaluationStep, decision: StoredDecision) -> bool:
    """Return whether this VM may see the event only later: it has seen no such event, and there is time yet."""
    is_here = decision.event_id in step.index.events
    return not (is_here or decision.is_event_known or step.is_surely_expired(decision))


def _why_not(step: EvaluationStep, decision: StoredDecision) -> RefusalReason | None:
    if step.trust(decision) is Trust.REVOKED:
        return RefusalReason.UNKNOWN_KEY
    if step.is_surely_expired(decision) and decision.event_id in step.index.events:
        return RefusalReason.EXPIRED
    return step.index.why_not(*decision.key)


def _check_waiting(step: EvaluationStep, decision: StoredDecision) -> None:
    approval = step.state.approvals.get(decision.key)
    if approval is not None and approval.state in OPEN_STAGES and decision in step.behind(approval):
        return
    if approval is not None and approval.state in step.done and not step.is_decided_anew(decision, approval):
        _follow_late(step, decision, approval)
        return
    why = step.why_over(decision.key)
    if why is None and step.trust(decision) is Trust.REVOKED:
        why = RefusalReason.UNKNOWN_KEY
    if why is None and step.is_held(decision):
        why = RefusalReason.SUPERSEDED
    if why is None and step.is_surely_expired(decision) and not _goes_with(step, approval):
        why = RefusalReason.TOO_FEW_APPROVERS
    if why is not None:
        _refuse(step, decision, why)


def _goes_with(step: EvaluationStep, approval: PendingApproval | None) -> bool:
    """Return whether *approval* is on its way, so that a decision which is not behind it ends as it does."""
    if approval is None or approval.state not in OPEN_STAGES:
        return False
    return bool(approval.arrivals) or step.has_command


def _follow_late(step: EvaluationStep, decision: StoredDecision, approval: PendingApproval) -> None:
    is_dry_run = approval.state is ApprovalStage.DRY_RUN
    result = ApprovalResult.DRY_RUN if is_dry_run else ApprovalResult.ALREADY_APPROVED
    step.result.update_decisions(
        [decision.arrival], DecisionStage.FOLLOWED, result.value, "The event was approved already."
    )
    if decision.arrival in approval.arrivals:
        return
    late = msgspec.structs.replace(
        approval,
        source=decision.source,
        decision_id=decision.decision_id,
        approvers=(decision.approver,),
        reason=decision.reason,
        arrivals=(decision.arrival,),
    )
    step.result.records.append(
        approval_record(
            late,
            Transition.APPROVED,
            result,
            event=step.event_of(approval),
            message=f"The event was approved already, by {approval.source}.",
            http_status=approval.http_status,
        )
    )


def _want_if_enough(step: EvaluationStep, key: EventVersion) -> None:
    """Want what enough people approved, unless it is wanted by people already, or the event is not there."""
    if step.index.why_not(*key) is not None:
        return
    approval = step.state.approvals.get(key)
    enough = _sufficient(step, key)
    if not enough or (approval is not None and _goes_on(step, approval, enough[-1])):
        return
    last = enough[-1]
    sent = (ApprovalStage.WANTED, ApprovalStage.WITHDRAWN, ApprovalStage.DRAINING)
    may_have_been_sent = approval is not None and approval.state in sent
    step.result.approvals.append(
        PendingApproval(
            event_id=key[0],
            event_digest=key[1],
            state=_first_stage(step, last),
            source=last.source,
            decision_id=last.decision_id,
            approvers=tuple(each.approver for each in enough),
            reason=last.reason,
            arrivals=tuple(each.arrival for each in enough),
            payloads_sha256=tuple(each.payload_sha256 for each in enough),
            oldest_issued_at=min(each.issued_at for each in enough),
            # A rule or others may have wanted it before, and StartRequests may have been sent.
            attempts=approval.attempts if approval is not None and may_have_been_sent else 0,
            posted_at=None if approval is None else approval.posted_at,
            changed_at=step.now,
            event=step.index.events[key[0]],
        )
    )


def _first_stage(step: EvaluationStep, last: StoredDecision) -> ApprovalStage:
    runs_command = step.has_command and step.may_run_command and last.source == "portal"
    return ApprovalStage.DRAINING if runs_command else ApprovalStage.WANTED


def _goes_on(step: EvaluationStep, approval: PendingApproval, last: StoredDecision) -> bool:
    """Return whether *approval* is on its way, and stays instead of one that *last* would begin.

    A person on the VM waits for no command of the portal. A rule's stays while the portal's would have to run one: two
    drains of one VM would get into each other's way, and what the rule wants is posted without it.
    """
    if approval.state is ApprovalStage.WANTED and approval.arrivals:
        return True
    if approval.state not in OPEN_STAGES or last.source != "portal":
        return False
    return bool(approval.arrivals) or step.has_command


def _sufficient(step: EvaluationStep, key: EventVersion) -> list[StoredDecision]:
    """Return the approvals that suffice together, in the order they came; empty when they do not."""
    approves = [
        each for each in step.waiting.get(key, ()) if step.trust(each) is Trust.KEPT and not step.is_expired(each)
    ]
    local = [each for each in approves if each.source == "cli"]
    if local:  # who may write to the outbox owns this VM
        return local[:1]
    chosen: list[StoredDecision] = []
    for each in approves:
        # Each with its like: a kid may be spelt as another approver is called.
        if not any(
            each.kid == other.kid or each.approver == other.approver or each.key_sha256 == other.key_sha256
            for other in chosen
        ):
            chosen.append(each)
    return chosen[: step.required_approvals] if len(chosen) >= step.required_approvals else []


def _refuse(step: EvaluationStep, decision: StoredDecision, why: RefusalReason) -> None:
    step.result.update_decisions([decision.arrival], DecisionStage.REFUSED, why.value, EXPLAINED[why])
    _record_refusal(step, decision, why)


def _record_refusal(step: EvaluationStep, decision: StoredDecision, why: RefusalReason) -> None:
    step.result.refusals.append(
        Refusal(
            reason=why,
            message=EXPLAINED[why],
            source=decision.source,
            decision_id=decision.decision_id,
            approvers=(decision.approver,),
            event=step.index.events.get(decision.event_id),
            arrivals=(decision.arrival,),
        )
    )
