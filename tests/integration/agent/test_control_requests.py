"""Responses to commands, from the outbox of a running agent and from the stored outbox without an agent."""

import pytest
from outbox_kit import stored_decision

from bridge.agent.control_requests import Source, decide, find_decision, read_events, retry_records
from bridge.agent.control_socket import ControlClient, ControlServer
from bridge.cli.approve import cli_decision
from bridge.errors import OutboxError
from bridge.outbox.approvals import keep_decisions
from bridge.outbox.lock import DirectoryLock
from bridge.outbox.rows import DecisionStage


@pytest.fixture
def outbox(kit):
    return kit.open()


@pytest.fixture
def woken():
    return []


@pytest.fixture
def ask(kit, outbox, woken):
    """Return a function that sends requests over the control socket."""
    lock = DirectoryLock(kit.directory)
    source = Source(kit.directory, outbox, on_decision=lambda: woken.append(1))
    server = ControlServer(kit.directory, source.answer)
    server.open()
    yield ControlClient(kit.directory).ask
    server.close()
    lock.release()


def test_reading_does_not_make_the_agent_replace_its_file(kit, outbox, ask):
    kit.commit(outbox, kit.event())
    for _ in range(3):
        ask(read_events)
        read_events(Source(kit.directory))
        kit.saved(outbox)
    assert outbox.saver.file_changes == 0


def test_decision_is_stored_unless_another_hold_exists(kit, outbox, ask, woken):
    kit.commit(outbox, kit.event())
    outbox.change(keep_decisions, [stored_decision("jti", state=DecisionStage.ON_HOLD)])
    decision = cli_decision(approver="me", decision_id="d", event=kit.event())
    [other] = ask(decide, decision=decision)
    assert ask(find_decision, approver="me", decision_id="d") is None
    assert not woken
    assert ask(decide, decision=decision, overruled=(other.arrival,)) == ()
    assert woken == [1]
    assert ask(find_decision, approver="me", decision_id="d").state is DecisionStage.NEW


def test_stored_outbox_changes_nothing_and_needs_a_file(kit, outbox, tmp_path):
    kit.saved(outbox)
    with pytest.raises(OutboxError, match="needs a running agent"):
        retry_records(Source(kit.directory))
    with pytest.raises(OutboxError, match="contains no outbox"):
        Source(tmp_path)
