"""The answers to commands: from a running agent's outbox, and from the stored outbox without an agent."""

import msgspec
import pytest
from outbox_kit import OutboxKit

from bridge.agent import handlers
from bridge.agent.handlers import Requests, StoredOutbox
from bridge.agent.requests import (
    Decide,
    Decision,
    Events,
    OutboxDiscard,
    OutboxImport,
    OutboxList,
    OutboxMove,
    OutboxRetry,
    Status,
    answer_type,
)
from bridge.cli.approve import cli_decision
from bridge.errors import OutboxError, OutboxReadOnly
from bridge.events.record import Verdict
from bridge.outbox.approvals import keep_decisions
from bridge.outbox.rows import DecisionStage, DeliveryState, StoredDecision

PARKED = (DeliveryState.PARKED,)


@pytest.fixture
def kit(tmp_path):
    kit = OutboxKit(tmp_path / "state")
    yield kit
    kit.close()


@pytest.fixture
def outbox(kit):
    return kit.open()


@pytest.fixture
def ask(outbox):
    """Return a function that passes a request and its answer through JSON, as the control socket does."""
    return through_json(Requests(outbox))


def through_json(requests):
    def ask(request):
        answer = requests.ask(msgspec.json.decode(msgspec.json.encode(request), type=type(request)))
        return msgspec.json.decode(msgspec.json.encode(answer), type=answer_type(request))

    return ask


def sequences(page):
    return [record.sequence for record in page.records]


def hold(event_id="E-1", arrival_id="jti"):
    return StoredDecision(
        source="portal",
        approver="ops",
        decision_id=arrival_id,
        payload_sha256=arrival_id,
        event_id=event_id,
        event_digest="digest",
        verdict=Verdict.HOLD,
        issued_at=1_000_000,
        expires_at=2e9,
        received_at=1.0,
        state=DecisionStage.ON_HOLD,
    )


def test_status_has_the_document_totals_and_files(kit, outbox, ask):
    [record] = kit.commit(outbox, kit.event())
    answer = ask(Status())
    assert answer.stream_id == outbox.stream_id
    assert [event.event_id for event in answer.document.events] == ["E-1"]
    assert answer.last_transitions == {"E-1": record}
    assert (answer.totals.sinks["a"].pending, answer.file, answer.readiness) == (1, "outbox-1.db", None)


@pytest.mark.parametrize("is_stored", [False, True])
def test_events_are_listed_newest_first_with_history(kit, outbox, ask, is_stored):
    kit.commit(outbox, kit.event(), kit.event("E-2"))
    kit.commit(outbox, kit.event(status="Completed"), transition="completed")
    for sink in ("a", "b"):
        kit.settle(outbox, sink, 1, 2, 3)
    kit.saved(outbox)
    if is_stored:
        ask = through_json(StoredOutbox(kit.directory))
    assert sequences(ask(Events())) == [3, 2, 1]
    assert sequences(ask(Events(event_id="e-1"))) == [3, 1]
    assert sequences(ask(Events(after=1, before=3))) == [2]
    assert sequences(ask(Events(event_types=("Freeze",)))) == []
    assert sequences(ask(Events(since=kit.time.timestamp() + 1))) == []


def test_pages_have_every_record_once(kit, outbox, ask, monkeypatch):
    kit.fill(outbox, 30)
    monkeypatch.setattr(handlers, "PAGE_BYTES", 5_000)
    found, before = [], None
    while True:
        page = ask(Events(before=before, limit=7))
        assert len(page.records) <= 7
        found += sequences(page)
        before = page.next_before
        if before is None:
            break
    assert found == list(range(30, 0, -1))
    rows, after = [], None
    while True:
        page = ask(OutboxList(after=after, limit=7))
        rows += [(row.sink, row.sequence) for row in page.rows]
        after = page.next_after
        if after is None:
            break
    assert rows == [(sink, number) for sink in "ab" for number in range(1, 31)]


def test_reading_does_not_make_the_agent_replace_its_file(kit, outbox, ask):
    kit.commit(outbox, kit.event())
    for _ in range(3):
        ask(Events())
        StoredOutbox(kit.directory).ask(Events())
        kit.saved(outbox)
    assert outbox.saver.file_changes == 0


