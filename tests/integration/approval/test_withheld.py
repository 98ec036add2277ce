"""Approvals wait until the outbox is saved, belongs to this machine, and has all holds of the portal."""

import sqlite3
from contextlib import closing

import msgspec
import pytest
from approver_kit import ANNE, BORIS

from bridge.config.approval import ApprovalSettings, RuleSettings
from bridge.errors import ImdsStatus
from bridge.outbox import approvals

FREEZE = RuleSettings(name="freeze", action="approve", event_types=("Freeze",), act="each")


# The portal.


def by_rule(kit):
    kit.settings = msgspec.structs.replace(kit.settings, rules=(FREEZE,))


def by_portal(kit):
    kit.offer(kit.token(kit.event()))


def by_person(kit):
    kit.approve_here(kit.event())


@pytest.mark.parametrize("by", [by_rule, by_portal, by_person], ids=lambda by: by.__name__)
def test_approvals_wait_after_a_start_for_all_decisions_of_the_portal(kit, by):
    if by is by_rule:
        by(kit)
    kit.close()
    kit.start(hears_portal=False)
    kit.see(kit.event())
    if by is not by_rule:
        by(kit)
    kit.go(60, kit.event())
    assert (kit.imds.posts, kit.outcomes) == ([], [])
    kit.hear_portal()
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]


def test_accepted_approval_waits_for_the_portal_after_a_restart(kit):
    kit.imds.answer = ImdsStatus("Server error", status=500)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    hold = kit.token(kit.event(), "hold", kid="k2", approver=BORIS, after=1)
    kit.close()
    kit.imds.answer = None
    kit.imds.posts.clear()
    kit.start(hears_portal=False)
    kit.go(30, kit.event())
    kit.offer(hold)
    kit.hear_portal()
    kit.go(30, kit.event())
    assert kit.imds.posts == []


def test_a_reload_with_another_portal_waits_for_that_portal(kit):
    remote = msgspec.structs.replace(kit.settings.remote, url="https://another.invalid")
    kit.settings = ApprovalSettings(remote=remote, rules=(FREEZE,))
    kit.approver.stop()
    kit.configure()
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    kit.hear_portal()
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]


# The disk.


def test_approvals_wait_while_the_outbox_is_behind(kit):
    kit.see(kit.event(), kit.event("E-2"))
    kit.approver.receive([kit.token(kit.event())])
    kit.fill_disk()
    kit.approver.receive([kit.token(kit.event("E-2"))])
    kit.go(30, kit.event(), kit.event("E-2"))
    assert kit.imds.posts == []
    kit.free_disk()
    kit.go(2, kit.event(), kit.event("E-2"))
    assert sorted(event_id for post in kit.imds.posts for event_id in post) == ["E-1", "E-2"]


def test_request_is_not_sent_if_the_attempt_cannot_be_saved(kit):
    kit.see(kit.event())
    kit.approver.receive([kit.token(kit.event())])
    kit.break_disk()
    kit.turn()  # the outbox is not behind yet, and the save before the request fails
    assert kit.imds.requests == []
    assert [each.attempts for each in kit.approvals] == [0]
    kit.free_disk()
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]


def test_disk_failure_during_the_final_get_prevents_the_request(kit):
    kit.see(kit.event())
    kit.imds.on_get = kit.fill_disk
    kit.offer(kit.token(kit.event()))
    assert kit.imds.requests == ["GET"]
    kit.imds.on_get = None
    kit.free_disk()
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]


def test_approval_is_saved_before_the_request(kit):
    def read_file():
        (path,) = kit.state.glob("outbox-*.db")
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            saved.extend(connection.execute("SELECT event_id, state, rest FROM approvals"))

    saved = []
    kit.imds.on_post = read_file
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    ((event_id, stage, rest),) = saved
    assert (event_id, stage) == ("E-1", "wanted")
    assert msgspec.json.decode(rest)["attempts"] == 1


def test_hold_not_yet_saved_prevents_the_request(kit):
    def hold_meanwhile():
        kit.imds.on_get = None
        kit.fill_disk()
        kit.approver.receive([kit.token(kit.event(), "hold")])
        kit.free_disk()

    kit.see(kit.event())
    kit.imds.on_get = hold_meanwhile
    kit.offer(kit.token(kit.event()))
    kit.go(3, kit.event())
    assert kit.held == {"E-1"}
    assert kit.imds.posts == []


# The file.


def test_lost_outbox_refuses_old_approvals_and_accepts_old_holds(kit):
    by_rule(kit)
    approve, hold = kit.token(kit.event("E-2", event_type="Reboot")), kit.token(kit.event(), "hold")
    kit.close()
    kit.delete_files()
    kit.wait(1)
    created_at = kit.now().isoformat()
    kit.start(hears_portal=False)
    kit.go(5, kit.event(), kit.event("E-2", event_type="Reboot"))
    kit.offer(approve, hold)
    kit.hear_portal()
    kit.go(5, kit.event(), kit.event("E-2", event_type="Reboot"))
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "issued_before_this_outbox")]
    assert f"created at {created_at}" in kit.records[-1].approval.reason


def test_first_start_with_a_fast_clock_refuses_no_later_decision(new_kit):
    kit = new_kit
    kit.trust(("k1", ANNE))
    kit.wall_jump_seconds = 86_400.0
    kit.start()
    kit.wait(10)
    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), after=-86_400))
    assert kit.outcomes == [("approval_refused", "issued_before_this_outbox")]
    kit.wall_jump_seconds = 0.0
    kit.go(5, kit.event())
    kit.offer(kit.token(kit.event()))
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]


# The machine.


def test_state_of_another_machine_approves_nothing(kit):
    kit.approver.receive([kit.token(kit.event())])
    kit.vm = kit.vm.__class__(name="vm_0", vm_id="another")
    kit.restart()
    kit.go(3, kit.event())
    assert kit.imds.posts == []
    assert kit.open_decisions == ()


def test_stored_approvals_wait_until_the_identity_is_confirmed(kit):
    kit.approver.receive([kit.token(kit.event())])
    kit.outbox.is_trusted = False
    kit.approver.receive([kit.token(kit.event("E-2"))])
    kit.go(30, kit.event(), kit.event("E-2"))
    assert kit.imds.posts == []
    assert len(kit.open_decisions) == 1
    kit.outbox.identify(kit.vm)
    kit.go(3, kit.event(), kit.event("E-2"))
    assert sorted(event_id for post in kit.imds.posts for event_id in post) == ["E-1", "E-2"]


def test_results_for_the_state_of_another_machine_are_not_written(kit):
    kit.see(kit.event())

    def replace_state():
        kit.imds.on_post = None
        kit.outbox.identify(kit.vm.__class__(name="vm_0", vm_id="another"))

    kit.imds.on_post = replace_state
    kit.approver.receive([kit.token(kit.event())])
    with pytest.raises(approvals.StreamChanged):
        kit.turn()
    assert kit.approvals == []
    assert kit.outcomes == []
