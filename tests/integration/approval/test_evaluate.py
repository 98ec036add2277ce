"""What is worked out in memory is what the outbox has afterwards: `applied` is checked against the database."""

import msgspec
from bridge.approval.evaluation_step import Trust, index_document
from bridge.approval.outcomes import applied

from bridge.approval.evaluate import evaluate
from bridge.approval.rules import RuleEngine
from bridge.config.approval import ApprovalSettings, RuleSettings
from bridge.events.event import Document
from bridge.events.record import Verdict
from bridge.outbox import approvals
from bridge.outbox.approvals import ApprovalState, StoredDecision

ANNE, BORIS = "anne", "boris"
FREEZE = RuleSettings(name="freeze", event_types=("Freeze",), action="approve", act="each")


def steps_to_the_end(kit, *events):
    """Write each step and compare the state in memory with the one read back; return how many steps there were."""
    index = index_document(Document(incarnation=1, events=events))
    count = 0
    while True:
        state = kit.outbox.read(approvals.read_state).result()
        step = evaluate(
            state, index, now=kit.now().timestamp(), required_approvals=1, trust=lambda _decision: Trust.KEPT
        )
        if step.is_empty:
            return count
        count += 1
        kit.outbox.write(
            kit.outbox.records.write_approvals,
            state.stream_id,
            pending=step.approvals,
            decisions=step.decisions,
            incarnation=1,
        ).result()
        kept = kit.outbox.read(approvals.read_state).result()
        after = applied(state, step)
        assert after == kept
        assert list(after.approvals) == list(kept.approvals)


def test_every_step_is_the_same_in_memory_and_in_the_database(kit):
    events = [kit.event(f"E-{number}") for number in range(3)]
    kit.approver.receive([kit.token(event) for event in events])
    kit.approver.receive([kit.token(events[0], "hold", kid="k2", approver=BORIS, after=1), kit.token(kit.event("E-9"))])

    assert steps_to_the_end(kit, *events) >= 2
    state = kit.outbox.read(approvals.read_state).result()
    assert {each.event_id for each in state.approvals.values()} == {"E-1", "E-2"}
    changed = msgspec.structs.replace(events[1], duration_seconds=9)
    kit.wait(1)
    kit.approver.receive([kit.token(events[2], "hold", kid="k2", approver=BORIS, after=1)])
    assert steps_to_the_end(kit, events[0], changed, events[2]) >= 2


class Counted(tuple):
    """Decisions or events that count how often somebody goes over all of them."""

    __slots__ = ()
    passes = 0

    def __iter__(self):
        Counted.passes += 1
        return super().__iter__()


def passes_of_an_evaluation(kit, count):
    """Return how often the decisions are gone over to follow *count* approvals beside as many holds."""
    events = [kit.event(f"E-{number}") for number in range(count * 2)]
    index = index_document(Document(incarnation=1, events=tuple(events)))
    decisions = [
        StoredDecision(
            arrival=number,
            source="portal",
            approver=ANNE,
            decision_id=f"D-{number}",
            payload_sha256="",
            event_id=event.event_id,
            event_digest=index.digests[event.event_id],
            verdict=Verdict.HOLD if number % 2 else Verdict.APPROVE,
            issued_at=number,
            expires_at=kit.now().timestamp() + 60,
            received_at=0.0,
        )
        for number, event in enumerate(events)
    ]
    state = ApprovalState(stream_id="s", decisions=tuple(decisions), approvals={})
    rules = RuleEngine(ApprovalSettings(rules=(FREEZE,)), vm=lambda: kit.vm, clock=kit.clock)
    before = Counted.passes
    for _ in range(10):
        state = msgspec.structs.replace(state, decisions=Counted(state.decisions))
        step = evaluate(
            state, index, now=kit.now().timestamp(), required_approvals=1, trust=lambda _decision: Trust.KEPT
        )
        if step.is_empty:
            step = rules.apply(state, index, commands_are_full=False)
        if step.is_empty:
            break
        state = applied(state, step)
    assert sum(each.state.value == "wanted" for each in state.approvals.values()) == count
    return Counted.passes - before


def test_a_thousand_decisions_are_gone_over_as_often_as_ten(kit):
    assert passes_of_an_evaluation(kit, 500) == passes_of_an_evaluation(kit, 5)


def passes_of_refusals(kit, count):
    """Return how often the document is gone over to refuse *count* decisions."""
    events = Counted(kit.event(f"E-{number}") for number in range(20))
    kit.see(*events)
    kit.approver.observe(msgspec.structs.replace(kit.document, events=events), kit.clock.instant())
    tokens = [kit.token(events[number % 20], vm_id="another") for number in range(count)]
    before = Counted.passes
    kit.approver.receive(tokens)
    return Counted.passes - before


def test_the_document_is_gone_over_as_often_for_a_hundred_refused_decisions_as_for_one(kit):
    assert passes_of_refusals(kit, 100) == passes_of_refusals(kit, 1)
