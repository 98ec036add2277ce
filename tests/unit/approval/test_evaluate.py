"""`evaluate` and `postable` are pure: the same state and context always lead to the same step."""

import msgspec
import pytest
from outbox_kit import stored_decision

from bridge.approval.document_index import index_document
from bridge.approval.evaluate import Context, Trust, evaluate, postable
from bridge.events.event import Document, ScheduledEvent
from bridge.events.record import Verdict
from bridge.outbox.rows import ApprovalStage, ApprovalState, DecisionStage, PendingApproval

NOW = 1_000_000.0
EVENT = ScheduledEvent(event_id="E-1", event_type="Freeze", event_status="Scheduled", resources=("vm_0",))
STARTED = msgspec.structs.replace(EVENT, event_status="Started")
LONGER = msgspec.structs.replace(EVENT, duration_seconds=900)


def document(*events):
    return Document(incarnation=1, events=events)


def context_of(*events, unsettled=(), tracked=None, **options):
    index = index_document(document(*events), unsettled=frozenset(unsettled), tracked=tracked)
    values = {"now": NOW, "required_approvals": 1, "trust": lambda _decision: Trust.KEPT}
    return Context(index=index, **{**values, **options})


def decision_on(event, verdict=Verdict.APPROVE, *, arrival=1, **fields):
    event_digest = index_document(document(event)).digests[event.event_id]
    values = {"arrival": arrival, "issued_at": arrival, "event_digest": event_digest, **fields}
    return stored_decision(f"D-{arrival}", verdict, **values)


def state_of(*decisions, approvals=()):
    return ApprovalState(stream_id="s", decisions=decisions, approvals={each.key: each for each in approvals})


def wanted(decision, event=EVENT):
    return PendingApproval(
        event_id=decision.event_id,
        event_digest=decision.event_digest,
        state=ApprovalStage.WANTED,
        source="portal",
        approvers=(decision.approver,),
        arrivals=(decision.arrival,),
        oldest_issued_at=decision.issued_at,
        event=event,
    )


@pytest.mark.parametrize("shown", [(), (STARTED,), (LONGER,)], ids=["absent", "started", "changed"])
def test_unconfirmed_change_closes_no_decision_and_no_approval(shown):
    new = decision_on(EVENT)
    waiting = decision_on(EVENT, arrival=2, state=DecisionStage.WAITING)
    state = state_of(new, waiting, approvals=[wanted(waiting)])
    assert evaluate(state, context_of(*shown, unsettled=["E-1"])).is_empty
    step = evaluate(state, context_of(*shown))
    assert [each.state for each in step.approvals] == [ApprovalStage.OVER]


@pytest.mark.parametrize(
    ("shown", "tracked", "unsettled"),
    [
        ((EVENT,), document(STARTED), ()),
        ((EVENT,), document(LONGER), ()),
        ((EVENT,), document(), ()),
        ((LONGER,), document(EVENT), ()),
        ((), document(EVENT), ()),
        ((EVENT,), document(EVENT), ("E-1",)),
    ],
    ids=["step back", "tracked differs", "not tracked", "shown differs", "absent", "unsettled"],
)
def test_request_needs_the_same_event_in_response_and_tracked_document(shown, tracked, unsettled):
    waiting = decision_on(EVENT, state=DecisionStage.WAITING)
    approval = wanted(waiting)
    state = state_of(waiting, approvals=[approval])
    assert postable(state, context_of(EVENT, tracked=document(EVENT)), [approval]) == [approval]
    assert postable(state, context_of(*shown, tracked=tracked, unsettled=unsettled), [approval]) == []


@pytest.mark.parametrize("issued_at", [1, 5], ids=["tie", "newer"])
def test_a_hold_that_is_not_evaluated_yet_prevents_the_request(issued_at):
    waiting = decision_on(EVENT, state=DecisionStage.WAITING)
    hold = decision_on(EVENT, Verdict.HOLD, arrival=2, issued_at=issued_at)
    approval = wanted(waiting)
    assert postable(state_of(waiting, hold, approvals=[approval]), context_of(EVENT), [approval]) == []


@pytest.mark.parametrize("trust", [Trust.REVOKED, Trust.UNKNOWN])
def test_a_key_that_is_not_trusted_prevents_the_request(trust):
    waiting = decision_on(EVENT, state=DecisionStage.WAITING)
    approval = wanted(waiting)
    context = context_of(EVENT, trust=lambda _decision: trust)
    assert postable(state_of(waiting, approvals=[approval]), context, [approval]) == []
