"""The two-person rule: `people.required_approvals` different people must approve an event.

These rules apply to the verdicts on one event:

- One person is enough for a hold. While a person holds the event, no one can approve it. Any person who can decide on
  the event can withdraw the hold.
- An approval counts until it expires or is withdrawn, and only for the version of the event that the approver saw.
- An approval does not count if its user is disabled or is no longer an approver.
- All spellings of a name count as one person.

Agents cannot check this rule, because the portal signs a single decision with its own key on behalf of all approvers.
The agent's setting `required_approvals` is a separate rule that counts the approvers of different signing keys
(`bridge.approval.two_person_rule`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from bridge.portal.user_names import folded_name
from bridge.portal.verdicts import Choice, Outcome, Ruling, Verdict


def counting(verdicts: Iterable[Verdict], barred: Container[str]) -> tuple[Verdict, ...]:
    """Return all holds, and the approvals of people whose folded names are not in *barred*."""
    return tuple(each for each in verdicts if each.choice is Choice.HOLD or folded_name(each.user_name) not in barred)


def rule(verdicts: Iterable[Verdict], *, digest: str, at: str, required: int) -> Ruling:
    """Return the ruling at *at* on an event with *digest* and *required* approvals."""
    standing = sorted(
        (each for each in verdicts if each.withdrawn_at is None), key=lambda each: (each.made_at, each.verdict_id)
    )
    holds = tuple(each for each in standing if each.choice is Choice.HOLD)
    if holds:
        return Ruling(outcome=Outcome.HELD, verdicts=holds, needed=0)
    newest = {
        folded_name(each.user_name): each
        for each in standing
        if each.choice is Choice.APPROVE and each.digest == digest and at < each.expires_at
    }
    approvals = tuple(sorted(newest.values(), key=lambda each: (each.made_at, each.verdict_id)))
    needed = max(0, required - len(approvals))
    if not approvals:
        return Ruling(outcome=Outcome.UNDECIDED, verdicts=(), needed=needed)
    return Ruling(outcome=Outcome.WAITING if needed else Outcome.APPROVED, verdicts=approvals, needed=needed)


def too_few(required: int, approvers: int | None) -> str:
    """Return a warning if fewer people can approve than the rule requires.

    Otherwise, return "".
    """
    if approvers is None or approvers >= required:
        return ""
    people = "person" if required == 1 else "different people"
    return f"{required} {people} must approve, and only {approvers} can. Add approvers with `portal users`."
