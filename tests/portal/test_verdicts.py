"""What follows from what people said: one hold is enough, the same person counts once, a change undoes approvals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.portal.verdicts import Choice, Outcome, Verdict, reason_of, rule

NOW = "2026-11-20T11:05:00.000Z"
LATER = "2026-11-20T12:00:00.000Z"
DIGEST = "a" * 64


def said(word, user_name, *, minute=0, **more):
    fields = {
        "verdict_id": f"{user_name}-{word}-{minute}", "event_key": "e", "choice": Choice(word), "digest": DIGEST,
        "user_name": user_name, "reason": "", "made_at": f"2026-11-20T11:{minute:02d}:00.000Z", "expires_at": LATER,
    }  # fmt: skip
    return Verdict(**{**fields, **more})


def outcome(*verdicts, required=1):
    ruling = rule(verdicts, digest=DIGEST, at=NOW, required=required)
    return ruling.outcome.value, ruling.needed, [each.user_name for each in ruling.verdicts]


@pytest.mark.parametrize(
    ("verdicts", "required", "expected"),
    [
        ([], 1, ("undecided", 1, [])),
        ([said("approve", "ann")], 1, ("approved", 0, ["ann"])),
        ([said("approve", "ann")], 2, ("waiting", 1, ["ann"])),
        ([said("approve", "ann"), said("approve", "ANN", minute=1)], 2, ("waiting", 1, ["ANN"])),
        ([said("approve", "ann"), said("approve", "bob", minute=1)], 2, ("approved", 0, ["ann", "bob"])),
        ([said("hold", "ann"), said("approve", "bob", minute=1)], 1, ("held", 0, ["ann"])),
        ([said("approve", "bob"), said("hold", "ann", minute=1)], 1, ("held", 0, ["ann"])),
        ([said("hold", "ann", withdrawn_at=NOW), said("approve", "bob")], 1, ("approved", 0, ["bob"])),
        ([said("approve", "ann", withdrawn_at=NOW)], 1, ("undecided", 1, [])),
        ([said("approve", "ann", digest="b" * 64)], 1, ("undecided", 1, [])),
        ([said("hold", "ann", digest="b" * 64)], 1, ("held", 0, ["ann"])),
        ([said("approve", "ann", expires_at=NOW)], 1, ("undecided", 1, [])),
        ([said("hold", "ann", expires_at="2026-11-20T11:01:00.000Z")], 1, ("held", 0, ["ann"])),
    ],
)
def test_outcome_of_what_was_said(verdicts, required, expected):
    assert outcome(*verdicts, required=required) == expected


VERDICTS = st.lists(
    st.builds(
        said,
        st.sampled_from(["approve", "hold"]),
        st.sampled_from(["ann", "Ann", "bob", "cem"]),
        minute=st.integers(0, 4),
        withdrawn_at=st.sampled_from([None, NOW]),
        digest=st.sampled_from([DIGEST, "b" * 64]),
        expires_at=st.sampled_from([NOW, LATER]),
    ),
    max_size=8,
)


@given(VERDICTS, st.randoms(use_true_random=False), st.integers(1, 3))
def test_neither_order_nor_repetition_changes_the_outcome(verdicts, chance, required):
    again = [*verdicts, *verdicts]
    chance.shuffle(again)
    first, second = outcome(*verdicts, required=required), outcome(*again, required=required)
    assert first[:2] == second[:2]


@given(VERDICTS, st.integers(1, 3))
def test_nothing_is_approved_that_is_held_or_that_too_few_people_approved(verdicts, required):
    ruling = rule(verdicts, digest=DIGEST, at=NOW, required=required)
    if ruling.outcome is Outcome.APPROVED:
        assert not [each for each in verdicts if each.choice is Choice.HOLD and each.withdrawn_at is None]
        assert len({each.user_name.casefold() for each in ruling.verdicts}) >= required
        assert all(each.digest == DIGEST and each.expires_at > NOW for each in ruling.verdicts)


def test_reason_names_who_and_why_and_is_cut_to_what_an_agent_keeps():
    ruling = rule(
        [said("approve", "ann", reason="at night"), said("approve", "bob")], digest=DIGEST, at=NOW, required=2
    )
    assert reason_of(ruling) == "ann: at night; bob"
    long = rule([said("hold", "ann", reason="x" * 400)], digest=DIGEST, at=NOW, required=1)
    assert len(reason_of(long)) == 256
