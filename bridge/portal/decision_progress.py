"""How far each decision of an event has come, and whether Azure accepted an approval. Pure.

The index that an agent polls with shows the decisions that it has received. An outcome record names a decision by the
SHA-256 of its text and reports the result (PROTOCOL.md, sections 3 and 9). A hold produces no outcome record. The
record `approved` with the result `accepted` or `already_approved` means that Azure accepted the approval, and no one
can stop the event any more. A dry run and a refusal leave the event undecided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        return f"{approved}, and posted to Azure at {self.clock}. It can start at any moment. No one can stop it."


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
    """The progress of decisions that were made together, for the VMs with equal progress."""

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


_NOT_FOLLOWED = frozenset({"dry_run"})
_UNDER_WAY = frozenset({Stage.QUEUED, Stage.RECEIVED})


def progress_of(
    details: EventDetails, agents: Mapping[str, AgentSeen], *, now: datetime, accepted: AcceptedApproval | None = None
) -> tuple[DecisionProgress, ...]:
    """Return the progress of every decision of *details*, oldest first."""
    outcomes = _newest_outcomes(details.outcomes)
    newest = {each.choice: each.index for each in details.decisions}
    found: dict[DecisionProgress, list[str]] = {}
    for each in details.decisions:
        stage, because = _stage_of(each, outcomes.get(each.jws_sha256), agents.get(each.vm_key), now=now)
        is_stopped = each.index < newest.get(Choice.HOLD, 0)
        if each.choice is Choice.HOLD:
            why_past = _why_hold_is_past(each, stage, details, accepted, approved_at=newest.get(Choice.APPROVE, 0))
        else:
            why_past = _why_approval_is_past(stage, because, accepted, is_stopped=is_stopped)
        progress = DecisionProgress(
            vms=(),
            choice=each.choice,
            made_at=each.made_at,
            stage=stage,
            because=because if why_past is None else why_past,
            is_stopped=is_stopped,
            is_past=why_past is not None,
        )
        found.setdefault(progress, []).append(each.vm_name or each.vm_key)
    return tuple(msgspec.structs.replace(progress, vms=tuple(names)) for progress, names in found.items())


def _why_hold_is_past(
    hold: SignedDecision, stage: Stage, details: EventDetails, accepted: AcceptedApproval | None, *, approved_at: int
) -> str | None:
    """Return the reason why *hold* has no effect any more, which can be empty; None if it has an effect."""
    if hold.index < approved_at:
        return "A later approval replaced the hold."
    if accepted is not None:
        return f"Too late: the approval was posted to Azure at {accepted.clock}."
    if details.event.state is not State.SCHEDULED:
        return ""
    verdict = next((each for each in details.verdicts if each.verdict_id == hold.verdict_id), None)
    is_held = any(each.choice is Choice.HOLD and each.withdrawn_at is None for each in details.verdicts)
    if verdict is None or verdict.choice is not Choice.HOLD or is_held:
        return None
    # PROTOCOL.md, section 8: the rules of a VM with the hold stay stopped until an approval arrives.
    rules = " The rules of this VM stay stopped until the next approval." if stage is Stage.RECEIVED else ""
    return f"Withdrawn.{rules}"


def _why_approval_is_past(
    stage: Stage, because: str, accepted: AcceptedApproval | None, *, is_stopped: bool
) -> str | None:
    """Return the reason why an approval has no effect any more, which can be empty; None if it has an effect."""
    if stage not in _UNDER_WAY:
        return because if stage is Stage.EXPIRED else None
    if accepted is not None:
        return because or f"Azure accepted an approval at {accepted.clock}."
    return "A later hold stops it." if is_stopped else None


def _newest_outcomes(outcomes: Iterable[TransitionRecord]) -> dict[str, TransitionRecord]:
    """Return the newest outcome record of each decision, by the hash of the decision."""
    found: dict[str, TransitionRecord] = {}
    for record in sorted(outcomes, key=lambda each: (each.observed_at, each.sequence)):
        if record.approval is not None:
            found |= dict.fromkeys(record.approval.jws_sha256, record)
    return found


def _stage_of(
    decision: SignedDecision, outcome: TransitionRecord | None, agent: AgentSeen | None, *, now: datetime
) -> tuple[Stage, str]:
    if outcome is not None and outcome.approval is not None:
        result = outcome.approval.result
        followed = outcome.transition is Transition.APPROVED and result not in _NOT_FOLLOWED
        if followed:
            return Stage.FOLLOWED, ""
        return Stage.REFUSED, f"{outcome.approval.reason or 'No reason.'} ({result})"
    if agent is not None and agent.received_index >= decision.index:
        # A hold produces no outcome record.
        return Stage.RECEIVED, "The agent does not start the event early." if decision.choice is Choice.HOLD else ""
    if decision.choice is Choice.APPROVE and decision.expires_at_seconds <= now.timestamp():
        return Stage.EXPIRED, "It expired before the agent polled."
    if agent is None:
        return Stage.QUEUED, "The agent has never polled for decisions."
    return Stage.QUEUED, "" if agent.is_connected else "The agent is not connected."
