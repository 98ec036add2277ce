"""Converts a record to a CloudEvent 1.0 in JSON, for webhooks and Event Hubs.

The attributes follow version 1.0.2 of the CloudEvents specification. Attributes without a value are omitted, because
the specification does not allow null.

The `sequence` attribute is a string with leading zeros, because the CloudEvents sequence extension requires values that
sort correctly as text. `sequencetype` is omitted, because its only defined value, "Integer", is limited to 32 bits.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from bridge.sink import TransitionRecord, VmIdentity

CONTENT_TYPE = "application/cloudevents+json"

_SEQUENCE_DIGITS = 20


def cloud_event_bytes(record: TransitionRecord) -> bytes:
    """Return *record* as a CloudEvent in UTF-8."""
    return msgspec.json.encode({**_attributes(record), "data": record})


def _attributes(record: TransitionRecord) -> dict[str, str]:
    attributes = {
        "specversion": "1.0",
        "id": record.id,
        "source": _source(record.vm),
        "type": f"io.scheduled-events-bridge.transition.{record.transition.value}.v1",
        "time": record.observed_at,
        "datacontenttype": "application/json",
        "sequence": f"{record.sequence:0{_SEQUENCE_DIGITS}d}",
    }
    if record.event is not None and record.event.event_id:  # a subject is never empty
        attributes["subject"] = record.event.event_id
    return attributes


def _source(vm: VmIdentity) -> str:
    """Return the resource ID of the VM. If the ID is unknown, return a URI with its name."""
    if vm.resource_id:
        return quote(vm.resource_id, safe="/:@!$&'()*+,;=~")
    return f"/vm/{quote(vm.name or vm.vm_id or 'unknown', safe='')}"
