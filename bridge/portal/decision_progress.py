"""How far each decision of an event has come, and whether Azure accepted an approval. Pure.

The index that an agent polls with shows the decisions that it has received. An outcome record names a decision by the
SHA-256 of its text and reports the result (PROTOCOL.md, sections 3 and 9). A hold produces no outcome record. The
record `approved` with the result `accepted` or `already_approved` means that Azure accepted the approval, and no one
can stop the event any more. A dry run and a refusal leave the event undecided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum

import msgspec

from bridge.approval.digest import digest
from bridge.clock import parse_time
from bridge.events.record import Transition, TransitionRecord
from bridge.portal.fleet import State
from bridge.portal.signing import AgentSeen
from bridge.portal.store.event_details import EventDetails, SignedDecision
from bridge.portal.verdicts import Choice, Verdict, people_of

_TAKEN = frozenset({"accepted", "already_approved"})
_RULE = "rule:"


class AcceptedApproval(msgspec.Struct, frozen=True, kw_only=True):
    """An approval that Azure accepted."""

    at: str
    """`observed_at` of the agent's outcome record."""
    by: str
    """The approvers, for a sentence; empty: unknown."""
    verdicts: tuple[Verdict, ...]
    """The approvals behind it; empty: it was signed elsewhere, or a rule approved."""

    @property
    def clock(self) -> str:
        """Return the time of day."""
        return f"{parse_time(self.at):%H:%M:%S} UTC"

    @property
    def sentence(self) -> str:
        """Return the sentence for an event that Azure still shows as Scheduled."""
        approved = f"Approved by {self.by}" if self.by else "Approved"
        return f"{approved}; Azure was told at {self.clock}: it may start at any moment and can no longer be stopped."


def accepted_approval(details: EventDetails) -> AcceptedApproval | None:
    """Return the approval of the event that Azure accepted; None if there is none.

    While the event is Scheduled, only an approval of the event with its current digest counts. After a change by Azure,
    a person can hold the event again.
    """
    accepted = [each for each in details.outcomes if is_accepted(each)]
    if details.event.state is State.SCHEDULED:
        accepted = [each for each in accepted if each.event is not None and digest(each.event) == details.event.digest]
    if not accepted:
        return None
    first = min(accepted, key=lambda each: (parse_time(each.observed_at), each.id))
    verdicts = _verdicts_behind(first, details)
    return AcceptedApproval(at=first.observed_at, by=people_of(verdicts) or _approver_of(first), verdicts=verdicts)


def is_accepted(record: TransitionRecord) -> bool:
    """Return whether Azure accepted the approval of *record*."""
    approval = record.approval
    return record.transition is Transition.APPROVED and approval is not None and approval.result in _TAKEN


def _verdicts_behind(record: TransitionRecord, details: EventDetails) -> tuple[Verdict, ...]:
    """Return the approvals that counted when the portal signed the decisions behind *record*."""
    hashes = set() if record.approval is None else set(record.approval.jws_sha256)
    signed = [each for each in details.decisions if each.jws_sha256 in hashes and each.verdict_id is not None]
    if not signed:
        return ()
    at = max(each.made_at for each in signed)
    named = {each.verdict_id for each in signed}
    digests = {each.digest for each in details.verdicts if each.verdict_id in named}
    return tuple(each for each in _approvals(details.verdicts) if each.digest in digests and _stood(each, at))


def _approvals(verdicts: Iterable[Verdict]) -> Iterable[Verdict]:
    return (each for each in verdicts if each.choice is Choice.APPROVE)


def _stood(verdict: Verdict, at: str) -> bool:
    return verdict.made_at <= at < verdict.expires_at and (verdict.withdrawn_at is None or verdict.withdrawn_at >= at)


def _approver_of(record: TransitionRecord) -> str:
    approval = record.approval
    if approval is None:
        return ""
    if approval.source.startswith(_RULE):
        return f"the rule {approval.source.removeprefix(_RULE)} of {record.vm.name or record.vm.vm_id or 'a VM'}"
    return ", ".join(dict.fromkeys(approval.approvers))


class Stage(str, Enum):
    """The progress of a decision."""

    QUEUED = "queued"
    RECEIVED = "received"
    FOLLOWED = "followed"
    REFUSED = "refused"
    EXPIRED = "expired"


class DecisionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of the decisions of one verdict, for the VMs with equal progress."""

    vms: tuple[str, ...]
    choice: Choice
    made_at: str
    stage: Stage
    because: str
    """An explanation of the stage; can be empty."""
    is_stopped: bool
    """A later decision holds the event."""
    is_past: bool
    """It has no effect any more."""
    before: str
    """The text before the names of the VMs."""
    after: str
    """The text after the names of the VMs."""

    @property
    def steps(self) -> str:
        """Return the stages up to this one, as text."""
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


def progress_of(
    details: EventDetails, agents: Mapping[str, AgentSeen], *, now: datetime, accepted: AcceptedApproval | None = None
) -> tuple[DecisionProgress, ...]:
    """Return the progress of every decision of *details*, oldest first."""
    outcomes = _newest_outcomes(details.outcomes)
    held_at = max((each.index for each in details.decisions if each.choice is Choice.HOLD), default=0)
    approved_at = max((each.index for each in details.decisions if each.choice is Choice.APPROVE), default=0)
    found: dict[tuple[str, Choice, Stage, str, bool, bool, str], list[str]] = {}
    for each in details.decisions:
        stage, because = _how_far(each, outcomes.get(each.jws_sha256), agents.get(each.vm_key), now=now)
        is_stopped = each.index < held_at
        if each.choice is Choice.HOLD:
            is_past, because = _what_of_a_hold(
                each, details, (stage, because), accepted, is_before_approval=each.index < approved_at
            )
        else:
            is_past, because = _what_of_an_approval(stage, because, accepted, is_stopped=is_stopped)
        before = _before(each, stage, details, is_past=is_past)
        key = (each.made_at, each.choice, stage, because, is_stopped, is_past, before)
        found.setdefault(key, []).append(each.vm_name or each.vm_key)
    count = len(dict.fromkeys(details.event.event.resources or ())) or len(details.event.vms)
    return tuple(
        DecisionProgress(
            vms=tuple(names),
            choice=choice,
            made_at=made_at,
            stage=stage,
            because=because,
            is_stopped=is_stopped,
            is_past=is_past,
            before=before,
            after=_after(choice, stage, names, count, is_past=is_past),
        )
        for (made_at, choice, stage, because, is_stopped, is_past, before), names in found.items()
    )


def _what_of_a_hold(
    hold: SignedDecision,
    details: EventDetails,
    far: tuple[Stage, str],
    accepted: AcceptedApproval | None,
    *,
    is_before_approval: bool,
) -> tuple[bool, str]:
    """Return whether *hold* has no effect any more, and an explanation of its stage."""
    stage, because = far
    if is_before_approval:
        return True, "An approval came after it."
    if accepted is not None:
        return True, f"Too late: Azure was told at {accepted.clock}."
    if details.event.state is not State.SCHEDULED:
        return True, ""
    said = next((each for each in details.verdicts if each.verdict_id == hold.verdict_id), None)
    is_held = any(each.choice is Choice.HOLD and each.withdrawn_at is None for each in details.verdicts)
    if said is not None and said.choice is Choice.HOLD and not is_held:
        # PROTOCOL.md, section 8: the rules of a VM that has it stay stopped until an approval comes.
        stopped = " The rules of that VM stay stopped until somebody approves." if stage is Stage.RECEIVED else ""
        return True, f"Taken back since.{stopped}"
    return False, because


def _what_of_an_approval(
    stage: Stage, because: str, accepted: AcceptedApproval | None, *, is_stopped: bool
) -> tuple[bool, str]:
    """Return whether an approval has no effect any more, and an explanation of its stage."""
    if stage not in _UNDER_WAY:
        return stage is Stage.EXPIRED, because
    if accepted is not None:
        return True, because or f"Azure was told at {accepted.clock}."
    return is_stopped, "Agents were told to hold it after that." if is_stopped else because


def _before(decision: SignedDecision, stage: Stage, details: EventDetails, *, is_past: bool) -> str:
    if decision.choice is Choice.HOLD:
        said = {each.verdict_id: each.choice for each in details.verdicts}.get(decision.verdict_id or "")
        what = "Stop of the approval" if said is Choice.APPROVE else "Hold of this event"
        return f"{what}, for every agent that could start it early:"
    if stage is Stage.FOLLOWED:
        return "Approval told to Azure by"
    return "Approval to be told to Azure by" if stage in _UNDER_WAY and not is_past else "Approval for the agent of"


def _after(choice: Choice, stage: Stage, names: Sequence[str], count: int, *, is_past: bool) -> str:
    """Return the number of VMs for which an approval counts. One or two agents send it to Azure."""
    if choice is Choice.HOLD or is_past or stage in {Stage.REFUSED, Stage.EXPIRED}:
        return ""
    first = "one of them is enough; " if len(names) > 1 and stage is not Stage.FOLLOWED else ""
    return f"({first}it counts for all {count} VMs)" if count > 1 else ""


def _newest_outcomes(outcomes: Iterable[TransitionRecord]) -> dict[str, TransitionRecord]:
    """Return the newest outcome record of each decision, by the hash of the decision."""
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
        # A hold produces no outcome record.
        return Stage.RECEIVED, "The agent starts nothing early." if decision.choice is Choice.HOLD else ""
    if decision.choice is Choice.APPROVE and decision.expires_at_seconds <= now.timestamp():
        return Stage.EXPIRED, "It ran out before the agent asked."
    if agent is None:
        return Stage.QUEUED, "Its agent has not asked for decisions."
    return Stage.QUEUED, "" if agent.is_connected else "Its agent is not connected."
