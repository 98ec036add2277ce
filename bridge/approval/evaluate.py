"""Evaluation: what follows from the open decisions and the document as it is now. Pure: no clock, no I/O.

Three promises are kept here. The newest ``iat`` for an event wins, and on a tie a hold beats an approval. Two approvals
mean two people: different kids, different keys, different approvers, each decided after the newest hold, and none of
them expired when the last one came. And nothing is carried over to an event that is not the one that was decided on.

Trust is asked again at each step, and right before each request (`postable`): an approval that rests on a key
which is gone, or on fewer approvers than are required now, is withdrawn with a record. While it cannot be known whether
a key still counts, because its file is being written, nothing that rests on it is posted, and nothing is given up
before its `exp`.

A decision is ``new`` until it was evaluated beside a fresh document that has its event; one that comes before the
event waits for it until it expires. An approval is ``waiting`` until enough others have come and Azure has answered.

A hold is the opposite of an approval: it binds the EventId whatever else of the event changes, no date and no missing
event makes it count less, and it stays on hold, because it must outlive everything that it forbids.

`evaluate` makes one step. `applied` is the state after it; what follows from that state is the next step, until one is
empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

import msgspec

from bridge.approval.digest import digest
from bridge.clock import CLOCK_SKEW_SECONDS
from bridge.errors import RefusalReason
from bridge.events.event import Document, ScheduledEvent
from bridge.events.record import Approval, Transition, Verdict
from bridge.outbox.approvals import (
    OPEN_DECISIONS,
    OPEN_STAGES,
    ApprovalRecord,
    ApprovalResult,
    ApprovalStage,
    ApprovalState,
    DecisionStage,
    DecisionUpdate,
    EventVersion,
    PendingApproval,
    StoredDecision,
)

#: An event that should have begun so long ago is not what anybody decided on any more.
_AFTER_NOT_BEFORE_SECONDS = 3600.0
#: What only an answer of the metadata service can tell that was asked for after the decision came.
_OF_THE_DOCUMENT = frozenset(
    {RefusalReason.EVENT_UNKNOWN, RefusalReason.EVENT_CHANGED, RefusalReason.EVENT_NOT_SCHEDULED}
)


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


class Trust(Enum):
    """Whether the key behind a decision that was kept still counts."""

    KEPT = "kept"
    REVOKED = "revoked"
    """Its file is gone or holds another key, or the configuration does not name it for this approver."""
    UNKNOWN = "unknown"
    """Its file is there and cannot be used, perhaps because it is being written."""


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


class DocumentIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The document, by EventId; an EventId that it has twice is ambiguous and cannot be approved."""

    events: dict[str, ScheduledEvent]
    digests: dict[str, str]
    ambiguous: frozenset[str]
    unsettled: frozenset[str] = frozenset()
    """EventIds that are absent, which the poll does not believe yet: nothing ends by that, and nothing is posted."""

    def why_not(self, event_id: str, event_digest: str) -> RefusalReason | None:
        """Return why the event cannot be approved as it was decided on, None when it can."""
        event = self.events.get(event_id)
        if event is None or event_id in self.ambiguous:
            return RefusalReason.EVENT_UNKNOWN
        if event.event_status != "Scheduled":
            return RefusalReason.EVENT_NOT_SCHEDULED
        return None if self.digests[event_id] == event_digest else RefusalReason.EVENT_CHANGED


