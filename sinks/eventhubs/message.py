"""Returns the partition key and the properties of an Event Hubs message.

Event Hubs preserves the order of messages only within a partition, so all records of an event have the same partition
key.
"""

from __future__ import annotations

import hashlib

from bridge.sink import TransitionRecord

#: Event Hubs' limit for a partition key, in characters.
_LONGEST_KEY = 128


def partition_key(record: TransitionRecord) -> str:
    """Return the key of the event. If the key is empty or too long, return its hash."""
    key = record.event_key
    return key if 0 < len(key) <= _LONGEST_KEY else hashlib.sha256(key.encode()).hexdigest()


def properties(record: TransitionRecord) -> dict[str, str]:
    """Return the application properties, which consumers can use as filters."""
    event = record.event
    found = {
        "transition": record.transition.value,
        "event_type": None if event is None else event.event_type,
        "event_status": None if event is None else event.event_status,
        "vm_name": record.vm.name,
    }
    return {name: value for name, value in found.items() if value is not None}
