"""A complete record of an announced freeze, in which tests replace fields."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from bridge.sink import Evidence, ScheduledEvent, Transition, TransitionRecord, VmIdentity

NOT_BEFORE = datetime(2026, 11, 20, 11, 15, tzinfo=timezone.utc)


def record(**fields: Any) -> TransitionRecord:
    """Return the record with *fields* replaced."""
    event = ScheduledEvent(
        event_id="A-1",
        event_type="Freeze",
        event_status="Scheduled",
        resources=("WestNO_0",),
        not_before=NOT_BEFORE,
        description="Host server is undergoing maintenance.",
        event_source="Platform",
        duration_seconds=5,
    )
    values: dict[str, Any] = {
        "id": "i",
        "transition_key": "k",
        "stream_id": "s",
        "sequence": 1,
        "transition": Transition.SCHEDULED,
        "evidence": Evidence.OBSERVED,
        "observed_at": "2026-11-20T11:00:05.000Z",
        "incarnation": 1,
        "previous_incarnation": None,
        "event": event,
        "previous": None,
        "changed": (),
        "notice_seconds": 895.0,
        "affects_this_vm": True,
        "vm": VmIdentity(name="WestNO_0"),
        "labels": {},
    }
    return TransitionRecord(**{**values, **fields})


def event(**fields: Any) -> ScheduledEvent:
    """Return the event of a scheduled freeze with *fields* replaced."""
    return ScheduledEvent(**{"event_status": "Scheduled", "event_type": "Freeze", "not_before": NOT_BEFORE, **fields})
