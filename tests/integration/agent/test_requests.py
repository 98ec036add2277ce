"""The answers to commands: from a running agent's outbox, and from the stored outbox without an agent."""

import pytest
from outbox_kit import OutboxKit

from bridge.agent import requests
from bridge.agent.control import ControlClient, ControlServer, RequestRefused
from bridge.agent.requests import (
    RecordFilter,
    Source,
    decide,
    discard_records,
    find_decision,
    import_records,
    move_records,
    read_events,
    read_status,
    read_undelivered,
    retry_records,
)
from bridge.cli.approve import cli_decision
from bridge.errors import OutboxError
from bridge.events.record import Verdict
from bridge.outbox.approvals import keep_decisions
from bridge.outbox.lock import DirectoryLock
from bridge.outbox.rows import DecisionStage, DeliveryState, StoredDecision

PARKED = frozenset({DeliveryState.PARKED})


@pytest.fixture
def kit(tmp_path):
    kit = OutboxKit(tmp_path / "state")
    yield kit
    kit.close()


@pytest.fixture
def outbox(kit):
    return kit.open()


@pytest.fixture
def woken():
    return []


@pytest.fixture
def ask(kit, outbox, woken):
    """Return a function that asks over the control socket."""
    lock = DirectoryLock(kit.directory)
    source = Source(kit.directory, outbox, on_decision=lambda: woken.append(1))
    server = ControlServer(kit.directory, source.answer)
    server.open()
    yield ControlClient(kit.directory).ask
    server.close()
    lock.release()


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
    answer = ask(read_status)
    assert answer.stream_id == outbox.stream_id
    assert [event.event_id for event in answer.document.events] == ["E-1"]
    assert answer.last_transitions == {"E-1": record}
    assert (answer.totals.sinks["a"].pending, answer.older_files, answer.readiness) == (1, (), None)


@pytest.mark.parametrize("is_stored", [False, True])
def test_events_are_listed_newest_first_with_history(kit, outbox, ask, is_stored):
    kit.commit(outbox, kit.event(), kit.event("E-2"))
    kit.commit(outbox, kit.event(status="Completed"), transition="completed")
    for sink in ("a", "b"):
        kit.settle(outbox, sink, 1, 2, 3)
    kit.saved(outbox)
    if is_stored:
        stored = Source(kit.directory)

        def ask(request, **arguments):
            return request(stored, **arguments)

    assert sequences(ask(read_events)) == [3, 2, 1]
    assert sequences(ask(read_events, wanted=RecordFilter(event_id="e-1"))) == [3, 1]
    assert sequences(ask(read_events, after=1, before=3)) == [2]
    assert sequences(ask(read_events, wanted=RecordFilter(event_types=("Freeze",)))) == []
    assert sequences(ask(read_events, wanted=RecordFilter(since=kit.time.timestamp() + 1))) == []


def test_pages_have_every_record_once(kit, outbox, ask, monkeypatch):
    kit.fill(outbox, 30)
    monkeypatch.setattr(requests, "PAGE_BYTES", 5_000)
    found, before = [], requests.LAST
    while True:
        page = ask(read_events, before=before, limit=7)
        assert len(page.records) <= 7
        found += sequences(page)
        before = page.next_before
        if before is None:
            break
    assert found == list(range(30, 0, -1))
    rows, after = [], None
    while True:
        page = ask(read_undelivered, after=after, limit=7)
        rows += [(row.sink, row.sequence) for row in page.rows]
        after = page.next_after
        if after is None:
            break
    assert rows == [(sink, number) for sink in "ab" for number in range(1, 31)]


def test_reading_does_not_make_the_agent_replace_its_file(kit, outbox, ask):
    kit.commit(outbox, kit.event())
    for _ in range(3):
        ask(read_events)
        read_events(Source(kit.directory))
        kit.saved(outbox)
    assert outbox.saver.file_changes == 0


def test_parked_records_are_listed_retried_and_discarded(kit, outbox, ask):
    first, second = kit.commit(outbox, kit.event(), kit.event("E-2"))
    kit.settle(outbox, "a", 1, 2, state="parked", error="400")
    [row] = ask(read_undelivered, sink="a", states=PARKED, record_id=second.id).rows
    assert (row.sequence, row.error, row.state, row.record) == (2, "400", DeliveryState.PARKED, second)
    assert ask(retry_records, sink="a", record_id=first.id) == 1
    assert ask(discard_records, sink="a", states=PARKED) == 1
    assert kit.totals(outbox)["a"]["pending"] == 1
    assert ask(retry_records) == 0


def test_records_move_to_another_sink(kit, outbox, ask):
    kit.commit(outbox, kit.event())
    kit.settle(outbox, "b", 1)
    assert ask(move_records, old="a", new="b") == 0
    assert kit.totals(outbox)["a"]["discarded"] == 1
    with pytest.raises(RequestRefused, match="same sink"):
        ask(move_records, old="a", new="a")


@pytest.mark.parametrize(
    ("request_", "arguments"),
    [
        (retry_records, {"sink": "x"}),
        (discard_records, {"sink": "x"}),
        (move_records, {"old": "x", "new": "a"}),
        (move_records, {"old": "a", "new": "x"}),
    ],
)
def test_unknown_sink_is_refused_with_the_known_sinks(ask, request_, arguments):
    with pytest.raises(RequestRefused, match=r"Unknown sink 'x'\. Known sinks: a, b\."):
        ask(request_, **arguments)


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
    path = str(tmp_path / "other" / "outbox-1.db")
    assert [ask(import_records, path=path), ask(import_records, path=path)] == [1, 0]
    assert [record.event.event_id for record in ask(read_events).records] == ["E-1", "E-9"]
    assert [each.event_id for each in ask(read_status).decisions] == ["E-9"]


@pytest.mark.parametrize("content", [None, b"", b"no database" * 100])
def test_file_that_is_no_outbox_is_not_imported(ask, tmp_path, content):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(RequestRefused, match="file"):
        ask(import_records, path=str(tmp_path / "file"))


def test_decision_is_stored_unless_another_hold_exists(kit, outbox, ask, woken):
    kit.commit(outbox, kit.event())
    outbox.change(keep_decisions, [hold()], created_at=0.0)
    decision = cli_decision(
        approver="me", decision_id="d", event=kit.event(), event_digest="digest", valid_seconds=60.0
    )
    [other] = ask(decide, decision=decision)
    assert ask(find_decision, approver="me", decision_id="d") is None
    assert not woken
    assert ask(decide, decision=decision, overruled=(other.arrival,)) == ()
    assert woken == [1]
    assert ask(find_decision, approver="me", decision_id="d").state is DecisionStage.NEW


def test_stored_outbox_changes_nothing_and_needs_a_file(kit, outbox, tmp_path):
    kit.saved(outbox)
    with pytest.raises(OutboxError, match="opened outbox"):
        retry_records(Source(kit.directory))
    with pytest.raises(OutboxError, match="contains no outbox"):
        Source(tmp_path)