def index_document(document: Document, unsettled: frozenset[str] = frozenset()) -> DocumentIndex:
    """Return *document* as decisions are compared with it; it lacks the EventIds *unsettled*, maybe wrongly."""
    events: dict[str, ScheduledEvent] = {}
    ambiguous = set()
    for event in document.events:
        if event.event_id is not None:
            if event.event_id in events:
                ambiguous.add(event.event_id)
            events[event.event_id] = event
    digests = {event_id: digest(event) for event_id, event in events.items()}
    return DocumentIndex(events=events, digests=digests, ambiguous=frozenset(ambiguous), unsettled=unsettled)


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


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one step is made from, and what it found so far."""

    state: ApprovalState
    index: DocumentIndex
    now: float
    settled_now: float
    """What ends for its time ends by this; a clock that is ahead for a moment ends nothing, and nothing is posted."""
    required_approvals: int
    trust: Callable[[StoredDecision], Trust]
    predates: Callable[[StoredDecision], bool]
    done: frozenset[ApprovalStage]
    holds: dict[str, StoredDecision]
    """By EventId: a hold binds it whatever else of the event changes."""
    waiting: dict[EventVersion, list[StoredDecision]]
    """The decisions that wait, by event, so that each is compared with its own event's only."""
    result: Evaluation
    by_arrival: dict[int, StoredDecision]

    def is_held(self, decision: StoredDecision) -> bool:
        hold = self.holds.get(decision.event_id)
        return hold is not None and decision.issued_at <= hold.issued_at

    def why_over(self, key: EventVersion) -> RefusalReason | None:
        """Return why what was decided on the event *key* is over; None while it is not, or that is not sure."""
        return None if key[0] in self.index.unsettled else self.index.why_not(*key)

    def is_expired(self, decision: StoredDecision) -> bool:
        return self.now >= decision.expires_at + CLOCK_SKEW_SECONDS

    def is_surely_expired(self, decision: StoredDecision) -> bool:
        return self.settled_now >= decision.expires_at + CLOCK_SKEW_SECONDS

    def is_decided_anew(self, decision: StoredDecision, approval: PendingApproval) -> bool:
        """Return whether *decision* was made after Azure took *approval*, and the event still waits as it was.

        Azure may have forgotten it, or wait for others: to tell it once more is what was asked for, and does no harm.
        """
        return (
            approval.state is ApprovalStage.POSTED
            and decision.issued_at > approval.changed_at * 1_000_000
            and self.index.why_not(*decision.key) is None
        )

    def behind(self, approval: PendingApproval) -> list[StoredDecision]:
        """Return the decisions that *approval* rests on, those that are still open.

        A rebuilt database may have lost one and given its number to another decision, which says nothing of this event.
        """
        found = [self.by_arrival.get(arrival) for arrival in approval.arrivals]
        return [each for at, each in enumerate(found) if each is not None and approval.rests_on(each, at)]

    def is_put_off_too_long(self, approval: PendingApproval) -> bool:
        """Return whether ``approvals.disabled`` has kept *approval*, a rule's too, until the event should have begun.

        To remove the file must not release what nobody expects any more.
        """
        not_before = self.event_of(approval).not_before
        return approval.put_off_at is not None and not_before is not None and self.settled_now >= not_before.timestamp()

    def is_over_age(self, approval: PendingApproval) -> bool:
        """Return whether the time is over in which Azure may be told: ``exp``, or an hour after NotBefore if later.

        Consent is for a moment, not for whenever the metadata service takes requests again. A rule has no end.
        """
        expiries = [each.expires_at for each in self.behind(approval)]
        if not expiries:
            return False
        ends_at = min(expiries) + CLOCK_SKEW_SECONDS
        if approval.event.not_before is not None:
            ends_at = max(ends_at, approval.event.not_before.timestamp() + _AFTER_NOT_BEFORE_SECONDS)
        return self.settled_now >= ends_at

    def event_of(self, approval: PendingApproval) -> ScheduledEvent:
        return self.index.events.get(approval.event_id) or approval.event


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
) -> Evaluation:
    """Return the next step from *state*, given a fresh document and the Unix time *now*; empty at the end.

    *settled_now* is the same without a jump of the clock that may not last: nothing ends by a later time than that.
    *predates* returns whether the document was asked for before a new decision came: it refuses no such decision.
    """
    stages = {ApprovalStage.POSTED, ApprovalStage.DRY_RUN} if dry_run else {ApprovalStage.POSTED}
    step = _Step(
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
    )
    for approval in state.approvals.values():
        if approval.state in OPEN_STAGES:
            _end_or_withdraw(step, approval)
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


def postable(
    state: ApprovalState,
    index: DocumentIndex,
    due: Iterable[PendingApproval],
    *,
    now: float,
    required_approvals: int,
    trust: Callable[[StoredDecision], Trust],
) -> list[PendingApproval]:
    """Return those of *due* of which Azure may be told at *now*, given *state* and a document newer than they are.

    A hold on the event stands in the way until it was evaluated.
    """
    step = _Step(
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
    )
    new_holds = {
        each.event_id for each in state.decisions if each.state is DecisionStage.NEW and each.verdict is Verdict.HOLD
    }
    return [each for each in due if each.event_id not in new_holds and _is_postable(step, each)]


def _is_postable(step: _Step, approval: PendingApproval) -> bool:
    known = step.state.approvals.get(approval.key)
    if known is None or known.state is not ApprovalStage.WANTED or step.index.why_not(*known.key) is not None:
        return False
    before = len(step.result.approvals)
    _end_or_withdraw(step, known)
    return len(step.result.approvals) == before and all(
        step.trust(each) is Trust.KEPT for each in _behind(step, known) or ()
    )


# An approval on its way.


def _end_or_withdraw(step: _Step, approval: PendingApproval) -> None:
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


def _behind(step: _Step, approval: PendingApproval) -> list[StoredDecision] | None:
    """Return the decisions that *approval* rests on; None when one of them is not open any more."""
    found = step.behind(approval)
    return found if len(found) == len(approval.arrivals) else None


def _why_not_trusted(step: _Step, approval: PendingApproval) -> RefusalReason | None:
    """Return why *approval* does not count any more, None when it does, and for a rule's."""
    if not approval.arrivals:
        return None
    decisions = _behind(step, approval)
    if decisions is None or any(step.trust(each) is Trust.REVOKED for each in decisions):
        return RefusalReason.UNKNOWN_KEY
    is_local = any(each.source == "cli" for each in decisions)
    return None if is_local or len(decisions) >= step.required_approvals else RefusalReason.TOO_FEW_APPROVERS


def _withdraw_untrusted(step: _Step, approval: PendingApproval, why: RefusalReason) -> None:
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


def _end(step: _Step, approval: PendingApproval, why: RefusalReason, explained: str) -> None:
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


