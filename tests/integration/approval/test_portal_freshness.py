"""When rules wait for the portal: for a fresh answer (`require_portal_seconds`), and for the first of all."""

import time
from contextlib import contextmanager

import pytest
from bridge.outbox.reader import OutboxFile
from portal_stub import PortalStub

from bridge.agent.agent import Agent
from bridge.config import loader
from bridge.events.event import ScheduledEvent
from bridge.testing import EventSpec, Simulator

FREEZE = {"name": "freeze", "event_types": ["Freeze"], "action": "approve", "act": "each"}


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def portal(tmp_path):
    with PortalStub(tmp_path / "portal", tls=False) as stub:
        yield stub


@contextmanager
def running(azure, portal, directory, **approval):
    remote = {"url": portal.url, "keys": portal.key_tables(), "wait_seconds": 1}
    tables = {
        "imds": {"endpoint": azure.endpoint, "poll_interval_seconds": 0.2},
        "status": {"listen": ""},
        "approval": {"rules": [FREEZE], "remote": remote, **approval},
        "sinks": [{"type": "bridge.testing.sinks:MemorySink", "name": "memory", "box": str(directory)}],
    }
    agent = Agent(loader.read(tables), directory)
    agent.start()
    try:
        yield agent
    finally:
        agent.stop()


def announce(azure):
    return azure.world.add_event(EventSpec(event_type="Freeze", on_approval="never", notice_seconds=36_000))


def is_approved(azure, *, count=1):
    """Return whether so many were approved within 20 seconds."""
    return wait_until(lambda: len(azure.world.approvals) >= count)


def is_left_alone(azure):
    """Return whether nothing more was approved by when the agent had seen five more documents."""
    approved = len(azure.world.approvals)
    polls = polls_of(azure) + 5
    assert wait_until(lambda: polls_of(azure) >= polls)
    return len(azure.world.approvals) == approved


def polls_of(azure):
    return sum("scheduledevents" in each.path and each.status == 200 for each in azure.requests)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_rule_waits_for_an_answer_of_the_portal_and_acts_after_it(azure, portal, tmp_path):
    portal.down()
    with running(azure, portal, tmp_path / "state", require_portal_seconds=1.5):
        announce(azure)
        assert is_left_alone(azure)
        portal.up()
        assert is_approved(azure)


def test_rule_waits_again_when_the_portal_has_been_silent_for_too_long(azure, portal, tmp_path):
    with running(azure, portal, tmp_path / "state", require_portal_seconds=1.5):
        portal.wait_for_requests(2)
        portal.down()
        time.sleep(1.7)
        announce(azure)
        assert is_left_alone(azure)


def test_what_a_rule_wanted_while_the_portal_answered_is_not_posted_without_it(azure, portal, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "approvals.disabled").touch()
    with running(azure, portal, state, require_portal_seconds=1.5):
        announce(azure)
        with OutboxFile(state) as beside:
            assert wait_until(lambda: any(each.transition == "approval_failed" for each in beside.records()))
        portal.down()
        time.sleep(1.7)
        (state / "approvals.disabled").unlink()
        assert is_left_alone(azure)
        portal.up()
        assert is_approved(azure)


def test_without_the_setting_a_rule_acts_although_the_portal_is_down(azure, portal, tmp_path):
    with running(azure, portal, tmp_path / "state"):
        first = announce(azure)
        assert is_approved(azure)  # so the portal's decisions are taken, and that is written down
    portal.down()
    with running(azure, portal, tmp_path / "state"):
        second = announce(azure)
        assert is_approved(azure, count=2)
    assert [approval.event_id for approval in azure.world.approvals] == [first, second]


def test_rule_waits_on_a_new_database_until_the_portal_has_given_its_decisions(azure, portal, tmp_path):
    portal.down()
    with running(azure, portal, tmp_path / "state"):
        announce(azure)
        assert is_left_alone(azure)
        portal.up()
        assert is_approved(azure)


def test_a_hold_that_the_portal_still_has_binds_the_rule_after_the_database_was_lost(azure, portal, tmp_path):
    with running(azure, portal, tmp_path / "lost"):
        assert portal.wait_for_requests(1)
    event = ScheduledEvent(event_id=announce(azure), event_status="Scheduled")
    portal.decide(event, vm_id=portal.requests[0].vm_id, decision="hold")
    with running(azure, portal, tmp_path / "new"):
        assert portal.wait_for_requests(len(portal.requests) + 2)
        assert is_left_alone(azure)
