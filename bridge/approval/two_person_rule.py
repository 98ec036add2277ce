"""The two-person rule: selects the decisions that together allow an approval.

If ``required_approvals`` is 2 or more, an approval needs that many different people. Two decisions count as two people
only if they have different kids, different keys, and different approvers. The default is 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridge.outbox.rows import StoredDecision


def sufficient_decisions(approves: Iterable[StoredDecision], required_approvals: int) -> list[StoredDecision]:
    """Return enough of the decisions *approves* for an approval, in their order; empty if there are too few.

    *approves* are trusted and unexpired approve decisions on one version of an event. A decision of a person on the VM
    is enough, because a user who can write to the outbox owns this VM.
    """
    chosen: list[StoredDecision] = []
    for each in approves:
        if each.source == "cli":
            return [each]
        if not any(_is_same_person(each, other) for other in chosen):
            chosen.append(each)
    return chosen[:required_approvals] if len(chosen) >= required_approvals else []


def _is_same_person(one: StoredDecision, other: StoredDecision) -> bool:
    return one.kid == other.kid or one.approver == other.approver or one.key_sha256 == other.key_sha256
