"""The command of `[approval.remote]` must exit 0 before a portal approval is sent to Azure."""

import threading

import msgspec
import pytest
from approver_kit import ANNE, BORIS
from drain import Drain

from bridge.config.approval import ApprovalSettings, RuleSettings

MINE = {"resources": ("vm_0",)}


@pytest.fixture
def kit(new_kit):
    return new_kit


def begin(kit, drain, *, rules=(), **options):
    kit.trust(("k1", ANNE), ("k2", BORIS))
    remote = msgspec.structs.replace(kit.settings.remote, command=drain and drain.command, **options)
    kit.settings = ApprovalSettings(remote=remote, rules=rules)
    kit.start()
    kit.wait(10)


def see(kit, *events):
    """Store *events* as the poll does, and notify the approver."""
    kit.see(*events)
    kit.record(*events)


def run_command(kit, drain):
    """Approve an event, wait until the command runs, and return the event."""
    begin(kit, drain)
    mine = kit.event(**MINE)
    see(kit, mine)
    kit.offer(kit.token(mine))
    kit.until(lambda: drain.runs)
    return mine


def reasons(kit):
    return [each.approval.reason for each in kit.records if each.approval is not None]


def test_command_runs_before_the_request_for_a_portal_approval(kit, drain):
    begin(kit, drain)
    mine = kit.event(**MINE)
    see(kit, mine)
    kit.offer(kit.token(mine, reason="the night shift knows"))
    kit.until(lambda: drain.runs)
    kit.go(5, mine)
    assert (kit.imds.posts, kit.outcomes) == ([], [])
    drain.end()
    kit.until(lambda: kit.imds.posts)
    kit.go(5, mine)
    kit.restart()
    kit.go(5, mine)
    assert kit.imds.posts == [["E-1"]]
    assert drain.runs == [["E-1", "E-1", ""]]
    assert kit.outcomes == [("approved", "accepted")]
    assert reasons(kit) == ["the night shift knows"]


def test_command_without_a_thread_delays_no_other_approval(kit, drain, monkeypatch):
    def start(thread, *, original=threading.Thread.start):
        if thread.name.startswith("approval:command"):
            raise RuntimeError("can't start new thread")
        original(thread)

    slow = RuleSettings(name="slow", action="approve", event_types=("Freeze",), command=drain.command)
    begin(kit, None, rules=(slow, RuleSettings(name="quick", action="approve")))
    monkeypatch.setattr(threading.Thread, "start", start)
    mine = {"resources": ("vm_0",)}
    events = kit.event("E-1", event_type="Freeze", **mine), kit.event("E-2", event_type="Reboot", **mine)
    see(kit, *events)
    kit.go(5, *events)
    assert kit.imds.posts == [["E-2"]]


def test_failed_command_approves_nothing_until_a_new_decision(kit, drain):
    begin(kit, drain)
    mine = kit.event(**MINE)
    see(kit, mine)
    drain.end(3)
    first = kit.token(mine)
    kit.offer(first)
    kit.until(lambda: kit.outcomes)
    assert kit.outcomes == [("approval_failed", "command_failed")]
    assert reasons(kit) == ["The command of approval.remote failed with exit code 3: 3 pods are left"]
    assert next(each.approval.jws_sha256 for each in kit.records if each.approval is not None)
    kit.restart()
    kit.offer(first)
    kit.go(10, mine)
    assert (kit.imds.posts, len(drain.runs), len(kit.outcomes)) == ([], 1, 1)
    drain.end(0)
    kit.offer(kit.token(mine))
    kit.until(lambda: kit.imds.posts)
    assert len(drain.runs) == 2
    assert kit.outcomes[-1] == ("approved", "accepted")


