"""Keys, the number of approvers, the event, and holds are checked again right before each StartRequests."""

import os
import shutil
from pathlib import Path

import pytest
from approver_kit import ANNE, BORIS

from bridge.approval.signing import generate_key
from bridge.config.approval import ApprovalSettings, RuleSettings
from bridge.errors import ImdsStatus, ImdsUnreachable
from bridge.outbox import approvals

FREEZE = RuleSettings(name="freeze", event_types=("Freeze",), action="approve")


def public_key(kit, kid):
    return Path(f"{kit.key(kid)}.pub")


def remove_the_key_file(kit):
    public_key(kit, "k1").unlink()


def replace_the_key_file(kit):
    other = generate_key(kit.directory / "other.key")
    shutil.copy(f"{other.private_key_file}.pub", public_key(kit, "k1"))


def overwrite_the_key_file_and_keep_its_time(kit):
    file = public_key(kit, "k1")
    before = file.stat()
    replace_the_key_file(kit)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def take_the_key_out_of_the_configuration(kit):
    kit.trust(("k2", BORIS))
    kit.reload()


def give_the_key_to_another_approver(kit):
    kit.trust(("k1", "carla"), ("k2", BORIS))
    kit.reload()


def take_the_portal_out_of_the_configuration(kit):
    kit.settings = ApprovalSettings()
    kit.reload()


WAYS = [
    remove_the_key_file,
    replace_the_key_file,
    overwrite_the_key_file_and_keep_its_time,
    take_the_key_out_of_the_configuration,
    give_the_key_to_another_approver,
    take_the_portal_out_of_the_configuration,
]


@pytest.fixture(params=["Azure refused it so far", "approvals.disabled"])
def waiting(request, kit):
    """Return the kit with Anne's accepted approval, whose request fails, and a function that lets it succeed."""
    kit.see(kit.event())
    if request.param == "approvals.disabled":
        switch = kit.state / "approvals.disabled"
        switch.touch()
        kit.let_go = switch.unlink
    else:
        kit.imds.answer = ImdsStatus("Server error", status=500)
        kit.let_go = lambda: setattr(kit.imds, "answer", None)
    kit.offer(kit.token(kit.event()))
    kit.go(2, kit.event())
    kit.imds.posts.clear()
    return kit


@pytest.mark.parametrize("revoke", WAYS, ids=lambda way: way.__name__)
def test_approval_of_an_untrusted_key_is_withdrawn_with_a_record(waiting, revoke):
    revoke(waiting)
    waiting.let_go()
    waiting.go(60, waiting.event())
    assert waiting.imds.posts == []
    assert waiting.outcomes[-1] == ("approval_refused", "unknown_key")
    withdrawn = waiting.records[-1].approval
    assert withdrawn.approvers == (ANNE,)
    assert "no longer trusted" in withdrawn.reason


def test_restored_key_does_not_restore_withdrawn_approvals(waiting):
    content = public_key(waiting, "k1").read_bytes()
    remove_the_key_file(waiting)
    waiting.go(2, waiting.event())
    public_key(waiting, "k1").write_bytes(content)
    waiting.let_go()
    waiting.go(60, waiting.event())
    assert waiting.imds.posts == []


def test_approval_of_another_approver_applies_if_the_first_key_is_removed(waiting):
    waiting.offer(waiting.token(waiting.event(), kid="k2", approver=BORIS))
    remove_the_key_file(waiting)
    waiting.let_go()
    waiting.go(60, waiting.event())
    assert waiting.imds.posts == [["E-1"]]
    assert waiting.records[-1].approval.approvers == (BORIS,)


def test_approval_waits_when_the_required_approvers_increase(waiting):
    waiting.trust(("k1", ANNE), ("k2", BORIS), required=2)
    waiting.reload()
    waiting.let_go()
    waiting.go(60, waiting.event())
    assert waiting.imds.posts == []
    assert waiting.outcomes[-1] == ("approval_refused", "too_few_approvers")
    waiting.offer(waiting.token(waiting.event(), kid="k2", approver=BORIS))
    waiting.turn()
    assert waiting.imds.posts == [["E-1"]]
    assert waiting.records[-1].approval.approvers == (ANNE, BORIS)


def test_approval_of_two_is_withdrawn_if_one_key_is_removed(kit):
    kit.trust(("k1", ANNE), ("k2", BORIS), required=2)
    kit.reload()
    kit.see(kit.event())
    switch = kit.state / "approvals.disabled"
    switch.touch()
    kit.offer(kit.token(kit.event()), kit.token(kit.event(), kid="k2", approver=BORIS))
    kit.go(2, kit.event())
    remove_the_key_file(kit)
    switch.unlink()
    kit.go(60, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes[-1] == ("approval_refused", "unknown_key")


def test_approval_waits_while_its_key_file_is_being_written(waiting):
    file = public_key(waiting, "k1")
    content = file.read_bytes()
    file.write_bytes(b"")
    waiting.let_go()
    waiting.go(60, waiting.event())
    assert waiting.imds.posts == []
    file.write_bytes(content)
    waiting.go(60, waiting.event())
    assert waiting.imds.posts == [["E-1"]]
    assert waiting.outcomes[-1] == ("approved", "accepted")


def test_hold_with_a_broken_key_file_applies_until_a_later_approval(kit):
    kit.approver.receive([kit.token(kit.event(), "hold", kid="k2", approver=BORIS)])
    public_key(kit, "k2").write_bytes(b"half")
    older = kit.token(kit.event(), after=-5)
    kit.go(1, kit.event())
    kit.offer(older)
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "superseded")]
    kit.approve_here(kit.event(), kit.holds)
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]


