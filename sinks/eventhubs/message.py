"""What both transports put beside the body of a message: its partition key and its application properties.

Event Hubs keeps order within a partition only, so all records of one event have one partition key. The body is the
CloudEvent of `sinks.cloudevent`.
"""

from __future__ import annotations

import hashlib

from bridge.sink import TransitionRecord

#: The longest partition key that Event Hubs takes, in characters.
_LONGEST_KEY = 128


def partition_key(record: TransitionRecord) -> str:
    """Return the record's event key; its hash where the service would refuse it, or take "" for no key at all."""
    key = record.event_key
    return key if 0 < len(key) <= _LONGEST_KEY else hashlib.sha256(key.encode()).hexdigest()


def properties(record: TransitionRecord) -> dict[str, str]:
    """Return the application properties: what a consumer filters by; what is unknown is left out."""
    event = record.event
    found = {
        "transition": record.transition.value,
        "event_type": None if event is None else event.event_type,
        "event_status": None if event is None else event.event_status,
        "vm_name": record.vm.name,
    }
    return {name: value for name, value in found.items() if value is not None}
