"""Converts transition records to OTLP log records and reads the response of the receiver.

Protobuf messages are created directly, because the OpenTelemetry SDK's encoder uses twice the memory. The SDK's
exporter is not suitable either, because it reports success for redirects and rejected records.

Each attribute has a fixed type, because some backends reject an attribute whose type changes. For example, the
incarnation of a document can be a number or text, but this module always sends text.

Names that are not in the semantic conventions start with ``azure.scheduled_event.``.

Sources: OpenTelemetry, "Logs Data Model", "OTLP Specification", and "Semantic Conventions" 1.44.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs, SeverityNumber
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from bridge.sink import (
    OTEL_PREFIX as PREFIX,
)
from bridge.sink import (
    SERVICE_NAME,
    TransitionRecord,
    encode,
    own_version,
    resource_attributes,
    unix_nanoseconds,
)
from sinks.sentence import sentence
from sinks.severity import Severity, look_of

AttributeValue = str | bool | int | float | list[str]
_INT64 = range(-(2**63), 2**63)
_SEVERITIES = {
    Severity.INFO: (SeverityNumber.SEVERITY_NUMBER_INFO, "INFO"),
    Severity.WARNING: (SeverityNumber.SEVERITY_NUMBER_WARN, "WARN"),
    Severity.CRITICAL: (SeverityNumber.SEVERITY_NUMBER_ERROR, "ERROR"),
}
#: The fields of a record that have no attribute of the same name.
_ELSEWHERE = frozenset({"id", "incarnation", "previous_incarnation", "event", "vm", "labels"})
#: The objects whose fields become separate attributes.
_PARTS = ("previous", "approval", "impact")


def encode_request(batch: Sequence[TransitionRecord]) -> bytes:
    """Return *batch* as one ExportLogsServiceRequest with the records in the same order."""
    scope = InstrumentationScope(name=SERVICE_NAME, version=own_version())
    logs = [
        ResourceLogs(
            resource=Resource(
                attributes=_attributes(resource_attributes(record.vm, record.labels, instance_id=record.stream_id))
            ),
            scope_logs=[ScopeLogs(scope=scope, log_records=[log_record(record)])],
        )
        for record in batch
    ]
    encoded: bytes = ExportLogsServiceRequest(resource_logs=logs).SerializeToString()
    return encoded


def rejection(content: bytes) -> tuple[int, str]:
    """Return the number of rejected log records or spans, and the receiver's reason.

    The responses for logs and for traces have the same encoding.

    Some receivers respond with a text such as "OK" instead of an ExportLogsServiceResponse. The function then returns
    0, because a 2xx status means that the receiver accepted the request.
    """
    response = ExportLogsServiceResponse()
    try:
        response.ParseFromString(content)
    except DecodeError:
        return 0, ""
    refused = response.partial_success
    return refused.rejected_log_records, refused.error_message


def log_record(record: TransitionRecord) -> LogRecord:
    """Return *record* as a log record. Both of its times are `observed_at`, even on a retry."""
    nanoseconds = unix_nanoseconds(record.observed_at)
    number, text = _SEVERITIES[look_of(record).severity]
    return LogRecord(
        time_unix_nano=nanoseconds,
        observed_time_unix_nano=nanoseconds,
        severity_number=number,
        severity_text=text,
        trace_id=b"" if record.event is None else trace_id(record),
        event_name=f"{PREFIX}{record.transition.value}",
        body=AnyValue(string_value=_valid(sentence(record).removeprefix(f"{record.observed_at} "))),
        attributes=_attributes(record_attributes(record)),
    )


def trace_id(record: TransitionRecord) -> bytes:
    """Return the trace ID of the event, which is the same on every VM."""
    return hashlib.sha256(record.event_key.encode("utf-8", "replace")).digest()[:16]


def record_attributes(record: TransitionRecord) -> dict[str, Any]:
    """Return the attributes of *record*, without the attributes of its resource."""
    plain = json.loads(encode(record))
    found = {name: value for name, value in plain.items() if name not in _ELSEWHERE}
    found |= {"record_id": record.id, **_as_text(plain, "incarnation"), **_as_text(plain, "previous_incarnation")}
    found |= plain["event"] or {}
    for part in _PARTS:
        found |= {f"{part}.{name}": value for name, value in (found.pop(part) or {}).items()}
    # An empty list means that no event is open. If the open events are unknown, the list is absent.
    attributes = {
        f"{PREFIX}{name}": value
        for name, value in found.items()
        if value not in (None, {}, []) or (name == "active_event_ids" and value is not None)
    }
    return {"log.record.uid": record.id, **attributes}


def _as_text(plain: Mapping[str, Any], name: str) -> dict[str, str | None]:
    return {name: None if plain[name] is None else str(plain[name])}


def _attributes(values: Mapping[str, Any]) -> Iterable[KeyValue]:
    return [KeyValue(key=_valid(name), value=_any_value(value)) for name, value in values.items()]


def _any_value(value: Any) -> AnyValue:
    value = attribute_value(value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=each) for each in value]))


def attribute_value(value: Any) -> AttributeValue:
    """Return *value* as an attribute: a text, a number, a list of texts, or otherwise JSON."""
    if isinstance(value, bool | float) or (isinstance(value, int) and value in _INT64):
        return value
    if isinstance(value, str):
        return _valid(value)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return [_valid(each) for each in value]
    return json.dumps(value, sort_keys=True)


def _valid(text: str) -> str:
    """Return *text* without lone surrogates, which protobuf rejects."""
    return text.encode("utf-8", "replace").decode("utf-8")
