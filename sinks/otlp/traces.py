"""Converts the record that ends an event to the spans of the event.

The span of an event starts when the agent observes the status Started, and ends when the event ends. Each measured
pause is a child span. The spans of all VMs for the same event belong to one trace. All IDs are hashes of the event, so
a span that is sent again keeps its ID.

An event has no span if the agent did not observe its start. Preempt and Terminate events have no span either, because
Azure removes the VM, and the agent with it, before the event ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from bridge.sink import (
    OTEL_PREFIX,
    SERVICE_NAME,
    URGENT_EVENT_TYPES,
    Transition,
    TransitionRecord,
    own_version,
    resource_attributes,
    unix_nanoseconds,
)
from sinks.otlp.encoding import attribute_value, record_attributes, trace_id

_APPROVALS = frozenset({Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})
_NANOSECONDS = 1_000_000_000
#: The attributes whose content the child spans and the span events already show.
_SHOWN_AS_SPANS = (f"{OTEL_PREFIX}impact.pauses", f"{OTEL_PREFIX}timeline", "log.record.uid")


def encode_request(batch: Sequence[TransitionRecord]) -> bytes:
    """Return the spans of *batch*. The request is empty if no record has a span."""
    spans = [span for record in batch for span in spans_of(record)]
    encoded: bytes = encode_spans(spans).SerializeToString()
    return encoded


def spans_of(record: TransitionRecord) -> Iterator[ReadableSpan]:
    """Yield the span of the ended event, and a child span for each pause of known length."""
    start = _started_at(record)
    if record.event is None or record.event.event_type in URGENT_EVENT_TYPES or start is None:
        return
    parent = _context(record, "event")
    labels = resource_attributes(record.vm, record.labels, instance_id=record.stream_id)
    resource = Resource({name: attribute_value(value) for name, value in labels.items()})
    shared: dict[str, Any] = {
        "resource": resource,
        "instrumentation_scope": InstrumentationScope(SERVICE_NAME, own_version()),
    }
    yield ReadableSpan(
        name=str(attribute_value(record.event.event_type or "unknown")),
        context=parent,
        attributes=_attributes(record, start),
        events=list(_approvals(record)),
        start_time=start,
        end_time=max(start, unix_nanoseconds(record.observed_at)),
        **shared,
    )
    for pause in () if record.impact is None else record.impact.pauses:
        if pause.seconds is not None:
            began_at = unix_nanoseconds(pause.at)
            values: dict[str, Any] = {
                "source": pause.source,
                "late_seconds": pause.late_seconds,
                "step_seconds": pause.step_seconds,
            }
            yield ReadableSpan(
                name="pause",
                context=_context(record, f"pause {pause.at}"),
                parent=parent,
                attributes={f"{OTEL_PREFIX}pause.{name}": value for name, value in values.items()},
                start_time=began_at,
                end_time=began_at + int(pause.seconds * _NANOSECONDS),
                **shared,
            )


def _started_at(record: TransitionRecord) -> int | None:
    if record.transition is Transition.TEST:
        return unix_nanoseconds(record.observed_at)  # send-test sends a span without a duration
    moment = _first(record, Transition.STARTED)
    return None if moment is None else unix_nanoseconds(moment)


def _first(record: TransitionRecord, transition: Transition) -> str | None:
    return next((each.observed_at for each in record.timeline or () if each.transition is transition), None)


def _attributes(record: TransitionRecord, start: int) -> Mapping[str, Any]:
    found = record_attributes(record)
    announced_at = _first(record, Transition.SCHEDULED)
    if announced_at is not None:
        notice = (start - unix_nanoseconds(announced_at)) / _NANOSECONDS
        found |= {f"{OTEL_PREFIX}announced_at": announced_at, f"{OTEL_PREFIX}notice_seconds": notice}
    return {name: attribute_value(value) for name, value in found.items() if name not in _SHOWN_AS_SPANS}


def _approvals(record: TransitionRecord) -> Iterator[Event]:
    for entry in record.timeline or ():
        if entry.transition in _APPROVALS:
            about = {} if entry.decision_id is None else {f"{OTEL_PREFIX}approval.decision_id": entry.decision_id}
            yield Event(entry.transition.value, attributes=about, timestamp=unix_nanoseconds(entry.observed_at))


def _context(record: TransitionRecord, part: str) -> SpanContext:
    trace, vm = trace_id(record), record.vm.vm_id or record.vm.name or ""
    name = b"\0".join((trace, vm.lower().encode("utf-8", "replace"), part.encode()))
    span_id = int.from_bytes(hashlib.sha256(name).digest()[:8], "big") or 1
    return SpanContext(int.from_bytes(trace, "big") or 1, span_id, is_remote=False, trace_flags=TraceFlags(1))
