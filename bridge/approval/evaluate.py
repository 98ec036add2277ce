"""What follows from the decisions that are open and the document as it is now: pure, no clock, no I/O.

Three promises are kept here. The newest ``iat`` for an event wins, and on a tie a hold beats an approval. Two approvals
mean two people: different kids, different keys, different approvers, each decided after the newest hold and none of
them expired when the last one came. And nothing is carried over to an event that is not the one that was decided on.

A decision is ``new`` until it was looked at beside a fresh document; an approval is ``waiting`` until enough others
have come and Azure has answered; a hold stays ``held``, because it must outlive everything that it forbids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime

import msgspec

from bridge.approval.digest import digest
from bridge.clock import CLOCK_SKEW_SECONDS
from bridge.errors import RefusalReason
from bridge.events.event import Document, ScheduledEvent
from bridge.events.record import Approval, Transition
from bridge.outbox.approvals import (
    DRAINING,
    DRY_RUN,
    FOLLOWED,
    HELD,
    NEW,
    OVER,
    POSTED,
    REFUSED,
    WAITING,
    WANTED,
    WITHDRAWN,
    ApprovalState,
    DecisionUpdate,
    Outcome,
    PendingApproval,
    StoredDecision,
)

_OPEN = frozenset({DRAINING, WANTED})

ACCEPTED, ALREADY_APPROVED, DRY_RUN_RESULT = "accepted", "already_approved", "dry_run"
UNANSWERED, GAVE_UP, REJECTED, DISABLED = "unanswered", "gave_up", "rejected", "disabled"
COMMAND_FAILED_RESULT = "command_failed"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refusal that becomes a record, at most one a minute and reason."""

    reason: str
    said: str
    source: str
    decision_id: str | None = None
    approvers: tuple[str, ...] = ()
    event_id: str | None = None
    event: ScheduledEvent | None = None


class Evaluation(msgspec.Struct, kw_only=True):
    """What is to be written; empty when nothing changed."""

    consents: list[PendingApproval] = msgspec.field(default_factory=list)
    settled: list[DecisionUpdate] = msgspec.field(default_factory=list)
    outcomes: list[Outcome] = msgspec.field(default_factory=list)
    refusals: list[Refusal] = msgspec.field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing changed."""
        return not (self.consents or self.settled or self.outcomes or self.refusals)


class DocumentIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The document, by EventId; an EventId that stands there twice is nobody's."""

    events: dict[str, ScheduledEvent]
    digests: dict[str, str]
    ambiguous: frozenset[str]

    def why_not(self, event_id: str, event_digest: str) -> RefusalReason | None:
        """Return why the event cannot be approved as it was decided on, null when it can."""
        event = self.events.get(event_id)
        if event is None or event_id in self.ambiguous:
            return RefusalReason.EVENT_UNKNOWN
        if event.event_status != "Scheduled":
            return RefusalReason.EVENT_NOT_SCHEDULED
        return None if self.digests[event_id] == event_digest else RefusalReason.EVENT_CHANGED


def view(document: Document) -> DocumentIndex:
    """Return *document* as decisions are compared with it."""
    events: dict[str, ScheduledEvent] = {}
    ambiguous = set()
    for event in document.events:
        if event.event_id is not None:
            if event.event_id in events:
                ambiguous.add(event.event_id)
            events[event.event_id] = event
    digests = {event_id: digest(event) for event_id, event in events.items()}
    return DocumentIndex(events=events, digests=digests, ambiguous=frozenset(ambiguous))


def judge(
    state: ApprovalState,
    seen: DocumentIndex,
    *,
    now: datetime,
    required_approvals: int,
    is_trusted: Callable[[StoredDecision], bool],
    dry_run: bool = False,
) -> Evaluation:
    """Return what is to be written about *state*, given a fresh document; once written, judge again until empty."""
    return _Judge(
        state,
        seen,
        now=now.timestamp(),
        required_approvals=required_approvals,
        is_trusted=is_trusted,
        done=frozenset({POSTED, DRY_RUN} if dry_run else {POSTED}),
    ).judge()


