"""What one step of an evaluation is made from: the document by EventId, the holds, the time, and trust in keys.

A date that a clock may have reached only for a moment ends nothing: what ends for its time ends by `settled_now`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

import msgspec

from bridge.approval.digest import digest
from bridge.approval.outcomes import Evaluation
from bridge.clock import CLOCK_SKEW_SECONDS
from bridge.errors import RefusalReason
from bridge.events.event import Document, ScheduledEvent
from bridge.events.record import Verdict
from bridge.outbox.approvals import (
    OPEN_DECISIONS,
    ApprovalStage,
    ApprovalState,
    EventVersion,
    PendingApproval,
    StoredDecision,
)

#: An event that should have begun so long ago is not what anybody decided on any more.
_AFTER_NOT_BEFORE_SECONDS = 3600.0


class Trust(Enum):
    """Whether the key behind a decision that was kept still counts."""

    KEPT = "kept"
    REVOKED = "revoked"
    """Its file is gone or holds another key, or the configuration does not name it for this approver."""
    UNKNOWN = "unknown"
    """Its file is there and cannot be used, perhaps because it is being written."""


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


def newest_holds(decisions: Iterable[StoredDecision]) -> dict[str, StoredDecision]:
    """Return the newest hold on each EventId that is held, also one that was not evaluated yet."""
    newest: dict[str, StoredDecision] = {}
    for each in decisions:
        if each.verdict is Verdict.HOLD and each.state in OPEN_DECISIONS:
            known = newest.get(each.event_id)
            if known is None or each.issued_at > known.issued_at:
                newest[each.event_id] = each
    return newest


class EvaluationStep(msgspec.Struct, frozen=True, kw_only=True):
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
    has_command: bool = False
    """A command of ``approval.remote`` must succeed before Azure is told what the portal approved."""
    may_run_command: bool = True
    """False: nothing is approved now anyway, so none is begun."""

    def is_held(self, decision: StoredDecision) -> bool:
        """Return whether a hold on the event of *decision* was made with it or after it."""
        hold = self.holds.get(decision.event_id)
        return hold is not None and decision.issued_at <= hold.issued_at

    def why_over(self, key: EventVersion) -> RefusalReason | None:
        """Return why what was decided on the event *key* is over; None while it is not, or that is not sure."""
        return None if key[0] in self.index.unsettled else self.index.why_not(*key)

    def is_expired(self, decision: StoredDecision) -> bool:
        """Return whether *decision* is too old to be followed, by the time as it is shown."""
        return self.now >= decision.expires_at + CLOCK_SKEW_SECONDS

    def is_surely_expired(self, decision: StoredDecision) -> bool:
        """Return whether *decision* is too old, and no jump of the clock says so."""
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

    def must_run_command(self, approval: PendingApproval) -> bool:
        """Return whether the command of ``approval.remote`` must succeed before *approval* is posted."""
        return self.has_command and approval.source == "portal" and approval.command_result is None

    def event_of(self, approval: PendingApproval) -> ScheduledEvent:
        """Return the event of *approval* as the document has it, or as it was when it was wanted."""
        return self.index.events.get(approval.event_id) or approval.event
