"""When rules wait for the portal: for a fresh answer (`require_portal_seconds`), and for the first of all."""

import time
from contextlib import contextmanager

import pytest
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
        "imds": {"endpoint": azure.endpoint},
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


def is_approved(azure, *, within_seconds, count=1):
    deadline = time.monotonic() + within_seconds
    while len(azure.world.approvals) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return len(azure.world.approvals) >= count


def test_rule_waits_for_an_answer_of_the_portal_and_acts_after_it(azure, portal, tmp_path):
    portal.down()
    with running(azure, portal, tmp_path / "state", require_portal_seconds=3):
        announce(azure)
        assert not is_approved(azure, within_seconds=4)
        portal.up()
        assert is_approved(azure, within_seconds=20)


def test_rule_waits_again_when_the_portal_has_been_silent_for_too_long(azure, portal, tmp_path):
    with running(azure, portal, tmp_path / "state", require_portal_seconds=2):
        portal.wait_for_requests(2)
        portal.down()
        time.sleep(3)
        announce(azure)
        assert not is_approved(azure, within_seconds=4)


def test_what_a_rule_wanted_while_the_portal_answered_is_not_posted_without_it(azure, portal, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "approvals.disabled").touch()
    with running(azure, portal, state, require_portal_seconds=2):
        portal.wait_for_requests(2)
        announce(azure)
        time.sleep(2.5)  # it is wanted, and waits for the file's removal
        portal.down()
        time.sleep(3)
        (state / "approvals.disabled").unlink()
        assert not is_approved(azure, within_seconds=3)
        portal.up()
        assert is_approved(azure, within_seconds=20)


def test_without_the_setting_a_rule_acts_although_the_portal_is_down(azure, portal, tmp_path):
    with running(azure, portal, tmp_path / "state"):
        first = announce(azure)
        assert is_approved(azure, within_seconds=20)  # so the portal's decisions are taken, and that is written down
    portal.down()
    with running(azure, portal, tmp_path / "state"):
        second = announce(azure)
        assert is_approved(azure, within_seconds=20, count=2)
    assert [approval.event_id for approval in azure.world.approvals] == [first, second]


def test_rule_waits_on_a_new_database_until_the_portal_has_given_its_decisions(azure, portal, tmp_path):
    portal.down()
    with running(azure, portal, tmp_path / "state"):
        announce(azure)
        assert not is_approved(azure, within_seconds=4)
        portal.up()
        assert is_approved(azure, within_seconds=20)


def test_a_hold_that_the_portal_still_has_binds_the_rule_after_the_database_was_lost(azure, portal, tmp_path):
    with running(azure, portal, tmp_path / "lost"):
        assert portal.wait_for_requests(1)
    event = ScheduledEvent(event_id=announce(azure), event_status="Scheduled")
    portal.decide(event, vm_id=portal.requests[0].vm_id, decision="hold")
    with running(azure, portal, tmp_path / "new"):
        assert not is_approved(azure, within_seconds=4)
