"""A transition record as a CloudEvent 1.0 in structured JSON.

The webhook and Event Hubs use this format. The attributes follow the CloudEvents specification 1.0.2. An attribute
without a value is omitted, because null is not a valid value.

`sequence` is text with leading zeros, because the CloudEvents sequence extension requires values that sort as text. It
has no `sequencetype`, because "Integer" means 32 bits that start at 1 and wrap.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from bridge.sink import TransitionRecord, VmIdentity

CONTENT_TYPE = "application/cloudevents+json"

_SEQUENCE_DIGITS = 20


def cloud_event_bytes(record: TransitionRecord) -> bytes:
    """Return *record* as a CloudEvent: compact JSON in UTF-8."""
    return msgspec.json.encode({**_attributes(record), "data": record})


def _attributes(record: TransitionRecord) -> dict[str, str]:
    attributes = {
        "specversion": "1.0",
        "id": record.id,
        "source": _source(record.vm),
        "type": f"io.scheduled-events-bridge.transition.{record.transition.value}.v1",
        "subject": "" if record.event is None else record.event.event_id or "",
        "time": record.observed_at,
        "datacontenttype": "application/json",
        "sequence": f"{record.sequence:0{_SEQUENCE_DIGITS}d}",
    }
    if not attributes["subject"]:
        del attributes["subject"]  # optional, and never empty
    return attributes


def _source(vm: VmIdentity) -> str:
    """Return the ARM resource id, else ``/vm/NAME``: a URI reference, as `source` must be."""
    if vm.resource_id:
        return quote(vm.resource_id, safe="/:@!$&'()*+,;=~")
    return f"/vm/{quote(vm.name or vm.vm_id or 'unknown', safe='')}"
