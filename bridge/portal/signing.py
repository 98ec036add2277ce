"""Signs decisions and selects the VMs that receive them.

Azure accepts the first approval of an event, so an approval from one VM is enough. If possible, the portal sends the
approval to two VMs in case one agent fails. It selects connected agents that report the current version of the event,
trust the portal's key, and would act on the approval.

A hold must reach every VM that can approve the event. The portal sends the hold to all VMs of the event and to all
known VMs in the same resource groups (PROTOCOL.md, section 1).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from bridge.approval.signing import DecisionSigner
from bridge.clock import format_time
from bridge.portal.connected_agents import AgentSeen
from bridge.portal.fleet import EventState, State, VmOfEvent
from bridge.portal.store.decisions import NewDecision
from bridge.portal.verdicts import Choice, Ruling, reason_of
from bridge.text import one_line

_ASKED_TO_APPROVE = 2
_HOLD_SECONDS = 86_400.0
_STREAM = "stream:"

NO_AGENT = "No agent would follow an approval now"


def addressees(event: EventState, agents: Mapping[str, AgentSeen], kid: str) -> tuple[VmOfEvent, ...]:
    """Return at most two VMs that get an approval, the best VM first."""
    able = [
        vm
        for vm in event.vms
        if _has_vm_id(vm.vm_key)
        and vm.digest == event.digest
        and vm.state is State.SCHEDULED
        and (seen := agents.get(vm.vm_key)) is not None
        and seen.why_not(kid) is None
    ]
    return tuple(sorted(able, key=lambda vm: (vm.affects_this_vm is not True, vm.vm_key))[:_ASKED_TO_APPROVE])


def why_unreachable(event: EventState, agents: Mapping[str, AgentSeen], kid: str) -> str:
    """Return, for each VM, why no agent would act on an approval; "" if one would."""
    if addressees(event, agents, kid):
        return ""
    found = []
    for vm in event.vms:
        seen = agents.get(vm.vm_key)
        why = "has never polled for decisions" if seen is None else seen.why_not(kid)
        found.append(f"{vm.vm.name or vm.vm_key} {why or 'reports another version of the event'}")
    return "; ".join(found)


class PortalKey:
    """The private key of the portal, which signs decisions."""

    def __init__(self, signer: DecisionSigner) -> None:
        self._signer = signer

    @property
    def kid(self) -> str:
        """Return the name under which the VMs trust the key."""
        return self._signer.kid

    def approvals(
        self, event: EventState, ruling: Ruling, vms: Iterable[VmOfEvent], *, now: datetime
    ) -> tuple[NewDecision, ...]:
        """Return an approval of *event* for each of *vms*, until its first verdict expires."""
        until = min(each.expires_at for each in ruling.verdicts)
        seconds = (datetime.fromisoformat(until) - now).total_seconds()
        return tuple(self._new(event, ruling, vm.vm_key, Choice.APPROVE, seconds=seconds, now=now) for vm in vms)

    def holds(
        self, event: EventState, ruling: Ruling, vm_keys: Sequence[str], *, now: datetime
    ) -> tuple[NewDecision, ...]:
        """Return a hold of *event* for each of *vm_keys*.

        VMs without a vmId get no hold, because they never poll.
        """
        asked = [key for key in vm_keys if _has_vm_id(key)]
        return tuple(self._new(event, ruling, key, Choice.HOLD, seconds=_HOLD_SECONDS, now=now) for key in asked)

    def _new(
        self, event: EventState, ruling: Ruling, vm_key: str, choice: Choice, *, seconds: float, now: datetime
    ) -> NewDecision:
        verdict = ruling.verdicts[-1]
        jti = str(uuid.uuid4())
        reason = one_line(reason_of(ruling))
        jws = self._signer.sign(
            vm_key, event.event, choice.value, now=now, valid_seconds=seconds, reason=reason or None, jti=jti
        )
        expires_at = now + timedelta(seconds=seconds)
        return NewDecision(
            vm_key=vm_key,
            event_key=event.key,
            jti=jti,
            iss=self._signer.approver,
            decision=choice.value,
            jws=jws,
            expires_at_seconds=math.ceil(expires_at.timestamp()),
            verdict_id=verdict.verdict_id,
            details={
                "event_id": event.event.event_id,
                "event_digest": event.digest,
                "kid": self.kid,
                "reason": reason,
                "issued_at": format_time(now),
                "expires_at": format_time(expires_at),
            },
        )


def _has_vm_id(vm_key: str) -> bool:
    return not vm_key.startswith(_STREAM)
