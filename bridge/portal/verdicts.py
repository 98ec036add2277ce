"""Defines people's verdicts on events, and combines them under the two-person rule.

A verdict is one person's choice to approve or hold an event. This module combines the verdicts on an event, and
`deciding` then signs the decisions. Under the two-person rule, `people.required_approvals` different people must
approve an event.

These rules apply to the verdicts on one event:

- One person is enough for a hold. While a person holds the event, no one can approve it. The person who holds the event
  can withdraw the hold alone. Other people can lift the hold if as many people consent as an approval requires. The
  consent of each person counts for an hour.
- An approval counts until it expires or is withdrawn, and only for the version of the event that the approver saw.
- An approval does not count if the person who approved is disabled or is no longer an approver.
- All spellings of a name count as one person.
- If an event needs more than one person, only people of the same issuer count together. Otherwise, one person with a
  local account and an account of the OpenID Connect provider could approve twice.

Agents cannot check this rule, because the portal signs every decision with its own key, no matter how many people
approved the event. The agent's own setting `required_approvals` counts signing keys, not people
(`bridge.approval.two_person_rule`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from enum import Enum

import msgspec

from bridge.portal.user_names import issuer_of

WITHDRAW_HOLD = "Withdraw the hold to approve the event."
NO_KEY = "This portal has no key. Sign the decision with `decide`, and send it to the portal."
#: The number of events that a person can approve at once.
MOST_APPROVED = 20
_MOST_CHARACTERS = 256


class Choice(str, Enum):
    """The choice of a verdict."""

    APPROVE = "approve"
    HOLD = "hold"


class Outcome(str, Enum):
    """The result of all verdicts on an event."""

    UNDECIDED = "undecided"
    WAITING = "waiting"
    """At least one person has approved, and more people must approve."""
    APPROVED = "approved"
    HELD = "held"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of one person on one event."""

    verdict_id: str
    event_key: str
    choice: Choice
    digest: str
    """Digest of the event as the person saw it."""
    person_key: str
    """The person's key (`bridge.portal.user_names.person_key`)."""
    user_name: str
    reason: str
    made_at: str
    expires_at: str
    """The end of an approval. A hold counts until its withdrawal."""
    withdrawn_at: str | None = None
    lifts: dict[str, str] = {}
    """The keys of other people who agree to lift this hold, and the end of each consent."""


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome, and the verdicts that led to it."""

    outcome: Outcome
    verdicts: tuple[Verdict, ...]
    """The holds, or one approval of each person, oldest first."""
    needed: int
    """The number of people who must still approve. It is 0 if the event is approved or held."""


def people_of(verdicts: Iterable[Verdict]) -> str:
    """Return the names of the people who submitted *verdicts*, without duplicates."""
    return ", ".join(dict.fromkeys(each.user_name for each in verdicts))


def reason_of(ruling: Ruling) -> str:
    """Return the reason of a decision: the name and the reason of each verdict."""
    said = "; ".join(
        f"{each.user_name}: {each.reason}" if each.reason else f"{each.user_name} gave no reason"
        for each in ruling.verdicts
    )
    return said if len(said) <= _MOST_CHARACTERS else f"{said[: _MOST_CHARACTERS - 1]}…"


def counting(verdicts: Iterable[Verdict], barred: Container[str]) -> tuple[Verdict, ...]:
    """Return all holds, and the approvals of people whose keys are not in *barred*."""
    return tuple(each for each in verdicts if each.choice is Choice.HOLD or each.person_key not in barred)


def rule(verdicts: Iterable[Verdict], *, digest: str, at: str, required: int) -> Ruling:
    """Return the ruling at the time *at* on the version *digest* of an event.

    *required* is the number of people who must approve.
    """
    standing = sorted(
        (each for each in verdicts if each.withdrawn_at is None), key=lambda each: (each.made_at, each.verdict_id)
    )
    holds = tuple(each for each in standing if each.choice is Choice.HOLD)
    if holds:
        return Ruling(outcome=Outcome.HELD, verdicts=holds, needed=0)
    newest = {
        each.person_key: each
        for each in standing
        if each.choice is Choice.APPROVE and each.digest == digest and at < each.expires_at
    }
    approvals = tuple(sorted(newest.values(), key=lambda each: (each.made_at, each.verdict_id)))
    needed = max(0, required - most_of_one_issuer(each.person_key for each in approvals))
    if not approvals:
        return Ruling(outcome=Outcome.UNDECIDED, verdicts=(), needed=needed)
    return Ruling(outcome=Outcome.WAITING if needed else Outcome.APPROVED, verdicts=approvals, needed=needed)


def lift(
    verdict: Verdict, person_key: str, barred: Container[str], *, at: str, until: str, required: int
) -> tuple[dict[str, str], int]:
    """Return the consents to withdraw *verdict*, and how many more people must agree.

    The result includes the consent of *person_key*, which expires at the time *until*, and earlier consents that are
    still valid at the time *at*. No one needs consent to withdraw an approval or their own hold.
    """
    lifts = {key: end for key, end in verdict.lifts.items() if at < end and key not in barred}
    lifts[person_key] = until
    is_free = person_key == verdict.person_key or verdict.choice is not Choice.HOLD
    return lifts, 0 if is_free else max(0, required - most_of_one_issuer(lifts))


def most_of_one_issuer(keys: Iterable[str]) -> int:
    """Return the largest number of people who have the same issuer."""
    return max(Counter(map(issuer_of, set(keys))).values(), default=0)


def too_few(required: int, approvers: int) -> str:
    """Return a warning if fewer people can approve than the rule requires, or ""."""
    if approvers >= required:
        return ""
    people = "person" if required == 1 else "different people"
    return f"{required} {people} must approve, and only {approvers} can. Add approvers with `portal users`."
