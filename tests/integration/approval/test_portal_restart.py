"""The poller restarts from index 0 after each start, and after this VM might have refused a valid decision.

The portal and the threads are real. The test moves the clock of the VM.
"""

import json
import time

import msgspec
import pytest
from approver_kit import ANNE, BORIS, VM_ID

from bridge.approval.portal_client import AGENT_HEADER
from bridge.config.approval import ApprovalSettings, RuleSettings

FREEZE = RuleSettings(name="freeze", action="approve", event_types=("Freeze",), act="each")
DAY_SECONDS = 86_400.0
PATIENCE_SECONDS = 60.0


@pytest.fixture
def start(new_kit, portal):
    """Return a function that starts a VM whose agent asks the portal."""

    def started(*rules, required=1, ahead_seconds=0.0, **options):
        new_kit.wall_jump_seconds = ahead_seconds
        new_kit.trust(("k1", ANNE), ("k2", BORIS), required=required)
        remote = msgspec.structs.replace(new_kit.settings.remote, url=portal.url, wait_seconds=1)
        new_kit.settings = ApprovalSettings(remote=remote, rules=rules, **options)
        new_kit.start(hears_portal=False)
        new_kit.wait(10)
        new_kit.service.start()
        return new_kit

    yield started
    new_kit.service.stop()


def until(kit, condition, *events):
    """Poll the metadata service with *events* until *condition* is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, kit.outcomes
        kit.wait(0.05)
        kit.see(*events)
        time.sleep(0.05)


def waits(kit, *events):
    """Return whether no event is approved within two seconds."""
    posts, ends_at = len(kit.imds.posts), time.monotonic() + 2.0
    until(kit, lambda: time.monotonic() > ends_at, *events)
    return len(kit.imds.posts) == posts


def test_approvals_wait_after_a_start_until_the_portal_responds(start, portal):
    portal.down()
    kit = start(FREEZE)
    freeze, other = kit.event(), kit.event("E-2")
    portal.put(VM_ID, kit.token(freeze, "hold"))
    assert waits(kit, freeze, other)
    portal.up()
    until(kit, lambda: kit.imds.posts, freeze, other)
    assert waits(kit, freeze, other)
    assert kit.imds.posts == [["E-2"]]
    assert kit.held == {"E-1"}


@pytest.mark.parametrize("ahead_seconds", [DAY_SECONDS, -DAY_SECONDS], ids=["ahead", "behind"])
def test_decision_refused_due_to_a_wrong_clock_is_executed_later(start, portal, ahead_seconds):
    kit = start(ahead_seconds=ahead_seconds)
    portal.put(VM_ID, kit.token(kit.event(), after=5 - ahead_seconds))
    until(kit, lambda: kit.outcomes, kit.event())
    assert kit.imds.posts == []
    kit.wall_jump_seconds = 0.0
    until(kit, lambda: kit.imds.posts, kit.event())
    until(kit, lambda: kit.outcomes[-1:] == [("approved", "accepted")], kit.event())


def test_each_request_describes_the_agent(start, portal):
    kit = start(required=2, dry_run=True)
    (kit.directory / "k2.key.pub").unlink()
    (kit.state / "approvals.disabled").touch()
    assert portal.wait_for_requests(len(portal.requests) + 2)
    about = json.loads(portal.requests[-1].asked.headers[AGENT_HEADER.lower()])
    version = about.pop("version")
    assert version
    assert about == {
        "required_approvals": 2,
        "dry_run": True,
        "disabled": True,
        "command": False,
        "command_covers_all": False,
        "kids": ["k1"],
    }


def awaits_portal(kit):
    return kit.outbox.portal_read_in != kit.outbox.stream_id


def test_decisions_are_requested_again_after_another_machines_state(start, portal):
    kit = start()
    until(kit, lambda: not awaits_portal(kit))
    portal.put(VM_ID, kit.token(kit.event(), "hold"))
    until(kit, lambda: kit.held == {"E-1"}, kit.event())
    kit.outbox.identify(kit.vm.__class__(name="vm_0", vm_id="another"))
    assert awaits_portal(kit)
    kit.outbox.identify(kit.vm)
    until(kit, lambda: kit.held == {"E-1"} and not awaits_portal(kit), kit.event())