class _Judge:
    def __init__(
        self,
        state: ApprovalState,
        seen: DocumentIndex,
        *,
        now: float,
        required_approvals: int,
        is_trusted: Callable[[StoredDecision], bool],
        done: frozenset[str],
    ) -> None:
        self._state = state
        self._seen = seen
        self._now = now
        self._required = required_approvals
        self._is_trusted = is_trusted
        self._done = done
        self._out = Evaluation()

    def judge(self) -> Evaluation:
        for consent in self._state.consents.values():
            if consent.state in _OPEN:
                self._look_at(consent)
        if not self._out.is_empty:
            return self._out  # what is over first; then, in another turn, what is new
        decisions = self._state.decisions
        for decision in decisions:
            if decision.state == NEW:
                self._receive(decision)
            elif decision.state == WAITING:
                self._wait_on(decision)
        if self._out.is_empty:
            for key in dict.fromkeys(each.key for each in decisions if each.state == WAITING):
                self._count(key)
        return self._out

    # An approval on its way.

    def _look_at(self, consent: PendingApproval) -> None:
        why = self._seen.why_not(*consent.key)
        if why is not None:
            self._end(consent, why)
            return
        hold = self._newest_hold(consent.key)
        if hold is not None and (consent.oldest_issued_at is None or consent.oldest_issued_at <= hold.issued_at):
            said = f"{hold.approver} holds this event{_because(hold.reason)}."
            self._write(consent, WITHDRAWN)
            if not consent.arrivals:  # else its decisions are refused one by one, those that are not newer
                self._refuse_consent(consent, RefusalReason.SUPERSEDED, said)

    def _end(self, consent: PendingApproval, why: RefusalReason) -> None:
        self._write(consent, OVER)
        if consent.attempts == 0:
            said = f"The approval was not posted before: {EXPLAINED[why]}"
            self._refuse_consent(consent, why, said)
            result, status = why.value, None
        else:
            result = UNANSWERED if consent.http_status is None else GAVE_UP
            said = (
                "StartRequests was sent and no answer came, so Azure may have taken it. "
                if result == UNANSWERED
                else f"Azure answered {consent.http_status} to the last of {consent.attempts} tries. "
            ) + EXPLAINED[why]
            status = consent.http_status
            event = self._seen.events.get(consent.event_id) or consent.event
            self._out.outcomes.append(
                outcome_of(consent, Transition.APPROVAL_FAILED, result, event=event, said=said, http_status=status)
            )
        self._settle(consent.arrivals, REFUSED, result, said)

    def _write(self, consent: PendingApproval, state: str) -> None:
        self._out.consents.append(msgspec.structs.replace(consent, state=state, changed_at=self._now))

    def _refuse_consent(self, consent: PendingApproval, why: RefusalReason, said: str) -> None:
        self._out.refusals.append(
            Refusal(
                reason=why.value,
                said=said,
                source=consent.source,
                decision_id=consent.decision_id,
                approvers=consent.approvers,
                event=self._seen.events.get(consent.event_id) or consent.event,
            )
        )

    # Decisions.

    def _receive(self, decision: StoredDecision) -> None:
        why = self._why_not(decision)
        if why is not None:
            self._refuse(decision, why)
        elif decision.verdict == "hold":
            self._out.settled.append(_settled(decision, HELD, "held", "The event is held."))
            approves = [each for each in self._state.decisions if each.key == decision.key and each.state == WAITING]
            if any(each.issued_at > decision.issued_at for each in approves):
                self._tell(decision, RefusalReason.SUPERSEDED, EXPLAINED[RefusalReason.SUPERSEDED])
        elif self._is_held(decision):
            self._refuse(decision, RefusalReason.SUPERSEDED)
        else:
            self._out.settled.append(_settled(decision, WAITING))

    def _why_not(self, decision: StoredDecision) -> RefusalReason | None:
        if not self._is_trusted(decision):
            return RefusalReason.UNKNOWN_KEY
        if self._is_expired(decision):
            return RefusalReason.EXPIRED
        return self._seen.why_not(*decision.key)

    def _wait_on(self, decision: StoredDecision) -> None:
        consent = self._state.consents.get(decision.key)
        if consent is not None and decision.arrival in consent.arrivals and consent.state in _OPEN:
            return
        if consent is not None and consent.state in self._done:
            self._follow_late(decision, consent)
            return
        why = self._seen.why_not(*decision.key)
        if why is None and self._is_held(decision):
            why = RefusalReason.SUPERSEDED
        if why is None and self._is_expired(decision):
            why = RefusalReason.TOO_FEW_APPROVERS
        if why is not None:
            self._refuse(decision, why)

    def _follow_late(self, decision: StoredDecision, consent: PendingApproval) -> None:
        is_mine = decision.arrival in consent.arrivals
        result = DRY_RUN_RESULT if consent.state == DRY_RUN else ALREADY_APPROVED
        self._out.settled.append(_settled(decision, FOLLOWED, result, "The event was approved already."))
        if not is_mine:
            late = msgspec.structs.replace(
                consent,
                source=decision.source,
                decision_id=decision.decision_id,
                approvers=(decision.approver,),
                reason=decision.reason,
            )
            said = f"The event was approved already, by {consent.source}."
            event = self._seen.events.get(consent.event_id) or consent.event
            status = consent.http_status
            self._out.outcomes.append(
                outcome_of(late, Transition.APPROVED, result, event=event, said=said, http_status=status)
            )

    def _count(self, key: tuple[str, str]) -> None:
        """Want what enough people approved, unless it is wanted by people already."""
        consent = self._state.consents.get(key)
        if consent is not None and (consent.state in self._done or (consent.state == WANTED and consent.arrivals)):
            return
        enough = self._enough(key)
        if not enough:
            return
        last = enough[-1]
        self._out.consents.append(
            PendingApproval(
                event_id=key[0],
                event_digest=key[1],
                state=WANTED,
                source=last.source,
                decision_id=last.decision_id,
                approvers=tuple(each.approver for each in enough),
                reason=last.reason,
                arrivals=tuple(each.arrival for each in enough),
                oldest_issued_at=min(each.issued_at for each in enough),
                # It may be on its way already, for a rule.
                attempts=0 if consent is None or consent.state != WANTED else consent.attempts,
                changed_at=self._now,
                event=self._seen.events[key[0]],
            )
        )

    def _enough(self, key: tuple[str, str]) -> list[StoredDecision]:
        """Return the approvals that suffice together, in the order they came; empty when they do not."""
        approves = [
            each
            for each in self._state.decisions
            if each.key == key and each.state == WAITING and self._is_trusted(each) and not self._is_expired(each)
        ]
        local = [each for each in approves if each.source == "cli"]
        if local:  # whoever may write here is this VM's owner
            return local[:1]
        chosen: list[StoredDecision] = []
        for each in approves:
            names = [(other.kid, other.approver, other.key_sha256) for other in chosen]
            if not any(mine in other for other in names for mine in (each.kid, each.approver, each.key_sha256)):
                chosen.append(each)
        return chosen[: self._required] if len(chosen) >= self._required else []

    def _is_held(self, decision: StoredDecision) -> bool:
        hold = self._newest_hold(decision.key)
        return hold is not None and decision.issued_at <= hold.issued_at

    def _newest_hold(self, key: tuple[str, str]) -> StoredDecision | None:
        return newest_hold(self._state.decisions, key)

    def _is_expired(self, decision: StoredDecision) -> bool:
        return self._now >= decision.expires_at + CLOCK_SKEW_SECONDS

    def _refuse(self, decision: StoredDecision, why: RefusalReason) -> None:
        self._out.settled.append(_settled(decision, REFUSED, why.value, EXPLAINED[why]))
        self._tell(decision, why, EXPLAINED[why])

    def _tell(self, decision: StoredDecision, why: RefusalReason, said: str) -> None:
        self._out.refusals.append(
            Refusal(
                reason=why.value,
                said=said,
                source=decision.source,
                decision_id=decision.decision_id,
                approvers=(decision.approver,),
                event=self._seen.events.get(decision.event_id),
            )
        )

    def _settle(self, arrivals: Iterable[int], state: str, outcome: str, said: str) -> None:
        self._out.settled.extend(
            DecisionUpdate(arrival=arrival, state=state, outcome=outcome, said=said) for arrival in arrivals
        )


