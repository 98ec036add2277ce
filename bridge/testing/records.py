"""Creates sample events and records for tests of sinks."""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from typing import Any

from bridge.events.event import ScheduledEvent, VmIdentity
from bridge.events.record import NAMESPACE, Evidence, Transition, TransitionRecord

VM = VmIdentity(
    name="WestNO_0",
    vm_id="f2a1c5d0-3b7e-4c1a-9d2e-6b8f0a4c7e11",
    resource_id="/subscriptions/11111111-2222-4333-8444-555555555555/resourceGroups/west/providers/"
    "Microsoft.Compute/virtualMachines/WestNO_0",
    subscription_id="11111111-2222-4333-8444-555555555555",
    resource_group="west",
    location="westeurope",
)


def sample_event(**fields: Any) -> ScheduledEvent:
    """Return a scheduled Freeze of two VMs. *fields* replaces fields of the event."""
    values: dict[str, Any] = {
        "event_id": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "event_type": "Freeze",
        "event_status": "Scheduled",
        "resource_type": "VirtualMachine",
        "resources": ("WestNO_0", "WestNO_1"),
        "not_before": datetime(2026, 11, 20, 11, 15, tzinfo=timezone.utc),
        "not_before_raw": "Fri, 20 Nov 2026 11:15:00 GMT",
        "description": "Virtual machine is being paused because of a memory-preserving Live Migration \u2603.",
        "event_source": "Platform",
        "duration_seconds": 5,
    }
    return ScheduledEvent(**{**values, **fields})


def sample_record(number: int = 1, **fields: Any) -> TransitionRecord:
    """Return the sample record with the sequence *number*.

    *fields* replaces fields of the record.

    The same arguments always return the same record. All sample records belong to one event and have different IDs.
    """
    values: dict[str, Any] = {
        "id": str(uuid.uuid5(NAMESPACE, f"sample {number}")),
        "transition_key": f"{number:064x}",
        "stream_id": "01a1f89c-fb80-7000-8000-00000000a5a5",
        "sequence": number,
        "active_event_ids": ("C7061BAC-AFDC-4513-B24B-AA5F13A16123",),
        "transition": Transition.SCHEDULED,
        "evidence": Evidence.OBSERVED,
        "observed_at": "2026-11-20T11:00:01.123Z",
        "incarnation": 3,
        "previous_incarnation": 2,
        "event": sample_event(),
        "previous": None,
        "changed": (),
        "notice_seconds": 898.877,
        "affects_this_vm": True,
        "vm": VM,
        "labels": {"team": "payments"},
    }
    return TransitionRecord(**{**values, **fields})
