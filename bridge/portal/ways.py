"""The way of each decision: queued for an agent, received by it, followed, or refused and why. Pure.

What an agent asks for next says what it has received; what became of it then, its outcome records say, which name the
decision by the SHA-256 of its text (PROTOCOL.md, sections 3 and 9). A hold that is followed makes no record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum

import msgspec

from bridge.events.record import Transition, TransitionRecord
from bridge.portal.fleet import State
from bridge.portal.signing import AgentSeen
from bridge.portal.store.stories import EventStory, SignedDecision
from bridge.portal.told_azure import ToldAzure
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
    is_past: bool
    """It changes nothing any more."""
    before: str
    """What it is, in the words that the VMs' names follow."""
    after: str
    """What follows the names."""

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
_UNDER_WAY = frozenset({Stage.QUEUED, Stage.RECEIVED})


def ways_of(
    story: EventStory, agents: Mapping[str, AgentSeen], *, now: datetime, told: ToldAzure | None = None
) -> tuple[Way, ...]:
    """Return the way of every decision of *story*, oldest first; *told*: Azure took an approval of its event."""
    outcomes = _newest_outcomes(story.outcomes)
    held_at = max((each.index for each in story.decisions if each.word is Word.HOLD), default=0)
    approved_at = max((each.index for each in story.decisions if each.word is Word.APPROVE), default=0)
    found: dict[tuple[str, Word, Stage, str, bool, bool, str], list[str]] = {}
    for each in story.decisions:
        stage, because = _how_far(each, outcomes.get(each.jws_sha256), agents.get(each.vm_key), now=now)
        is_stopped = each.index < held_at
        if each.word is Word.HOLD:
            is_past, because = _what_of_a_hold(
                each, story, (stage, because), told, is_before_approval=each.index < approved_at
            )
        else:
            is_past, because = _what_of_an_approval(stage, because, told, is_stopped=is_stopped)
        before = _before(each, stage, story, is_past=is_past)
        key = (each.made_at, each.word, stage, because, is_stopped, is_past, before)
        found.setdefault(key, []).append(each.vm_name or each.vm_key)
    count = len(dict.fromkeys(story.event.event.resources or ())) or len(story.event.vms)
    return tuple(
        Way(
            vms=tuple(names),
            word=word,
            made_at=made_at,
            stage=stage,
            because=because,
            is_stopped=is_stopped,
            is_past=is_past,
            before=before,
            after=_after(word, stage, names, count, is_past=is_past),
        )
        for (made_at, word, stage, because, is_stopped, is_past, before), names in found.items()
    )


def _what_of_a_hold(
    hold: SignedDecision, story: EventStory, far: tuple[Stage, str], told: ToldAzure | None, *, is_before_approval: bool
) -> tuple[bool, str]:
    """Return whether *hold* changes nothing any more, and what is known of it beside its stage."""
    stage, because = far
    if is_before_approval:
        return True, "An approval came after it."
    if told is not None:
        return True, f"Too late: Azure was told at {told.clock}."
    if story.event.state is not State.SCHEDULED:
        return True, ""
    said = next((each for each in story.verdicts if each.verdict_id == hold.verdict_id), None)
    is_held = any(each.word is Word.HOLD and each.withdrawn_at is None for each in story.verdicts)
    if said is not None and said.word is Word.HOLD and not is_held:
        # PROTOCOL.md, section 8: the rules of a VM that has it stay stopped until an approval comes.
        stopped = " The rules of that VM stay stopped until somebody approves." if stage is Stage.RECEIVED else ""
        return True, f"Taken back since.{stopped}"
    return False, because


def _what_of_an_approval(stage: Stage, because: str, told: ToldAzure | None, *, is_stopped: bool) -> tuple[bool, str]:
    """Return whether an approval changes nothing any more, and what is known of it beside its stage."""
    if stage not in _UNDER_WAY:
        return stage is Stage.EXPIRED, because
    if told is not None:
        return True, because or f"Azure was told at {told.clock}."
    return is_stopped, "Agents were told to hold it after that." if is_stopped else because


def _before(decision: SignedDecision, stage: Stage, story: EventStory, *, is_past: bool) -> str:
    if decision.word is Word.HOLD:
        said = {each.verdict_id: each.word for each in story.verdicts}.get(decision.verdict_id or "")
        what = "Stop of the approval" if said is Word.APPROVE else "Hold of this event"
        return f"{what}, for every agent that could start it early:"
    if stage is Stage.FOLLOWED:
        return "Approval told to Azure by"
    return "Approval to be told to Azure by" if stage in _UNDER_WAY and not is_past else "Approval for the agent of"


def _after(word: Word, stage: Stage, names: Sequence[str], count: int, *, is_past: bool) -> str:
    """Return for how many VMs an approval counts, of which one agent or two tell Azure."""
    if word is Word.HOLD or is_past or stage in {Stage.REFUSED, Stage.EXPIRED}:
        return ""
    first = "one of them is enough; " if len(names) > 1 and stage is not Stage.FOLLOWED else ""
    return f"({first}it counts for all {count} VMs)" if count > 1 else ""


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
