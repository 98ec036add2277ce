"""What people said about an event, and what follows from it: approve it, hold it, or wait for a second person. Pure.

There is no "deny": whoever does not approve lets Azure start the event at NotBefore. A hold only stops what approves
early, the portal's people and the VMs' own rules. So a hold needs one person, whatever is asked of an approval, and it
stands until somebody withdraws it: nobody approves meanwhile, and taking it back starts nothing by itself. An approval
counts for the event exactly as it was shown, for as long as it says.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import Enum

import msgspec

from bridge.portal.user_names import folded_name

#: What is said to whoever would approve an event that is held.
TAKE_BACK = "Take the hold back to approve it."


class Choice(str, Enum):
    """What a person says."""

    APPROVE = "approve"
    HOLD = "hold"


class Outcome(str, Enum):
    """What follows from what all of them said."""

    UNDECIDED = "undecided"
    WAITING = "waiting"
    """Somebody approved, and another person must too."""
    APPROVED = "approved"
    HELD = "held"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one person said about one event."""

    verdict_id: str
    event_key: str
    choice: Choice
    digest: str
    """Of the event as it was shown to that person."""
    user_name: str
    reason: str
    made_at: str
    expires_at: str
    """Until when an approval counts; a hold counts until it is withdrawn."""
    withdrawn_at: str | None = None


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome, and what it rests on."""

    outcome: Outcome
    verdicts: tuple[Verdict, ...]
    """The holds that stand, or one approval of each person; oldest first."""
    needed: int
    """How many more people must approve; 0 when enough have, or when the event is held."""


def counting(verdicts: Iterable[Verdict], barred: Container[str]) -> tuple[Verdict, ...]:
    """Return what of *verdicts* counts: no approval of somebody who may approve no more; a hold of theirs stands.

    *barred* are the folded names of those people.
    """
    return tuple(each for each in verdicts if each.choice is Choice.HOLD or folded_name(each.user_name) not in barred)


def rule(verdicts: Iterable[Verdict], *, digest: str, at: str, required: int) -> Ruling:
    """Return what follows at the time *at* from *verdicts* on an event that is now as *digest* says.

    *required* different people make an approval; the same person twice counts once, however the name is spelt.
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
    """Return the names of those who said *verdicts*, each once."""
    return ", ".join(dict.fromkeys(each.user_name for each in verdicts))


def reason_of(ruling: Ruling, *, most_characters: int = 256) -> str:
    """Return the sentence that goes with a decision: who said it, and why; cut to what an agent keeps."""
    said = "; ".join(f"{each.user_name}: {each.reason}" if each.reason else each.user_name for each in ruling.verdicts)
    return said if len(said) <= most_characters else f"{said[: most_characters - 1]}…"
