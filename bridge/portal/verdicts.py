"""Defines the verdicts of people on events.

A verdict is one person's choice to approve or hold an event. The module `two_person_rule` combines the verdicts into a
ruling, and the module `deciding` turns the ruling into signed decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

WITHDRAW_HOLD = "Withdraw the hold to approve the event."
NO_KEY = "This portal has no key. Sign the decision with `decide --to`, and the portal forwards it."
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


class Lift(msgspec.Struct, frozen=True, kw_only=True):
    """One person's consent to withdraw the hold of another person."""

    person_key: str
    user_name: str
    expires_at: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of one person on one event."""

    verdict_id: str
    event_key: str
    choice: Choice
    digest: str
    """Digest of the event as the person saw it."""
    person_key: str
    """The key of the person (`bridge.portal.user_names.person_key`)."""
    user_name: str
    reason: str
    made_at: str
    expires_at: str
    """The end of an approval. A hold counts until its withdrawal."""
    withdrawn_at: str | None = None
    lifts: tuple[Lift, ...] = ()
    """The consents of other people to lift this hold."""


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome and the verdicts behind it."""

    outcome: Outcome
    verdicts: tuple[Verdict, ...]
    """The holds, or one approval of each person, oldest first."""
    needed: int
    """The number of people who must still approve. It is 0 if the event is approved or held."""


def people_of(verdicts: Iterable[Verdict]) -> str:
    """Return the names behind *verdicts*, each once."""
    return ", ".join(dict.fromkeys(each.user_name for each in verdicts))


def reason_of(ruling: Ruling) -> str:
    """Return the reason of a decision: the name and the reason of each verdict."""
    said = "; ".join(
        f"{each.user_name}: {each.reason}" if each.reason else f"{each.user_name} gave no reason"
        for each in ruling.verdicts
    )
    return said if len(said) <= _MOST_CHARACTERS else f"{said[: _MOST_CHARACTERS - 1]}…"
