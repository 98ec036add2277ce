"""Signs decisions and selects the VMs that receive them.

An approval goes to every confirmed VM that reports the shown version as Scheduled, if its agent is connected and would
act on the approval. Azure accepts the first approval, even while other VMs run a command, such as a drain. Therefore,
if an agent of an event with several VMs runs a command before it approves, the approval goes only to VMs whose command
covers all VMs of the event. If any of these VMs are attested, the approval goes only to the first attested VM.

A hold must reach every VM that can approve the event. The portal sends the hold to all VMs of the event and to all
known VMs in the same resource groups (PROTOCOL.md, section 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone

from bridge.approval.signing import DecisionSigner
from bridge.portal.connected_agents import AgentSeen
from bridge.portal.fleet import EventState, State, VmOfEvent
from bridge.portal.store.decisions import NewDecision
from bridge.portal.verdicts import Choice, Outcome, Ruling, reason_of
from bridge.text import one_line

_HOLD_SECONDS = 86_400.0
_STREAM = "stream:"
_LEAST_STEP_SECONDS = 0.001


def addressees(event: EventState, agents: Mapping[str, AgentSeen], kid: str) -> tuple[VmOfEvent, ...]:
    """Return the VMs that get an approval."""
    able = [vm for vm in event.vms if _why_not(vm, event, agents, kid) is None]
    members = (agents.get(vm.vm_key) for vm in event.vms if vm.is_member)
    if not any(seen.report.command for seen in members if seen is not None):
        return tuple(able)
    covering = [vm for vm in able if agents[vm.vm_key].report.command_covers_all]
    # An agent with a shared token can invent VMs and commands, so a single VM without attestation might not exist.
    attested = [vm for vm in covering if agents[vm.vm_key].is_attested]
    if covering:
        return tuple(attested[:1] or covering)
    return tuple(able) if len(set(event.event.resources or ())) == 1 else ()


def why_unreachable(event: EventState, agents: Mapping[str, AgentSeen], kid: str) -> str:
    """Return a sentence with a reason for each VM if no agent would act on an approval, or ""."""
    if addressees(event, agents, kid):
        return ""
    no_command = "has no command that covers all VMs of the event"
    members = [vm for vm in event.vms if vm.is_member]
    reasons = [f"{vm.name or vm.vm_key} {_why_not(vm, event, agents, kid) or no_command}" for vm in members]
    reasons = reasons or ["no VM of the event reports the event"]
    return f"No agent would follow an approval now: {'; '.join(reasons)}."


def _why_not(vm: VmOfEvent, event: EventState, agents: Mapping[str, AgentSeen], kid: str) -> str | None:
    """Return the reason why the agent of *vm* would not act on an approval, or None."""
    seen = agents.get(vm.vm_key)
    if seen is None or not _has_vm_id(vm.vm_key):
        return "has not polled for decisions within the last day"
    why = seen.why_not(kid)
    if why is not None:
        return why
    if vm.digest != event.digest:
        return "reports another version of the event"
    if not vm.is_confirmed:
        return "is not confirmed"
    return None if vm.state is State.SCHEDULED else "reports that the event is not scheduled"


def decisions_for(
    vm_keys: Iterable[str],
    event: EventState,
    ruling: Ruling,
    *,
    signer: DecisionSigner,
    now: datetime,
    newest_iat: float,
) -> tuple[NewDecision, ...]:
    """Return a hold or an approval of *event* for each of *vm_keys*.

    An approval expires when the first of its verdicts expires. VMs without a vmId get no decision, because they never
    poll. *newest_iat* is the latest `iat` of all decisions on the event. The `iat` of a new approval must be later than
    the `iat` of every hold.
    """
    is_hold = ruling.outcome is Outcome.HELD
    until = min(datetime.fromisoformat(each.expires_at) for each in ruling.verdicts)
    seconds = _HOLD_SECONDS if is_hold else (until - now).total_seconds()
    earliest = newest_iat if is_hold else newest_iat + _LEAST_STEP_SECONDS
    issued_at = max(now, datetime.fromtimestamp(earliest, timezone.utc))
    expires_at = issued_at + timedelta(seconds=seconds)
    choice = Choice.HOLD.value if is_hold else Choice.APPROVE.value
    reason = one_line(reason_of(ruling)) or None
    return tuple(
        NewDecision(
            vm_key=vm_key,
            event_key=event.key,
            decision=choice,
            jws=signer.sign(vm_key, event.event, choice, now=issued_at, valid_seconds=seconds, reason=reason),
            issued_at_seconds=issued_at.timestamp(),
            expires_at_seconds=math.ceil(expires_at.timestamp()),
            verdict_id=ruling.verdicts[-1].verdict_id,
        )
        for vm_key in vm_keys
        if _has_vm_id(vm_key)
    )


def _has_vm_id(vm_key: str) -> bool:
    return not vm_key.startswith(_STREAM)
