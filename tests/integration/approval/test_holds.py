"""Holds have no time limits, unlike approvals, and apply to every version of the event."""

import hashlib
from datetime import timedelta

import msgspec
import pytest
from approver_kit import ANNE, BORIS

from bridge.config.approval import RuleSettings
from bridge.errors import ImdsStatus, OutboxError
from bridge.events.event import VmIdentity

FREEZE = RuleSettings(name="freeze", action="approve", event_types=("Freeze",))


@pytest.fixture
def kit(kit):
    """Add a rule that approves every Freeze."""
    kit.settings = msgspec.structs.replace(kit.settings, rules=(FREEZE,))
    kit.reload()
    return kit


def moved(event, minutes=1):
    """Return *event* as Azure shows it with another NotBefore."""
    not_before = event.not_before + timedelta(minutes=minutes)
    text = not_before.strftime("%a, %d %b %Y %H:%M:%S GMT")
    return msgspec.structs.replace(event, not_before=not_before, not_before_raw=text)


# A hold applies to the EventId.


@pytest.mark.parametrize(
    "change",
    [
        moved,
        lambda event: msgspec.structs.replace(event, duration_seconds=9),
        lambda event: msgspec.structs.replace(event, resources=("vm_0",)),
    ],
    ids=["NotBefore a minute later", "another duration", "fewer machines"],
)
def test_hold_applies_to_every_version_of_the_event(kit, change):
    event = kit.event()
    kit.approver.receive([kit.token(event, "hold")])
    kit.go(3, event)
    kit.go(30, change(event))
    kit.go(30, moved(change(event)))
    assert kit.imds.posts == []
    assert kit.held == {"E-1"}


def test_hold_of_another_event_version_withdraws_a_rule_approval(kit):
    kit.imds.answer = ImdsStatus("Bad request", status=400)
    kit.go(2, kit.event())
    posts = len(kit.imds.posts)
    assert posts > 0
    kit.offer(kit.token(moved(kit.event()), "hold"))
    kit.go(90, kit.event())
    assert len(kit.imds.posts) == posts
    assert kit.outcomes[-1] == ("approval_refused", "superseded")


def test_later_approval_of_the_current_version_ends_the_hold(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), "hold"))
    kit.go(2, moved(kit.event()))
    kit.offer(kit.token(moved(kit.event()), kid="k2", approver=BORIS))
    assert kit.imds.posts == [["E-1"]]


# Future, expired, and old holds.


