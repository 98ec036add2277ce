"""The rules for verdicts: approve the event, hold it, or wait for a second person. Pure.

A hold of one person prevents early approvals by people and by the rules of the VMs until its withdrawal, which starts
nothing. An approval counts only for the event with the same digest, until the approval expires.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import Enum

import msgspec

from bridge.portal.user_names import folded_name

WITHDRAW_HOLD = "Withdraw the hold to approve the event."
NO_KEY = "This portal has no key. Sign with `decide --to`. The portal forwards the decision."


class Choice(str, Enum):
    """The choice of a verdict."""

    APPROVE = "approve"
    HOLD = "hold"


class Outcome(str, Enum):
    """The result of all verdicts on an event."""

    UNDECIDED = "undecided"
    WAITING = "waiting"
    """One person approved, and another person must approve too."""
    APPROVED = "approved"
    HELD = "held"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of one person on one event."""

    verdict_id: str
    event_key: str
    choice: Choice
    digest: str
    """Digest of the event as the person saw it."""
    user_name: str
    reason: str
    made_at: str
    expires_at: str
    """The end of an approval. A hold counts until its withdrawal."""
    withdrawn_at: str | None = None


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome and the verdicts behind it."""

    outcome: Outcome
    verdicts: tuple[Verdict, ...]
    """The holds, or one approval of each person, oldest first."""
    needed: int
    """The number of people who must still approve; 0 if the event is approved or held."""


def counting(verdicts: Iterable[Verdict], barred: Container[str]) -> tuple[Verdict, ...]:
    """Return the verdicts that count: all holds, and the approvals of people who may still approve.

    *barred* contains the folded names of people who may not approve.
    """
    return tuple(each for each in verdicts if each.choice is Choice.HOLD or folded_name(each.user_name) not in barred)


def rule(verdicts: Iterable[Verdict], *, digest: str, at: str, required: int) -> Ruling:
    """Return the ruling at the time *at* on an event with *digest*.

    An approval needs *required* different people. One person with several spellings of a name counts once.
    """
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


def people_of(verdicts: Iterable[Verdict]) -> str:
    """Return the names behind *verdicts*, each once."""
    return ", ".join(dict.fromkeys(each.user_name for each in verdicts))


def reason_of(ruling: Ruling, *, most_characters: int = 256) -> str:
    """Return the reason of a decision: the names and reasons of its verdicts, cut to the length that an agent keeps."""
    said = "; ".join(f"{each.user_name}: {each.reason}" if each.reason else each.user_name for each in ruling.verdicts)
    return said if len(said) <= most_characters else f"{said[: most_characters - 1]}…"
