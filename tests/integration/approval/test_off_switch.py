"""The file `approvals.disabled`: both its coming and its going are recorded, and what it kept back too long is gone."""

import os
from datetime import timedelta

import pytest

from bridge.config.approval import ApprovalSettings, RuleSettings
from bridge.errors import ImdsStatus

ANNE, BORIS = "anne", "boris"
NOT_BEFORE_SECONDS = 7200
try:
    import pwd

    ME = pwd.getpwuid(os.getuid()).pw_name
except (ImportError, KeyError):
    ME = f"uid {os.getuid()}"


@pytest.fixture
def switch(kit):
    return kit.state / "approvals.disabled"


def told(kit):
    return [each for each in kit.records if each.approval is not None and each.approval.source == "approvals.disabled"]


def test_file_that_is_made_and_removed_is_recorded_with_its_owner(kit, switch):
    kit.turn()
    assert told(kit) == []
    switch.touch()
    kit.go(3)
    switch.unlink()
    kit.go(3)
    made, removed = told(kit)
    assert [each.approval.result for each in (made, removed)] == ["disabled", "enabled"]
    assert made.approval.approvers == removed.approval.approvers == (ME,)
    assert made.event is None
    assert "approvals.disabled" in made.approval.reason
    assert ME in made.approval.reason


def test_file_that_is_there_at_the_start_is_recorded_once_and_its_removal_meanwhile_too(kit, switch):
    switch.touch()
    for _ in range(3):
        kit.restart()
        kit.turn()
    assert [each.approval.result for each in told(kit)] == ["disabled"]
    kit.close()
    switch.unlink()
    kit.start()
    kit.turn()
    kit.turn()
    assert [each.approval.result for each in told(kit)] == ["disabled", "enabled"]


def test_file_that_names_nobody_known_is_recorded_by_number(kit, switch):
    if os.getuid() != 0:
        pytest.skip("only root may give a file away")
    switch.touch()
    os.chown(switch, 54321, -1)
    kit.turn()
    assert told(kit)[0].approval.approvers == ("uid 54321",)


@pytest.mark.parametrize("by", ["portal", "rule"])
def test_what_the_file_kept_back_until_not_before_is_not_posted_when_it_goes(kit, switch, by):
    if by == "rule":
        rule = RuleSettings(name="freeze", event_types=("Freeze",), action="approve")
        kit.settings = ApprovalSettings(rules=(rule,))
        kit.reload()
    switch.touch()
    kit.see(kit.event())
    if by == "portal":
        kit.offer(kit.token(kit.event(), valid_seconds=4 * 3600))
    kit.go(2, kit.event())
    kit.restart()
    kit.wait(NOT_BEFORE_SECONDS)
    kit.go(2, kit.event())
    switch.unlink()
    kit.go(10, kit.event())
    assert kit.imds.posts == []
    ended = [each for each in kit.records if each.approval is not None][-2].approval
    assert ended.result == "expired"
    assert "approvals.disabled" in ended.reason


@pytest.mark.parametrize("restarted", [False, True])
def test_what_the_file_kept_back_longer_than_its_event_was_there_is_not_posted_when_both_come_back(
    kit, switch, restarted
):
    switch.touch()
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(2, kit.event())
    if restarted:
        kit.restart()
    kit.go(3)
    switch.unlink()
    kit.go(5, kit.event())
    assert kit.imds.posts == []


def test_what_the_file_kept_back_for_a_moment_has_its_whole_time_afterwards(kit, switch):
    switch.touch()
    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), valid_seconds=4 * 3600))
    switch.unlink()
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]


def test_approval_that_the_file_kept_back_goes_on_after_not_before_when_the_file_was_removed_in_time(kit, switch):
    event = kit.event(not_before=kit.now() + timedelta(seconds=60))
    switch.touch()
    kit.see(event)
    kit.offer(kit.token(event))
    kit.go(2, event)
    switch.unlink()
    kit.imds.get_answer = ImdsStatus("Unavailable", status=503)
    kit.go(70, event)
    assert kit.imds.posts == []
    kit.imds.get_answer = None
    kit.go(5, event)
    assert kit.imds.posts == [["E-1"]]
    assert kit.records[-1].approval.result == "accepted"
