"""The two-person rule: an approval can require decisions from several people.

With ``required_approvals = 2``, the portal's decisions lead to an approval only after two people have approved the same
version of the event. The two decisions must have different key IDs (``kid``), different keys, and different approvers.
By default, one decision is enough. The rule does not apply to local rules or to the `approve` command on the VM.

The portal has its own rule in bridge/portal/verdicts.py. The portal waits until enough of its users have
approved (``people.required_approvals``), and then signs a single decision with its own key. The agent counts this
decision as one approver.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridge.outbox.rows import StoredDecision


def sufficient_decisions(approves: Iterable[StoredDecision], required_approvals: int) -> list[StoredDecision]:
    """Return the decisions that together allow an approval, or [] if they are too few.

    *approves* contains the trusted, unexpired approve decisions on one version of an event, in order of arrival. A
    single decision made on the VM is always enough, because anyone who can write to the outbox already controls the VM.
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
