"""Each key has at most 1,000 open decisions. Beyond this limit, the oldest approvals are closed first, holds last."""

import jwt
import pytest
from approver_kit import BORIS

from bridge.outbox.approvals import MOST_OPEN_DECISIONS


def of(kit, approver):
    return [each for each in kit.open_decisions if each.approver == approver]


def issued_at(token):
    return jwt.decode(token, options={"verify_signature": False})["iat"]


def flood(kit, count, decision, *, kid="k2", approver=BORIS):
    """Send *count* decisions on events that this VM does not know, each newer than the one before."""
    tokens = [
        kit.token(kit.event(f"X-{number}"), decision, kid=kid, approver=approver, after=number / 1000)
        for number in range(count)
    ]
    kit.approver.receive(tokens)
    return tokens


@pytest.mark.parametrize("decision", ["approve", "hold"])
def test_newest_thousand_decisions_of_a_key_remain_open(kit, decision):
    tokens = flood(kit, MOST_OPEN_DECISIONS + 50, decision)
    kit.go(1)
    expected = [round(issued_at(token) * 1e6) for token in tokens[50:]]
    assert [each.issued_at for each in of(kit, BORIS)] == pytest.approx(expected, abs=1)
    assert kit.outcomes == [("approval_refused", "superseded")]
    assert "50 decisions were refused" in kit.records[-1].approval.reason


def test_hold_remains_after_any_number_of_approvals_of_its_key(kit):
    kit.see(kit.event())
    kit.offer(kit.token(kit.event(), "hold", kid="k2", approver=BORIS))
    flood(kit, MOST_OPEN_DECISIONS + 50, "approve")
    assert kit.held == {"E-1"}
    assert len(of(kit, BORIS)) == MOST_OPEN_DECISIONS


def test_decision_closed_by_the_limit_is_ignored_when_repeated(kit):
    first, *_ = flood(kit, MOST_OPEN_DECISIONS + 1, "approve")
    kit.go(1, kit.event("X-0"))
    kit.approver.receive([first])
    kit.go(3, kit.event("X-0"))
    assert kit.imds.posts == []
    assert kit.outcomes == [("approval_refused", "superseded")]