def newest_hold(decisions: Iterable[StoredDecision], key: tuple[str, str]) -> StoredDecision | None:
    """Return the newest hold on the event, null when nobody holds it as it is."""
    holds = [each for each in decisions if each.key == key and each.state == HELD]
    return max(holds, key=lambda hold: hold.issued_at, default=None)


def outcome_of(
    consent: PendingApproval,
    transition: Transition,
    result: str,
    *,
    event: ScheduledEvent | None,
    said: str | None = None,
    http_status: int | None = None,
) -> Outcome:
    """Return the record of what became of *consent*; its own reason unless there is something to say."""
    reason = " ".join(text for text in (said, consent.reason and f"({consent.reason})") if text)
    approval = Approval(
        source=consent.source,
        decision_id=consent.decision_id,
        approvers=consent.approvers,
        reason=(reason if said else consent.reason) or None,
        result=result,
        http_status=http_status,
    )
    return Outcome(transition=transition, event=event, approval=approval)


def _settled(
    decision: StoredDecision, state: str, outcome: str | None = None, said: str | None = None
) -> DecisionUpdate:
    return DecisionUpdate(arrival=decision.arrival, state=state, outcome=outcome, said=said)


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


EXPLAINED = {
    RefusalReason.UNKNOWN_KEY: "The key that signed the decision is not trusted any more.",
    RefusalReason.EXPIRED: "The decision expired before it could be checked. Decide again.",
    RefusalReason.EVENT_UNKNOWN: "The document of this VM has no such event: it is over, or was never there.",
    RefusalReason.EVENT_CHANGED: "The event is not any more what was decided on. Decide again on its newest record.",
    RefusalReason.EVENT_NOT_SCHEDULED: "The event is not Scheduled any more, so nobody can approve it.",
    RefusalReason.SUPERSEDED: "A newer decision on this event wins.",
    RefusalReason.TOO_FEW_APPROVERS: "Too few approvers decided before this decision expired.",
}
