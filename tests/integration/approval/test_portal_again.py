"""What a portal has already given is asked for again when this VM may have lost it, or refused it wrongly.

The portal and the threads are real; the VM's clock is on a dial.
"""

import contextlib
import time

import pytest
from approver_kit import ANNE, BORIS, VM_ID, ApproverKit
from portal_stub import PortalStub

from bridge.config.approval import ApprovalSettings, KeySettings, RemoteSettings
from bridge.outbox import approvals

DAY_SECONDS = 86_400.0
PATIENCE_SECONDS = 60.0


@pytest.fixture
def portal(tmp_path):
    with PortalStub(tmp_path / "portal", tls=False) as stub:
        yield stub


@pytest.fixture
def start(tmp_path, portal):
    """Return what starts a VM whose agent asks the portal."""
    kit = ApproverKit(tmp_path)

    def started(*, required=1, ahead_seconds=0.0):
        kit.wall_jump_seconds = ahead_seconds
        keys = tuple(
            KeySettings(kid=kid, approver=approver, public_key_file=f"{kit.key(kid)}.pub")
            for kid, approver in (("k1", ANNE), ("k2", BORIS))
        )
        remote = RemoteSettings(url=portal.url, keys=keys, required_approvals=required, wait_seconds=1)
        kit.settings = ApprovalSettings(remote=remote)
        kit.start()
        kit.wait(10)
        kit.service.start()
        stack.callback(kit.service.stop)
        return kit

    with contextlib.ExitStack() as stack:
        stack.callback(kit.close)
        yield started


def until(kit, condition, *events):
    """Have the metadata service answer with *events*, again and again, until *condition* is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, kit.outcomes
        kit.wait(0.05)
        kit.see(*events)
        time.sleep(0.05)


@pytest.mark.parametrize("ahead_seconds", [DAY_SECONDS, -DAY_SECONDS], ids=["ahead", "behind"])
def test_a_decision_that_a_wrong_clock_refused_at_the_first_start_is_followed_once_it_is_right(
    start, portal, ahead_seconds
):
    kit = start(ahead_seconds=ahead_seconds)
    portal.put(VM_ID, kit.token(kit.event(), after=1 - ahead_seconds))
    until(kit, lambda: kit.outcomes, kit.event())
    assert kit.imds.posts == []
    kit.wall_jump_seconds = 0.0
    until(kit, lambda: kit.imds.posts, kit.event())
    until(kit, lambda: kit.outcomes[-1:] == [("approved", "accepted")], kit.event())


def test_one_of_two_approvals_outlives_a_database_that_is_deleted_under_the_running_agent(start, portal):
    kit = start(required=2)
    portal.put(VM_ID, kit.token(kit.event()))
    until(kit, lambda: waiting(kit) == 1, kit.event())
    (kit.state / "outbox.db").unlink()
    kit.outbox.tend().result()
    portal.put(VM_ID, kit.token(kit.event(), kid="k2", approver=BORIS))
    until(kit, lambda: kit.imds.posts, kit.event())


def test_an_approval_that_is_lost_with_a_damaged_database_is_asked_for_again_and_its_refusal_recorded(start, portal):
    kit = start(required=2)
    portal.put(VM_ID, kit.token(kit.event()))
    until(kit, lambda: waiting(kit) == 1, kit.event())
    database = kit.state / "outbox.db"
    database.write_bytes(b"\xa5" * database.stat().st_size)
    kit.outbox.tend().result()
    until(kit, lambda: waiting(kit) == 1 or kit.outcomes, kit.event())
    assert kit.outcomes in ([], [("approval_refused", "issued_before_this_outbox")])
    kit.wait(1)
    portal.put(VM_ID, kit.token(kit.event()), kit.token(kit.event(), kid="k2", approver=BORIS))
    until(kit, lambda: kit.imds.posts, kit.event())


def test_no_approval_is_lost_among_a_thousand_that_come_with_a_thousand_holds_on_other_events(start, portal):
    kit = start()
    approved = [kit.event(f"A-{number}") for number in range(1_000)]
    held = [kit.event(f"H-{number}") for number in range(1_000)]
    before = [kit.event(event.event_id, not_before_raw="an earlier time") for event in approved]
    kit.see(*before, *held)
    tokens = [kit.token(event, "hold", kid="k2", approver=BORIS) for event in held]
    tokens += [kit.token(event) for event in approved]
    kit.wait(0.5)  # the newest answer of the metadata service is older than the decisions
    portal.put(VM_ID, *tokens)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(kit.outbox.read(approvals.open_decisions).result()) < len(tokens):
        assert time.monotonic() < deadline, kit.outcomes
        time.sleep(0.05)
    until(kit, lambda: len(kit.outcomes) == len(approved), *approved, *held)
    assert sorted(event_id for post in kit.imds.posts for event_id in post) == sorted(
        each.event_id for each in approved
    )
    assert set(kit.outcomes) == {("approved", "accepted")}


def waiting(kit):
    decisions = kit.outbox.read(approvals.open_decisions).result()
    return sum(each.state.value == "waiting" for each in decisions)