def test_parked_records_are_listed_retried_and_discarded(kit, outbox, ask):
    first, second = kit.commit(outbox, kit.event(), kit.event("E-2"))
    kit.settle(outbox, "a", 1, 2, state="parked", error="400")
    [row] = ask(OutboxList(sink="a", states=PARKED, record_id=second.id)).rows
    assert (row.sequence, row.error, row.state, row.record) == (2, "400", DeliveryState.PARKED, second)
    assert ask(OutboxRetry(sink="a", record_id=first.id)).count == 1
    assert ask(OutboxDiscard(sink="a", states=PARKED)).count == 1
    assert kit.totals(outbox)["a"]["pending"] == 1
    assert ask(OutboxRetry()).count == 0


def test_records_move_to_another_sink(kit, outbox, ask):
    kit.commit(outbox, kit.event())
    kit.settle(outbox, "b", 1)
    changed = ask(OutboxMove(old="a", new="b"))
    assert (changed.count, changed.saved) == (0, True)
    assert kit.totals(outbox)["a"]["discarded"] == 1
    with pytest.raises(OutboxError, match="same sink"):
        ask(OutboxMove(old="a", new="a"))


@pytest.mark.parametrize(
    "request_",
    [OutboxRetry(sink="x"), OutboxDiscard(sink="x"), OutboxMove(old="x", new="a"), OutboxMove(old="a", new="x")],
)
def test_unknown_sink_is_refused_with_the_known_sinks(ask, request_):
    with pytest.raises(OutboxError, match=r"Unknown sink 'x'\. Known sinks: a, b\."):
        ask(request_)


def test_import_adds_pending_records_and_holds_once(kit, outbox, ask, tmp_path):
    other_kit = OutboxKit(tmp_path / "other")
    other = other_kit.open()
    other_kit.commit(other, other_kit.event("E-8"), other_kit.event("E-9"))
    for sink in ("a", "b"):
        other_kit.settle(other, sink, 1)
    other.change(keep_decisions, [hold("E-9")], created_at=0.0)
    other_kit.saved(other)
    other_kit.close()
    kit.commit(outbox, kit.event())
    imported = OutboxImport(path=str(tmp_path / "other" / "outbox-1.db"))
    assert [ask(imported).count, ask(imported).count] == [1, 0]
    assert [record.event.event_id for record in ask(Events()).records] == ["E-1", "E-9"]
    assert [each.event_id for each in ask(Status()).decisions] == ["E-9"]


@pytest.mark.parametrize("content", [None, b"", b"no database" * 100])
def test_file_that_is_no_outbox_is_not_imported(ask, tmp_path, content):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(OutboxError, match="file"):
        ask(OutboxImport(path=str(tmp_path / "file")))


def test_decision_is_stored_unless_another_hold_exists(kit, outbox):
    woken = []
    requests = Requests(outbox, on_decision=lambda: woken.append(1))
    ask = through_json(requests)
    kit.commit(outbox, kit.event())
    outbox.change(keep_decisions, [hold()], created_at=0.0)
    decision = cli_decision(
        approver="me", decision_id="d", event=kit.event(), event_digest="digest", valid_seconds=60.0
    )
    [other] = ask(Decide(decision=decision)).other_holds
    assert ask(Decision(source="cli", approver="me", decision_id="d")).decision is None
    assert not woken
    answer = ask(Decide(decision=decision, overruled=(other.arrival,)))
    assert (answer.other_holds, answer.saved, woken) == ((), True, [1])
    assert ask(Decision(source="cli", approver="me", decision_id="d")).decision.state is DecisionStage.NEW


def test_stored_outbox_changes_nothing_and_needs_a_file(kit, outbox, tmp_path):
    kit.saved(outbox)
    with pytest.raises(OutboxReadOnly):
        StoredOutbox(kit.directory).ask(OutboxRetry())
    with pytest.raises(OutboxError, match="contains no outbox"):
        StoredOutbox(tmp_path)