@pytest.mark.parametrize(
    ("issued_after", "options"),
    [
        (-7200, {"valid_seconds": 600}),
        (-5 * 86_400, {"valid_seconds": 3600}),
        (3600, {}),
        (90, {"valid_seconds": 3600}),
    ],
    ids=["expired, and older than the database", "days old", "an hour ahead", "a minute and a half ahead"],
)
def test_hold_is_accepted_when_expired_old_or_from_the_future(kit, issued_after, options):
    kit.approver.receive([kit.token(kit.event(), "hold", after=issued_after, **options)])
    kit.go(30, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == []
    assert kit.held == {"E-1"}


def test_hold_received_before_the_event_waits_for_the_event(kit):
    kit.go(2)
    kit.offer(kit.token(kit.event(), "hold"))
    kit.go(60)
    kit.restart()
    kit.go(30, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == []


def test_stored_hold_applies_after_its_key_is_removed(kit):
    kit.see(kit.event())
    kit.approver.receive([kit.token(kit.event(), "hold")])
    kit.key("k1").with_name("k1.key.pub").unlink()
    kit.go(30, kit.event())
    assert kit.imds.posts == []
    assert kit.held == {"E-1"}


def test_expired_hold_is_kept_while_its_event_exists(kit):
    kit.go(2, kit.event())
    event = kit.event("E-2")
    kit.approver.receive([kit.token(event, "hold")])
    kit.record(kit.event(), event)
    for _ in range(9):
        kit.wait(86_400)
        kit.go(2, kit.event(), event)
    kit.prune()
    kit.go(30, kit.event(), event)
    assert kit.imds.posts == [["E-1"]]
    assert kit.held == {"E-2"}


# A key file that is being written.


def test_no_rule_acts_while_a_hold_waits_for_its_key_file(kit):
    file = kit.key("k1").with_name("k1.key.pub")
    whole = file.read_bytes()
    token = kit.token(kit.event(), "hold")
    file.write_bytes(whole[:40])
    kit.approver.receive([token])
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    file.write_bytes(whole)
    kit.go(30, kit.event())
    assert kit.imds.posts == []
    assert kit.held == {"E-1"}


def test_hold_without_a_key_file_survives_a_flood_of_early_approvals(kit):
    file = kit.key("k1").with_name("k1.key.pub")
    whole = file.read_bytes()
    file.write_bytes(whole[:40])
    kit.approver.receive([kit.token(kit.event(), "hold")])
    for part in range(3):
        events = [kit.event(f"X-{part}-{number}") for number in range(700)]
        kit.approver.receive([kit.token(each, kid="k2", approver=BORIS, after=3600) for each in events])
    kit.go(1)
    file.write_bytes(whole)
    kit.go(15, kit.event())  # the retry of 2,000 tokens takes longer
    assert kit.imds.posts == []
    assert kit.held == {"E-1"}


# The database is not writable yet, or the VM name is unknown.


def test_hold_survives_a_flood_of_tokens_while_nothing_can_be_stored(kit):
    named, kit.vm = kit.vm, VmIdentity(name="vm_0")
    answers = [[f"{part} {number}" for number in range(1_000)] for part in range(2)]
    kit.approver.receive([kit.token(kit.event(), "hold")])
    kit.approver.receive(answers[0])
    with pytest.raises(OutboxError):  # so the portal sends them again
        kit.approver.receive(answers[1])
    kit.approver.receive(answers[0])
    kit.vm = named
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    assert kit.held == {"E-1"}


# The signed text.


def named(*tokens):
    return tuple(hashlib.sha256(token.encode()).hexdigest() for token in tokens)


def test_signed_text_of_each_decision_is_stored_and_named_in_the_outcome(two):
    two.see(two.event())
    tokens = [two.token(two.event()), two.token(two.event(), kid="k2", approver=BORIS)]
    two.offer(*tokens)
    outcome = two.records[-1].approval
    assert (outcome.result, outcome.approvers) == ("accepted", (ANNE, BORIS))
    assert outcome.jws_sha256 == named(*tokens)
    assert [each.token for each in two.outbox.read(lambda state: state.decisions.rows).values()] == tokens


def test_only_outcomes_of_decisions_name_a_signed_text(kit):
    kit.see(kit.event("E-2"))
    kit.turn()
    assert kit.records[-1].approval.jws_sha256 == ()
    changed = kit.token(kit.event("E-3", duration_seconds=9))
    kit.approver.receive([kit.token(kit.event("E-3"), "hold", after=-1), changed])
    kit.go(2, kit.event("E-3"))
    assert kit.records[-1].approval.result == "event_changed"
    assert kit.records[-1].approval.jws_sha256 == named(changed)


# A person on the VM.


@pytest.mark.parametrize("ahead_seconds", [0, 30, 30 * 86_400], ids=["now", "portal clock skew", "wrong clock"])
def test_person_on_the_vm_ends_a_hold_with_a_future_iat(kit, ahead_seconds):
    kit.go(1)
    kit.offer(kit.token(kit.event(), "hold", after=ahead_seconds))
    kit.go(2, kit.event())
    assert kit.imds.posts == []
    kit.approve_here(kit.event(), kit.holds)
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]
    assert kit.held == {"E-1"}  # for rules


def test_hold_signed_after_a_local_override_applies(kit):
    kit.go(1)
    kit.offer(kit.token(kit.event(), "hold", after=50))
    kit.go(2, kit.event())
    kit.imds.answer = ImdsStatus("Bad request", status=400)
    kit.approve_here(kit.event(), kit.holds)
    kit.go(1, kit.event())
    kit.offer(kit.token(kit.event(), "hold", kid="k2", approver=BORIS, after=1))
    posts = len(kit.imds.posts)
    kit.go(60, kit.event())
    assert len(kit.imds.posts) == posts


def test_person_on_the_vm_overrides_only_holds_shown_to_them(kit):
    kit.go(1)
    kit.offer(kit.token(kit.event(), "hold"))
    told_of = kit.holds
    kit.offer(kit.token(kit.event(), "hold", kid="k2", approver=BORIS))
    kit.wait(2)
    assert [each.approver for each in kit.approve_here(kit.event(), told_of)] == [BORIS]
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    assert kit.approve_here(kit.event(), kit.holds) == ()
    kit.go(2, kit.event())
    assert kit.imds.posts == [["E-1"]]
