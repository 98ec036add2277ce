"""Creates sample records to test the templates in the configuration.

For each transition, one sample record has a value in every field. In other samples, the fields that can be null in a
real record are null. For example, a started event has no `not_before`, and a VM whose identity is unknown has no name.
If a template fails for one of these records, the agent reports an error in the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec

from bridge.sink import Evidence, ScheduledEvent, SinkConfig, Transition, TransitionRecord, VmIdentity

_AWKWARD = 'He said "soon",\\ then\n<nothing> \u2014 {{ & }}'
_APPROVALS = frozenset({Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})
_CHANGED = frozenset({Transition.UPDATED, Transition.STARTED})

_BARE_EVENT = ScheduledEvent(
    event_id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    event_type="Freeze",
    event_status="Scheduled",
    resource_type="VirtualMachine",
    resources=("WestNO_0", "WestNO_1"),
)
_EVENT = msgspec.structs.replace(
    _BARE_EVENT,
    not_before=datetime(2026, 11, 20, 11, 15, tzinfo=timezone.utc),
    not_before_raw="Fri, 20 Nov 2026 11:15:00 GMT",
    description=_AWKWARD,
    event_source="Platform",
    duration_seconds=5,
)
_VM_FIELDS: dict[str, Any] = dict.fromkeys(VmIdentity.__struct_fields__, "WestNO_0")
_VM = VmIdentity(**_VM_FIELDS | {"resource_id": "/subscriptions/WestNO_0", "tags": {"note": _AWKWARD}})
_APPROVAL = {"source": "portal", "result": "sent", "decision_id": "d-1", "reason": _AWKWARD, "http_status": 200}


def samples(config: SinkConfig, labels: Mapping[str, str]) -> Iterator[TransitionRecord]:
    """Yield sample records with *labels* for the transitions that *config* selects."""
    for transition in Transition:
        is_heartbeat, is_approval = transition is Transition.HEARTBEAT, transition in _APPROVALS
        is_sent = config.transitions is None or transition.value in config.transitions
        if not (config.heartbeat if is_heartbeat else is_sent or transition is Transition.TEST):
            continue
        full = sample(transition, labels)
        if not is_heartbeat:
            yield full
            # Only the `started` record of an unannounced event has no previous state.
            previous = None if transition is Transition.STARTED else full.previous
            yield msgspec.structs.replace(
                full,
                event=_BARE_EVENT,
                previous=previous and {**previous, "not_before": None},
                notice_seconds=None,
                affects_this_vm=None,
                vm=VmIdentity(),
                approval=full.approval
                and msgspec.structs.replace(full.approval, decision_id=None, reason=None, http_status=None),
            )
        if is_heartbeat or is_approval:
            yield msgspec.structs.replace(full, event=None, notice_seconds=None, affects_this_vm=None, previous=None)


def sample(transition: Transition, labels: Mapping[str, str] | None = None) -> TransitionRecord:
    """Return a sample record with a value in every field."""
    has_changed = transition in _CHANGED
    before = {"event_status": "Scheduled", "not_before": "2026-11-20T11:15:00Z"}
    values = {
        "id": "7d6b5d5e-3f2f-5d7a-9a0a-5f1f2c7f9b11",
        "transition_key": "0" * 64,
        "stream_id": "01a1f89c-fb80-7000-8000-00000000a5a5",
        "sequence": 17,
        "active_event_ids": (_EVENT.event_id,),
        "transition": transition,
        "evidence": Evidence.OBSERVED,
        "observed_at": "2026-11-20T11:00:01.123Z",
        "incarnation": 3,
        "previous_incarnation": 2,
        "event": _EVENT,
        "previous": before if has_changed or transition.is_ending else None,
        "changed": ("event_status",) if has_changed else (),
        "notice_seconds": 898.877,
        "affects_this_vm": True,
        "vm": _VM,
        "labels": dict(labels or {}),
        "approval": _APPROVAL if transition in _APPROVALS else None,
    }
    return msgspec.convert(values, TransitionRecord, from_attributes=True)
