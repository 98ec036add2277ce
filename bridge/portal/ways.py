"""The way of each decision: queued for an agent, received by it, followed, or refused and why. Pure.

What an agent asks for next says what it has received; what became of it then, its outcome records say, which name the
decision by the SHA-256 of its text (PROTOCOL.md, sections 3 and 9). A hold that is followed makes no record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Enum

import msgspec

from bridge.events.record import Transition, TransitionRecord
from bridge.portal.signing import AgentSeen
from bridge.portal.store.stories import EventStory, SignedDecision
from bridge.portal.verdicts import Word


class Stage(str, Enum):
    """How far a decision has come."""

    QUEUED = "queued"
    RECEIVED = "received"
    FOLLOWED = "followed"
    REFUSED = "refused"
    EXPIRED = "expired"


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How far the decisions of one click have come, for the VMs where they have come equally far."""

    vms: tuple[str, ...]
    word: Word
    made_at: str
    stage: Stage
    because: str
    """What is known beside the stage; nothing, where that says all."""
    is_stopped: bool
    """Agents were told to hold the event after it."""

    @property
    def steps(self) -> str:
        """Return the stages up to this one, in words."""
        return _STEPS[self.stage]


_RESULTS = {
    "accepted": "Azure took it.",
    "already_approved": "Azure had an approval of it already.",
    "dry_run": "The agent only tries (dry_run): Azure was not told.",
    "gave_up": "It was tried until the event started or went.",
    "rejected": "Azure refused it; the agent goes on.",
    "unanswered": "Nobody knows whether Azure took it.",
    "disabled": "The file approvals.disabled exists there.",
    "superseded": "A newer decision won, or a hold.",
    "expired": "It had run out before it was checked.",
    "event_changed": "The event is not any more what was decided on.",
    "event_unknown": "That VM has no such event.",
    "event_not_scheduled": "The event had started already.",
    "unknown_key": "The agent does not trust the portal's key.",
    "too_few_approvers": "That VM wants more approvers than one key.",
}
_STEPS = {
    Stage.QUEUED: "queued",
    Stage.RECEIVED: "queued, received",
    Stage.FOLLOWED: "queued, received, followed",
    Stage.REFUSED: "queued, received, refused because:",
    Stage.EXPIRED: "queued, expired",
}
_NOT_FOLLOWED = frozenset({"dry_run"})


def ways_of(story: EventStory, agents: Mapping[str, AgentSeen], *, now: datetime) -> tuple[Way, ...]:
    """Return the way of every decision of *story*, oldest first."""
    outcomes = _newest_outcomes(story.outcomes)
    held_at = max((each.index for each in story.decisions if each.word is Word.HOLD), default=0)
    found: dict[tuple[str, Word, Stage, str, bool], list[str]] = {}
    for each in story.decisions:
        stage, because = _how_far(each, outcomes.get(each.jws_sha256), agents.get(each.vm_key), now=now)
        is_stopped = each.index < held_at
        if is_stopped and each.word is Word.APPROVE and stage in {Stage.QUEUED, Stage.RECEIVED}:
            because = "Agents were told to hold it after that."
        key = (each.made_at, each.word, stage, because, is_stopped)
        found.setdefault(key, []).append(each.vm_name or each.vm_key)
    return tuple(
        Way(vms=tuple(names), word=word, made_at=made_at, stage=stage, because=because, is_stopped=is_stopped)
        for (made_at, word, stage, because, is_stopped), names in found.items()
    )


def _newest_outcomes(outcomes: Iterable[TransitionRecord]) -> dict[str, TransitionRecord]:
    """Return the outcome that counts, by the hash of the decision: of several, that with the highest sequence."""
    found: dict[str, TransitionRecord] = {}
    for record in sorted(outcomes, key=lambda each: (each.observed_at, each.sequence)):
        if record.approval is not None:
            found |= dict.fromkeys(record.approval.jws_sha256, record)
    return found


def _how_far(
    decision: SignedDecision, outcome: TransitionRecord | None, agent: AgentSeen | None, *, now: datetime
) -> tuple[Stage, str]:
    if outcome is not None and outcome.approval is not None:
        result = outcome.approval.result
        followed = outcome.transition is Transition.APPROVED and result not in _NOT_FOLLOWED
        because = _RESULTS.get(result, f"{result}: {outcome.approval.reason or 'no reason was given'}")
        return (Stage.FOLLOWED if followed else Stage.REFUSED), because
    if agent is not None and agent.received_index >= decision.index:
        # A hold is followed by doing nothing, and no record tells of it.
        return Stage.RECEIVED, "The agent starts nothing early." if decision.word is Word.HOLD else ""
    if decision.word is Word.APPROVE and decision.expires_at_seconds <= now.timestamp():
        return Stage.EXPIRED, "It ran out before the agent asked."
    if agent is None:
        return Stage.QUEUED, "Its agent has not asked for decisions."
    return Stage.QUEUED, "" if agent.is_connected else "Its agent is not connected."
