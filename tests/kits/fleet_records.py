"""Records of many VMs about a few events, for Hypothesis and for single tests."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

from hypothesis import strategies as st

from bridge.clock import format_time
from bridge.events.event import ScheduledEvent, VmIdentity
from bridge.events.record import NAMESPACE, Approval, Evidence, Transition, TransitionRecord

NOW = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
MOST_VMS = 100
_EVENT_IDS = ("A", "B", "C")
_ENDINGS = (Transition.COMPLETED, Transition.CANCELED, Transition.ENDED)
_EVIDENCE_OF_ENDINGS = (Evidence.OBSERVED, Evidence.INFERRED, Evidence.BOOT_ID, Evidence.UNKNOWN)


def vm_id_of(number: int) -> str:
    """Return the vmId of the VM with that number."""
    return str(uuid.uuid5(NAMESPACE, f"vm {number}"))


def stream_id_of(vm: int, stream: int) -> str:
    """Return the UUIDv7 of a stream of *vm* that began *stream* minutes after `NOW`."""
    milliseconds = int((NOW + timedelta(minutes=stream)).timestamp() * 1000)
    random_bits = uuid.uuid5(NAMESPACE, f"stream {vm} {stream}").int & (2**62 - 1)
    return str(uuid.UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62 | random_bits))


def fleet_record(
    vm: int = 0,
    *,
    sequence: int = 1,
    stream: int = 0,
    event_id: str | None = "A",
    transition: Transition = Transition.SCHEDULED,
    evidence: Evidence = Evidence.OBSERVED,
    seconds: float = 0.0,
    resources: tuple[str, ...] = ("vm_0", "vm_1"),
    labels: dict[str, str] | None = None,
    active: tuple[str, ...] | None = None,
    **event_fields: Any,
) -> TransitionRecord:
    """Return a record of the VM with the number *vm*, observed *seconds* after `NOW`."""
    status = "Started" if transition is Transition.STARTED else "Scheduled"
    event = ScheduledEvent(
        **{
            "event_id": event_id,
            "event_type": "Freeze",
            "event_status": status,
            "resource_type": "VirtualMachine",
            "resources": resources,
            "not_before_raw": "Fri, 20 Nov 2026 11:15:00 GMT",
            "not_before": NOW + timedelta(minutes=15),
            "event_source": "Platform",
            "duration_seconds": 5,
            **event_fields,
        }
    )
    name = f"vm {vm} stream {stream} sequence {sequence} {event_id} {transition.value}"
    is_outcome = transition in {Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED}
    return TransitionRecord(
        id=str(uuid.uuid5(NAMESPACE, name)),
        transition_key="0" * 64,
        stream_id=stream_id_of(vm, stream),
        sequence=sequence,
        active_event_ids=active,
        transition=transition,
        evidence=evidence,
        observed_at=format_time(NOW + timedelta(seconds=seconds)),
        incarnation=sequence,
        previous_incarnation=None,
        event=None if transition is Transition.HEARTBEAT else event,
        previous=None,
        changed=(),
        notice_seconds=None,
        affects_this_vm=f"vm_{vm}" in resources,
        vm=VmIdentity(name=f"vm_{vm}", vm_id=vm_id_of(vm), resource_group="West", subscription_id="s"),
        labels={"team": "payments"} if labels is None else labels,
        approval=Approval(source="portal", result="accepted", approvers=("ops",)) if is_outcome else None,
    )


@st.composite
def histories(draw: st.DrawFn, *, most_vms: int = MOST_VMS) -> list[TransitionRecord]:
    """Draw the records of up to *most_vms* agents, each in its streams, in the order of each stream."""
    found = []
    for vm in draw(st.lists(st.integers(0, MOST_VMS - 1), min_size=1, max_size=most_vms, unique=True)):
        for stream in range(draw(st.integers(1, 2))):
            steps = draw(st.lists(_STEPS, min_size=1, max_size=4))
            for sequence, (event_id, transition, evidence, seconds, minutes, team, active) in enumerate(steps, start=1):
                is_ending = transition in _ENDINGS
                found.append(
                    fleet_record(
                        vm,
                        sequence=sequence,
                        stream=stream,
                        event_id=event_id,
                        transition=transition,
                        evidence=evidence if is_ending else Evidence.OBSERVED,
                        seconds=seconds,
                        labels={"team": team},
                        active=active,
                        not_before_raw=f"Fri, 20 Nov 2026 11:{minutes:02d}:00 GMT",
                    )
                )
    return found


#: A small range of times, so that many are equal and clocks go back.
_STEPS = st.tuples(
    st.sampled_from((*_EVENT_IDS, None)),
    st.sampled_from([each for each in Transition if each is not Transition.TEST]),
    st.sampled_from(_EVIDENCE_OF_ENDINGS),
    st.integers(0, 5),
    st.integers(14, 16),
    st.sampled_from(("payments", "search")),
    st.sampled_from((None, None, (), ("A",), ("A", "B"))),
)
