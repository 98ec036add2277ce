"""Invalid decisions send no request and produce one record with the reason."""

import base64
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from approver_kit import ANNE, BORIS

from bridge.outbox import approvals


def forged(_kit, token):
    head, payload, _ = token.split(".")
    return f"{head}.{payload}.{base64.urlsafe_b64encode(bytes(63) + b'0').rstrip(b'=').decode()}"


#: tests/unit/vectors has the tokens that are refused before the event counts.
TOKENS = {
    "forged": (forged, "forged"),
    "unknown kid": (lambda kit, _: kit.token(kit.event(), kid="k9"), "unknown_key"),
    "wrong aud": (lambda kit, _: kit.token(kit.event(), vm_id="another"), "wrong_audience"),
    "expired": (lambda kit, token: (kit.wait(3700), token)[1], "expired"),
    "not yet valid": (lambda kit, _: kit.token(kit.event(), after=120), "not_yet_valid"),
    "issued before the database was made": (
        lambda kit, _: kit.token(kit.event(), after=-11),
        "issued_before_this_outbox",
    ),
    "changed Resources": (lambda kit, _: kit.token(kit.event(resources=("vm_0",))), "event_changed"),
    "changed NotBefore": (lambda kit, _: kit.token(kit.event(not_before_raw="later")), "event_changed"),
    "changed type": (lambda kit, _: kit.token(kit.event(event_type="Reboot")), "event_changed"),
    "changed duration": (lambda kit, _: kit.token(kit.event(duration_seconds=9)), "event_changed"),
    "changed source": (lambda kit, _: kit.token(kit.event(event_source="User")), "event_changed"),
}


@pytest.mark.parametrize("name", TOKENS)
def test_invalid_decision_approves_nothing(kit, name):
    make, reason = TOKENS[name]
    kit.see(kit.event())
    token = make(kit, kit.token(kit.event()))
    kit.see(kit.event())
    kit.offer(token)
    kit.go(5, kit.event())
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", reason)]


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (lambda kit: [kit.event(event_status="Started", not_before=None, not_before_raw="")], "event_not_scheduled"),
        (lambda kit: [kit.event(event_status="Started")], "event_not_scheduled"),
        (lambda kit: [kit.event(), kit.event(event_type="Reboot")], "event_unknown"),
    ],
    ids=["started", "started, otherwise equal", "duplicate"],
)
def test_approval_is_refused_unless_the_event_is_scheduled_once(kit, shown, reason):
    kit.see(*shown(kit))
    kit.offer(kit.token(kit.event()))
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", reason)]


def test_approval_older_than_a_received_hold_is_refused(kit):
    kit.see(kit.event())
    late = kit.token(kit.event(), after=-5)
    kit.offer(kit.token(kit.event(), "hold"))
    kit.offer(late)
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "superseded")]


def test_hold_wins_over_a_simultaneous_approval(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()), kit.token(kit.event(), "hold", kid="k2", approver=BORIS))
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "superseded")]


def test_repeated_decision_is_ignored_even_after_restart_and_expiry(kit):
    kit.see(kit.event())
    token = kit.token(kit.event())
    kit.offer(token)
    kit.offer(token, token)
    kit.restart()
    kit.go(2, kit.event())
    kit.offer(token)
    kit.wait(4000)
    kit.see(kit.event())
    kit.offer(token)
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes == [("approved", "accepted")]


@pytest.mark.parametrize("restarted", [False, True])
def test_reused_jti_for_another_event_is_refused(kit, restarted):
    kit.see(kit.event("E-1"), kit.event("E-2"))
    kit.offer(kit.token(kit.event("E-1"), jti="once"))
    if restarted:
        kit.restart()
        kit.see(kit.event("E-1"), kit.event("E-2"))
    kit.offer(kit.token(kit.event("E-2"), jti="once"))
    assert kit.imds.posts == [["E-1"]]
    assert kit.outcomes[-1] == ("approval_refused", "replayed")


