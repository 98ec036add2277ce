"""Approvals by rules: the acting VM, delays, commands, and holds."""

import pytest

from bridge.config.approval import ApprovalSettings, RuleSettings

FREEZE = RuleSettings(name="freeze", event_types=("Freeze",), action="approve")


@pytest.fixture
def kit(new_kit):
    return new_kit


def begin(kit, *rules, **options):
    kit.rules(*rules, **options)
    kit.start()
    kit.wait(1)


def test_a_rule_approves_once(kit):
    begin(kit, FREEZE)
    kit.go(60, kit.event(), kit.event("E-2", event_type="Reboot"))
    assert kit.imds.posts == [["E-1"]]
    kit.restart()
    kit.go(60, kit.event())
    assert kit.imds.posts == [["E-1"]]
    (approved,) = (each for each in kit.records if each.approval is not None)
    assert approved.approval.source == "rule:freeze"
    assert approved.approval.decision_id is None


def test_rule_approves_the_event_again_after_it_changes(kit):
    begin(kit, FREEZE)
    kit.go(2, kit.event())
    kit.go(2, kit.event(not_before_raw="another time"))
    assert kit.imds.posts == [["E-1"], ["E-1"]]
    assert len({each.id for each in kit.records}) == 2


def test_first_matching_rule_applies(kit):
    begin(kit, RuleSettings(name="not-now", action="hold"), FREEZE)
    kit.go(10, kit.event())
    assert kit.imds.posts == []


def test_second_vm_approves_after_a_wait_for_the_first(kit):
    begin(kit, FREEZE, leader_fallback_seconds=30)
    kit.go(29, kit.event(resources=("vm_9", "vm_0")))
    assert kit.imds.posts == []
    kit.go(3, kit.event(resources=("vm_9", "vm_0")))
    assert kit.imds.posts == [["E-1"]]


def test_rule_approves_nothing_while_the_vm_name_is_unknown(kit):
    kit.vm = kit.vm.__class__()
    begin(kit, FREEZE)
    kit.go(60, kit.event())
    assert kit.imds.posts == []


def test_approval_of_a_rule_is_withdrawn_when_the_rule_is_removed(kit):
    begin(kit, FREEZE)
    (kit.state / "approvals.disabled").touch()
    kit.go(3, kit.event())
    (kit.state / "approvals.disabled").unlink()
    kit.settings = ApprovalSettings()
    kit.restart()
    kit.go(10, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes[-1] == ("approval_refused", "superseded")


def drained(drain, **options):
    """Return a rule with the command *drain*."""
    return RuleSettings(name="drained", action="approve", command=drain.command, **options)


def test_command_runs_once_before_the_approval_and_receives_the_record(kit, drain):
    drain.end()
    begin(kit, drained(drain))
    mine = kit.event(resources=("vm_0",))
    kit.record(mine)
    kit.see(mine)
    kit.until(lambda: kit.imds.posts)
    kit.restart()
    kit.go(10, mine)
    assert kit.imds.posts == [["E-1"]]
    assert drain.runs == [["E-1", "E-1", "drained"]]


def test_failed_command_approves_nothing_and_does_not_run_again(kit, drain):
    drain.end(3)
    begin(kit, drained(drain))
    mine = kit.event(resources=("vm_0",))
    kit.record(mine)
    kit.see(mine)
    kit.until(lambda: ("approval_failed", "command_failed") in kit.outcomes)
    kit.restart()
    kit.go(10, mine)
    assert kit.imds.posts == []
    assert len(drain.runs) == 1
    assert "exit code 3: 3 pods are left" in kit.records[-1].approval.reason


def test_command_interrupted_by_an_agent_crash_runs_again(kit, drain):
    begin(kit, drained(drain))
    mine = kit.event(resources=("vm_0",))
    kit.record(mine)
    kit.see(mine)
    kit.until(lambda: drain.runs)
    kit.restart()
    drain.end()
    kit.see(mine)
    kit.until(lambda: kit.imds.posts)
    assert len(drain.runs) == 2


def test_a_running_command_delays_no_other_approval(kit, drain):
    begin(kit, drained(drain, event_types=("Reboot",)), FREEZE)
    mine = kit.event("E-2", event_type="Reboot", resources=("vm_0",))
    kit.record(mine)
    kit.see(mine, kit.event())
    kit.turn()
    assert kit.imds.posts == [["E-1"]]


def test_rule_with_a_command_approves_only_for_this_vm(kit, drain):
    begin(kit, drained(drain))
    both = kit.event(resources=("vm_0", "vm_1"))
    kit.record(both)
    kit.go(60, both)
    assert kit.imds.posts == []
    assert drain.runs == []
