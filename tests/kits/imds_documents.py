"""Documents of Scheduled Events as the metadata service returns them."""

from __future__ import annotations

from typing import Any


def event(
    event_id: str, status: str = "Scheduled", *, event_type: str = "Freeze", vm: str = "vm_0", **fields: Any
) -> dict[str, Any]:
    """Return an event of *vm* with the additional *fields*."""
    return {"EventId": event_id, "EventStatus": status, "EventType": event_type, "Resources": [vm], **fields}


def document(incarnation: int, *events: dict[str, Any]) -> dict[str, Any]:
    """Return a document of *events*."""
    return {"DocumentIncarnation": incarnation, "Events": list(events)}
