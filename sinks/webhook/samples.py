"""The records that test a template: each transition of its sink, with all fields and with every null.

A template that renders a complete record may still fail on a real one: an event that has started has no NotBefore, an
event of an older api-version has no description, and a VM whose identity is unknown has no name. EventId, EventType,
and Resources are never null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec

from bridge.sink import Evidence, ScheduledEvent, SinkConfig, Transition, TransitionRecord, VmIdentity

_AWKWARD = 'He said "soon",\\ then\n<nothing> \u2014 {{ & }}'
_APPROVALS = frozenset({Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})
_WITHOUT_EVENT = _APPROVALS | {Transition.HEARTBEAT}
_CHANGED = frozenset({Transition.UPDATED, Transition.STARTED})

_EVENT = ScheduledEvent(
    event_id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    event_type="Freeze",
    event_status="Scheduled",
    resource_type="VirtualMachine",
    resources=("WestNO_0", "WestNO_1"),
    not_before=datetime(2026, 11, 20, 11, 15, tzinfo=timezone.utc),
    not_before_raw="Fri, 20 Nov 2026 11:15:00 GMT",
    description=_AWKWARD,
    event_source="Platform",
    duration_seconds=5,
)
_VM = VmIdentity(
    name="WestNO_0",
    vm_id="a3d7b4a0-0000-4000-8000-000000000000",
    resource_id="/subscriptions/0/resourceGroups/west/providers/Microsoft.Compute/virtualMachines/WestNO_0",
    subscription_id="0",
    resource_group="west",
    location="westeurope",
    scale_set="west",
    zone="1",
    placement_group_id="b4d7b4a0-0000-4000-8000-000000000000",
    tags={"note": _AWKWARD},
)
#: The fields that may be null. `previous` is null only in a `started` record without an announcement.
_NULLS = {
    "event": ("not_before", "not_before_raw", "description", "event_source", "duration_seconds"),
    "previous": ("not_before",),
    "vm": tuple(name for name in VmIdentity.__struct_fields__ if name != "tags"),
    "approval": ("decision_id", "reason", "http_status"),
}


def samples(config: SinkConfig, labels: Mapping[str, str]) -> Iterator[TransitionRecord]:
    """Yield the records that a sink with *config* may get, each with *labels*."""
    for transition in Transition:
        is_heartbeat = transition is Transition.HEARTBEAT
        is_sent = config.transitions is None or transition.value in config.transitions
        if not (config.heartbeat if is_heartbeat else is_sent or transition is Transition.TEST):
            continue
        full = {**_full(transition), "labels": dict(labels)}
        if not is_heartbeat:
            yield _record(full)
            yield _record(_bare(full))
        if transition in _WITHOUT_EVENT:
            yield _record({**full, **dict.fromkeys(("event", "notice_seconds", "affects_this_vm", "previous"))})


def sample_to_check() -> TransitionRecord:
    """Return a record of transition `test`."""
    return _record(_full(Transition.TEST))


def _bare(full: dict[str, Any]) -> dict[str, Any]:
    """Return *full* with null in every field that may be null."""
    made = {**full, "notice_seconds": None, "affects_this_vm": None}
    for outer, names in _NULLS.items():
        if full[outer] is not None:
            made[outer] = {**full[outer], **dict.fromkeys(names)}
    made["vm"]["tags"] = {}
    if full["transition"] == Transition.STARTED:
        made["previous"] = None
    return made


def _full(transition: Transition) -> dict[str, Any]:
    """Return a record of *transition* as plain values, with every field that it may have."""
    approval = {"source": "portal", "decision_id": "d-1", "reason": _AWKWARD, "result": "sent", "http_status": 200}
    has_changed = transition in _CHANGED
    before = {"event_status": "Scheduled", "not_before": "2026-11-20T11:15:00Z"}
    return {
        "id": "7d6b5d5e-3f2f-5d7a-9a0a-5f1f2c7f9b11",
        "transition_key": "0" * 64,
        "stream_id": "01a1f89c-fb80-7000-8000-00000000a5a5",
        "sequence": 17,
        "active_event_ids": ["C7061BAC-AFDC-4513-B24B-AA5F13A16123"],
        "transition": transition.value,
        "evidence": Evidence.OBSERVED.value,
        "observed_at": "2026-11-20T11:00:01.123Z",
        "incarnation": 3,
        "previous_incarnation": 2,
        "event": msgspec.to_builtins(_EVENT),
        "previous": before if has_changed or transition.is_ending else None,
        "changed": ["event_status"] if has_changed else [],
        "notice_seconds": 898.877,
        "affects_this_vm": True,
        "vm": msgspec.to_builtins(_VM),
        "labels": {},
        "approval": approval if transition in _APPROVALS else None,
    }


def _record(values: dict[str, Any]) -> TransitionRecord:
    return msgspec.convert(values, TransitionRecord)