@pytest.mark.parametrize("is_polite", [False, True], ids=["ends by SIGTERM", "exits 0 on SIGTERM"])
def test_command_is_terminated_at_its_timeout_and_approves_nothing(kit, tmp_path, is_polite):
    """Exit code 0 after SIGTERM does not count, because a drain can exit 0 after an incomplete cleanup."""
    seconds = 2 if is_polite else 0.5  # until it has installed its signal handler
    drain = Drain(tmp_path, is_polite=is_polite)
    begin(kit, drain, command_timeout_seconds=float(seconds))
    mine = kit.event(**MINE)
    see(kit, mine)
    kit.offer(kit.token(mine))
    kit.until(lambda: kit.outcomes)
    assert kit.outcomes == [("approval_failed", "command_failed")]
    assert reasons(kit)[0].startswith(f"The command of approval.remote did not end within {seconds} s")
    assert kit.imds.posts == []


def test_hold_during_the_command_withdraws_the_approval(kit, drain):
    mine = run_command(kit, drain)
    kit.offer(kit.token(mine, "hold", after=1))
    kit.until(lambda: kit.outcomes)
    drain.end()
    kit.go(10, mine)
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "superseded")]


def test_approval_after_the_hold_runs_the_command_again(kit, drain):
    mine = run_command(kit, drain)
    kit.offer(kit.token(mine, "hold", after=1))
    kit.wait(2)
    kit.see(mine)
    kit.offer(kit.token(mine))
    assert len(drain.runs) == 1  # no concurrent runs
    drain.end()
    kit.until(lambda: kit.imds.posts)
    assert len(drain.runs) == 2
    assert kit.outcomes == [("approval_refused", "superseded"), ("approved", "accepted")]


def test_approval_on_the_vm_does_not_wait_for_the_command(kit, drain):
    mine = run_command(kit, drain)
    kit.wait(1)
    kit.approve_here(mine)
    kit.go(3, mine)
    assert kit.imds.posts == [["E-1"]]
    drain.end()
    kit.go(3, mine)
    assert kit.imds.posts == [["E-1"]]
    results = {(each.approval.source, each.approval.result) for each in kit.records if each.approval is not None}
    assert results == {("cli", "accepted"), ("portal", "already_approved")}


def test_portal_command_runs_only_after_the_rule_command_failed(kit, drain, tmp_path):
    rules = Drain(tmp_path, "rule")
    rule = RuleSettings(name="drained", action="approve", command=rules.command)
    begin(kit, drain, rules=(rule,))
    mine = kit.event(**MINE)
    see(kit, mine)
    kit.until(lambda: rules.runs)
    kit.offer(kit.token(mine))
    kit.go(3, mine)
    assert drain.runs == []
    rules.end(1)
    drain.end()
    kit.until(lambda: kit.imds.posts)
    assert rules.runs == [["E-1", "E-1", "drained"]]
    assert drain.runs == [["E-1", "E-1", ""]]
    assert kit.outcomes == [("approval_failed", "command_failed"), ("approved", "accepted")]


def test_approval_does_not_wait_for_a_removed_command(kit, drain):
    mine = run_command(kit, drain)
    kit.settings = ApprovalSettings(remote=msgspec.structs.replace(kit.settings.remote, command=None))
    kit.reload()
    kit.go(3, mine)
    assert kit.imds.posts == [["E-1"]]


def test_disabled_approvals_start_no_command_and_are_reported(kit, drain):
    begin(kit, drain)
    mine = kit.event(**MINE)
    see(kit, mine)
    (kit.state / "approvals.disabled").touch()
    kit.offer(kit.token(mine))
    kit.go(5, mine)
    assert (drain.runs, kit.imds.posts) == ([], [])
    assert ("approval_failed", "disabled") in kit.outcomes
    (kit.state / "approvals.disabled").unlink()
    kit.until(lambda: drain.runs)
    assert kit.imds.posts == []
    drain.end()
    kit.until(lambda: kit.imds.posts)
    assert len(drain.runs) == 1
    assert kit.outcomes[-1] == ("approved", "accepted")