def _refuse_behind(step: _Step, approval: PendingApproval, outcome: str, message: str) -> None:
    arrivals = [each.arrival for each in step.behind(approval)]
    step.result.update_decisions(arrivals, DecisionStage.REFUSED, outcome, message)


def _move(step: _Step, approval: PendingApproval, stage: ApprovalStage) -> None:
    step.result.approvals.append(msgspec.structs.replace(approval, state=stage, changed_at=step.now))


def _refuse_approval(step: _Step, approval: PendingApproval, why: RefusalReason, message: str) -> None:
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


# Decisions.


def _receive(step: _Step, decision: StoredDecision) -> None:
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


def _hold(step: _Step, hold: StoredDecision) -> None:
    """Put the event on hold, whatever became of it: its signature was good when it came, and a hold does no harm."""
    stage = DecisionStage.ON_HOLD
    step.result.update_decisions([hold.arrival], stage, stage.value, "The event is held.")
    now = hold.event_id, step.index.digests.get(hold.event_id, "")
    if any(each.issued_at > hold.issued_at for each in step.waiting.get(now, ())):
        _record_refusal(step, hold, RefusalReason.SUPERSEDED)


def _may_come(step: _Step, decision: StoredDecision) -> bool:
    """Return whether this VM may see the event only later: it has seen no such event, and there is time yet."""
    is_here = decision.event_id in step.index.events
    return not (is_here or decision.is_event_known or step.is_surely_expired(decision))


def _why_not(step: _Step, decision: StoredDecision) -> RefusalReason | None:
    if step.trust(decision) is Trust.REVOKED:
        return RefusalReason.UNKNOWN_KEY
    if step.is_surely_expired(decision) and decision.event_id in step.index.events:
        return RefusalReason.EXPIRED
    return step.index.why_not(*decision.key)


def _check_waiting(step: _Step, decision: StoredDecision) -> None:
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
    if why is None and step.is_surely_expired(decision):
        why = RefusalReason.TOO_FEW_APPROVERS
    if why is not None:
        _refuse(step, decision, why)


def _follow_late(step: _Step, decision: StoredDecision, approval: PendingApproval) -> None:
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


def _want_if_enough(step: _Step, key: EventVersion) -> None:
    """Want what enough people approved, unless it is wanted by people already, or the event is not there."""
    if step.index.why_not(*key) is not None:
        return
    approval = step.state.approvals.get(key)
    is_wanted = approval is not None and approval.state is ApprovalStage.WANTED
    may_have_been_sent = is_wanted or (approval is not None and approval.state is ApprovalStage.WITHDRAWN)
    if approval is not None and is_wanted and approval.arrivals:
        return
    enough = _sufficient(step, key)
    if not enough:
        return
    last = enough[-1]
    step.result.approvals.append(
        PendingApproval(
            event_id=key[0],
            event_digest=key[1],
            state=ApprovalStage.WANTED,
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


def _sufficient(step: _Step, key: EventVersion) -> list[StoredDecision]:
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


def _refuse(step: _Step, decision: StoredDecision, why: RefusalReason) -> None:
    step.result.update_decisions([decision.arrival], DecisionStage.REFUSED, why.value, EXPLAINED[why])
    _record_refusal(step, decision, why)


def _record_refusal(step: _Step, decision: StoredDecision, why: RefusalReason) -> None:
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


# For the other modules of this package.


def newest_holds(decisions: Iterable[StoredDecision]) -> dict[str, StoredDecision]:
    """Return the newest hold on each EventId that is held, also one that was not evaluated yet."""
    newest: dict[str, StoredDecision] = {}
    for each in decisions:
        if each.verdict is Verdict.HOLD and each.state in OPEN_DECISIONS:
            known = newest.get(each.event_id)
            if known is None or each.issued_at > known.issued_at:
                newest[each.event_id] = each
    return newest


def approval_record(
    approval: PendingApproval,
    transition: Transition,
    result: ApprovalResult | RefusalReason,
    *,
    event: ScheduledEvent | None = None,
    message: str | None = None,
    http_status: int | None = None,
) -> ApprovalRecord:
    """Return the record of what became of *approval*; *event* is the one that it is for, unless a newer is given."""
    own = f"({approval.reason})" if message and approval.reason else approval.reason
    reason = " ".join(text for text in (message, own) if text) or None
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


EXPLAINED = {
    RefusalReason.UNKNOWN_KEY: "The key that signed the decision is not trusted any more.",
    RefusalReason.EXPIRED: "The decision expired before it could be checked. Decide again.",
    RefusalReason.EVENT_UNKNOWN: "The document of this VM has no such event: it is over, or was never there.",
    RefusalReason.EVENT_CHANGED: "The event is not any more what was decided on. Decide again on its newest record.",
    RefusalReason.EVENT_NOT_SCHEDULED: "The event is not Scheduled any more, so nobody can approve it.",
    RefusalReason.SUPERSEDED: "A newer decision on this event wins.",
    RefusalReason.TOO_FEW_APPROVERS: "Too few approvers decided before this decision expired.",
}
