"""Computes the progress of the decisions on an event.

The index in an agent's poll shows which decisions the agent has received. After an agent accepts or refuses an
approval, it sends a record that contains the result and the SHA-256 hash of the decision (PROTOCOL.md, sections 3 and
9). Agents do not send a record when they receive a hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from typing import Any

import msgspec

from bridge.approval.digest import digest
from bridge.clock import parse_time
from bridge.events.record import Transition, TransitionRecord
from bridge.portal.connected_agents import AgentSeen, Connection
from bridge.portal.fleet import State
from bridge.portal.store.event_details import EventDetails, SignedDecision
from bridge.portal.verdicts import Choice, Verdict, people_of

_TAKEN = frozenset({"accepted", "already_approved"})
_RULE = "rule:"


class AcceptedApproval(msgspec.Struct, frozen=True, kw_only=True):
    """An approval that Azure accepted."""

    at: str
    """`observed_at` of the agent's outcome record."""
    by: str
    """The names of the approvers, or "" if they are unknown."""
    vm_names: str
    """The VMs that report the approval."""
    verdicts: tuple[Verdict, ...]
    """The approvals of people. Empty if a rule approved the event, or if the decision was signed elsewhere."""

    @property
    def clock(self) -> str:
        """Return the time of day."""
        return f"{parse_time(self.at):%H:%M:%S} UTC"


def accepted_approval(details: EventDetails) -> AcceptedApproval | None:
    """Return the approval of the event that Azure accepted, or None.

    If Azure changes a Scheduled event after an approval, the approval no longer counts, and people must decide on
    the new version.
    """
    accepted = [each for each in details.outcomes if is_accepted(each)]
    if details.event.state is State.SCHEDULED:
        accepted = [each for each in accepted if each.event is not None and digest(each.event) == details.event.digest]
    if not accepted:
        return None
    first = min(accepted, key=lambda each: (parse_time(each.observed_at), each.id))
    verdicts = _verdicts_behind(first, details)
    names = dict.fromkeys(each.vm.name or each.vm.vm_id or "a VM" for each in accepted)
    return AcceptedApproval(
        at=first.observed_at,
        by=people_of(verdicts) or _approver_of(first),
        vm_names=", ".join(names),
        verdicts=verdicts,
    )


def is_accepted(record: TransitionRecord) -> bool:
    """Return whether *record* reports an approval that Azure accepted."""
    approval = record.approval
    return record.transition is Transition.APPROVED and approval is not None and approval.result in _TAKEN


def _verdicts_behind(record: TransitionRecord, details: EventDetails) -> tuple[Verdict, ...]:
    """Return the approvals that counted when the portal signed the decisions behind *record*."""
    hashes = set() if record.approval is None else set(record.approval.jws_sha256)
    signed = [each for each in details.decisions if each.jws_sha256 in hashes and each.verdict_id is not None]
    at = max((each.made_at for each in signed), default="")
    digests = {each.digest for each in details.verdicts if each.verdict_id in {one.verdict_id for one in signed}}
    return tuple(
        each
        for each in details.verdicts
        if each.choice is Choice.APPROVE
        and each.digest in digests
        and each.made_at <= at < each.expires_at
        and (each.withdrawn_at is None or each.withdrawn_at >= at)
    )


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


class DecisionProgress(msgspec.Struct, frozen=True):
    """The progress of a decision, which is the same for all VMs in *vm_keys*."""

    vm_keys: tuple[str, ...]
    choice: Choice
    made_at: str
    stage: Stage
    because: str
    is_stopped: bool
    is_past: bool
    """Whether the decision no longer has an effect."""


UNDER_WAY = frozenset({Stage.QUEUED, Stage.RECEIVED})
_AWAY = {
    Connection.CONNECTED: "",
    Connection.RECONNECTING: "The agent is reconnecting to the portal.",
    Connection.DISCONNECTED: "The agent is not connected.",
}


def progress_of(
    details: EventDetails, agents: Mapping[str, AgentSeen], accepted: AcceptedApproval | None, *, now: datetime
) -> tuple[DecisionProgress, ...]:
    """Return the progress of every decision of *details*, oldest first."""
    outcomes: dict[str, TransitionRecord] = {}
    for record in sorted(details.outcomes, key=lambda each: (each.observed_at, each.sequence)):
        if record.approval is not None:
            outcomes |= dict.fromkeys(record.approval.jws_sha256, record)
    is_over = details.event.state is not State.SCHEDULED or accepted is not None
    holds = [each for each in details.verdicts if each.choice is Choice.HOLD]
    lifted = {each.verdict_id for each in holds} if all(each.withdrawn_at for each in holds) else set()
    newest = {each.choice: each.index for each in details.decisions}
    found: dict[tuple[Any, ...], list[str]] = {}
    for each in details.decisions:
        stage, because = _stage_of(each, outcomes.get(each.jws_sha256), agents.get(each.vm_key), now=now)
        is_stopped = each.index < newest.get(Choice.HOLD, 0)
        if each.choice is Choice.HOLD:
            is_past = is_over or each.index < newest.get(Choice.APPROVE, 0) or each.verdict_id in lifted
            because = "" if is_past else because
        else:
            is_past = stage is Stage.EXPIRED or (stage in UNDER_WAY and (accepted is not None or is_stopped))
        found.setdefault((each.choice, each.made_at, stage, because, is_stopped, is_past), []).append(each.vm_key)
    return tuple(DecisionProgress(tuple(keys), *same) for same, keys in found.items())


def _stage_of(
    decision: SignedDecision, outcome: TransitionRecord | None, agent: AgentSeen | None, *, now: datetime
) -> tuple[Stage, str]:
    if outcome is not None and outcome.approval is not None:
        if is_accepted(outcome):
            return Stage.FOLLOWED, ""
        result = outcome.approval.result
        clocks = " The clock of the portal or of the VM might be wrong." if result == "superseded" else ""
        return Stage.REFUSED, f"{outcome.approval.reason or 'No reason.'} ({result}){clocks}"
    if agent is not None and agent.received_index >= decision.index:
        return Stage.RECEIVED, "The agent does not start the event early." if decision.choice is Choice.HOLD else ""
    if decision.choice is Choice.APPROVE and decision.expires_at_seconds <= now.timestamp():
        return Stage.EXPIRED, "It expired before the agent polled."
    if agent is None:
        return Stage.QUEUED, "The agent has not polled for decisions within the last day."
    return Stage.QUEUED, _AWAY[agent.connection]