def test_jti_is_kept_after_other_state_is_pruned(kit):
    def is_known():
        return kit.outbox.read(approvals.find_decision, "portal", ANNE, "once") is not None

    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), jti="once"))
    kit.wait(3600 + 60 + 3600)
    kit.prune()
    assert is_known()
    kit.wait(9 * 86_400)
    kit.prune()
    assert not is_known()


# Two people.


@pytest.mark.parametrize(
    "signers",
    [[("k1", ANNE)], [("k1", ANNE), ("k1", ANNE)], [("k1", ANNE), ("k3", ANNE)]],
    ids=["one", "one kid twice", "one approver with two keys"],
)
def test_approvals_of_one_person_count_once(two, signers):
    two.see(two.event())
    two.offer(*(two.token(two.event(), kid=kid, approver=approver) for kid, approver in signers))
    two.go(5, two.event())
    assert two.imds.posts == []
    assert two.outcomes == []
    two.wait(3700)
    two.go(2, two.event())
    assert two.imds.posts == []
    assert two.outcomes == [("approval_refused", "too_few_approvers")]


def test_approval_of_two_people_names_both(two):
    two.see(two.event())
    two.offer(two.token(two.event()))
    two.restart()
    two.see(two.event())
    two.offer(two.token(two.event(), kid="k2", approver=BORIS, after=1))
    assert two.imds.posts == [["E-1"]]
    (approved,) = (record for record in two.records if record.approval is not None)
    assert approved.approval.approvers == (ANNE, BORIS)


def test_approval_that_expired_before_the_second_does_not_count(two):
    two.see(two.event())
    two.offer(two.token(two.event(), valid_seconds=100))
    two.wait(200)
    two.see(two.event())
    two.offer(two.token(two.event(), kid="k2", approver=BORIS))
    two.go(3, two.event())
    assert two.imds.posts == []


def test_an_approval_older_than_the_newest_hold_is_not_the_first_of_two(two):
    two.see(two.event())
    two.offer(two.token(two.event(), after=-5))
    two.offer(two.token(two.event(), "hold", kid="k2", approver=BORIS, after=-3))
    two.offer(two.token(two.event(), kid="k2", approver=BORIS))
    two.go(3, two.event())
    assert two.imds.posts == []
    two.offer(two.token(two.event()))
    two.turn()
    assert two.imds.posts == [["E-1"]]


def test_approval_with_a_removed_key_does_not_count(two):
    two.see(two.event())
    two.offer(two.token(two.event()))
    Path(f"{two.key('k1')}.pub").unlink()
    two.offer(two.token(two.event(), kid="k2", approver=BORIS))
    two.go(3, two.event())
    assert two.imds.posts == []


# Floods.


def test_ten_thousand_forgeries_add_one_record_a_minute_and_evict_nothing(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event()))
    before = len(kit.records)
    tokens = [forged(kit, kit.token(kit.event(), jti=f"j{number}")) for number in range(20)]
    for _ in range(500):
        kit.approver.receive(tokens)
        kit.turn()
    refused = kit.records[before:]
    assert [record.approval.result for record in refused] == ["forged"]
    assert refused[0].approval.decision_id is None
    assert refused[0].approval.approvers == ()
    assert refused[0].event is None
    kit.wait(61)
    kit.turn()
    assert Counter(result for _, result in kit.outcomes) == {"accepted": 1, "forged": 2}
    assert "9980 decisions" in kit.records[-1].approval.reason
    assert kit.outbox.read(lambda state: state.sinks.rows["sink"].evicted) == 0


def test_nothing_of_an_unverified_token_is_recorded(kit):
    kit.see(kit.event())
    kit.offer(forged(kit, kit.token(kit.event(), jti="do-not-keep-me", reason="nor me")))
    text = b"".join(msgspec.json.encode(record) for record in kit.records)
    assert b"do-not-keep-me" not in text
    assert b"nor me" not in text