# The event.


CHANGES = {
    "more VMs": {"resources": ("vm_0", "vm_1", "vm_2")},
    "another time": {"not_before_raw": "Fri, 20 Nov 2026 14:00:00 GMT"},
    "another type": {"event_type": "Reboot"},
    "longer": {"duration_seconds": 900},
    "started": {"event_status": "Started"},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("by", ["portal", "rule"])
def test_event_that_changed_since_the_last_poll_is_not_approved(kit, change, by):
    if by == "rule":
        kit.settings = ApprovalSettings(rules=(FREEZE,))
        kit.reload()
    changed = kit.event(**CHANGES[change])
    kit.imds.shows(changed)
    kit.see(kit.event(), shown=False)
    if by == "portal":
        kit.offer(kit.token(kit.event()))
    kit.turn()
    assert kit.imds.posts == []
    if by == "portal":
        kit.go(5, changed)
        assert kit.imds.posts == []
        assert kit.outcomes[-1][0] == "approval_refused"


def test_event_missing_from_the_final_get_is_kept_until_the_poll_confirms(kit):
    kit.imds.shows()
    kit.see(kit.event(), shown=False)
    kit.offer(kit.token(kit.event()))
    assert kit.imds.posts == []
    assert kit.outcomes == []
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]


@pytest.mark.parametrize("fault", [ImdsUnreachable("cut"), ImdsStatus("Too many requests", status=429)])
def test_request_requires_a_successful_final_get_which_is_retried(kit, fault):
    kit.see(kit.event())
    kit.imds.get_answer = fault
    kit.offer(kit.token(kit.event()))
    kit.go(10, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == []
    assert kit.imds.requests.count("GET") <= 12
    kit.imds.get_answer = None
    kit.go(40, kit.event())
    assert kit.imds.posts == [["E-1"]]


def test_slow_metadata_service_does_not_prevent_an_approval(kit):
    kit.see(kit.event())
    kit.imds.on_get = lambda: kit.wait(4)
    kit.offer(kit.token(kit.event()))
    assert kit.imds.requests == ["GET", "POST"]
    assert kit.imds.posts == [["E-1"]]


def test_final_get_older_than_three_seconds_prevents_the_request(kit, monkeypatch):
    kit.see(kit.event())
    read = kit.outbox.read

    def read_slowly_once(work, *arguments, **options):  # no public interface delays only this read
        if work is approvals.read_state and kit.imds.requests:
            monkeypatch.undo()
            kit.wait(4)
        return read(work, *arguments, **options)

    monkeypatch.setattr(kit.outbox, "read", read_slowly_once)
    kit.offer(kit.token(kit.event()))
    assert kit.imds.requests == ["GET"]
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]


def test_response_received_before_a_vm_pause_prevents_the_request(kit):
    kit.see(kit.event())
    kit.imds.on_get = lambda: setattr(kit, "wall_jump_seconds", kit.wall_jump_seconds + 4)
    kit.offer(kit.token(kit.event()))
    assert kit.imds.posts == []
    kit.imds.on_get = None
    kit.go(3, kit.event())
    assert kit.imds.posts == [["E-1"]]


def test_attempt_stopped_by_the_final_get_is_not_counted(kit):
    kit.imds.shows(kit.event(duration_seconds=900))
    kit.see(kit.event(), shown=False)
    kit.offer(kit.token(kit.event()))
    assert kit.approver.approved == frozenset()
    kit.go(2, kit.event(duration_seconds=900))
    assert kit.outcomes == [("approval_refused", "event_changed")]


# Changes during the final GET.


def hold(kit):
    kit.approver.receive([kit.token(kit.event(), "hold", kid="k2", approver=BORIS, after=1, jti="hold")])


def disable(kit):
    (kit.state / "approvals.disabled").touch()


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (remove_the_key_file, ("approval_refused", "unknown_key")),
        (hold, ("approval_refused", "superseded")),
        (disable, ("approval_failed", "disabled")),
    ],
)
def test_change_during_the_final_get_prevents_the_request(kit, change, outcome):
    kit.see(kit.event())
    kit.imds.on_get = lambda: change(kit)
    kit.offer(kit.token(kit.event()))
    kit.imds.on_get = None
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [outcome]
