"""The two-person rule: an approval can require decisions of several people.

If ``required_approvals`` is 2, an event is approved only when two people have approved the same version of the event.
Two decisions count as two people only if their key IDs (``kid``), their keys, and their approvers all differ. The
default is 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridge.outbox.rows import StoredDecision


def sufficient_decisions(approves: Iterable[StoredDecision], required_approvals: int) -> list[StoredDecision]:
    """Return the decisions that together allow an approval, or an empty list if there are too few.

    *approves* are the trusted, unexpired approve decisions on one version of an event, in the order of arrival. One
    decision of a person on the VM is always enough, because a user who can write to the outbox controls this VM.
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
