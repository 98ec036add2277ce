"""Reads the records in an HTTP request that contains CloudEvents 1.0.

The Content-Type header determines the CloudEvents mode (structured, batched, or binary). The portal stores each record
unchanged, because a newer agent might send fields that this version does not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bridge.clock import format_time, parse_time
from bridge.events.record import TransitionRecord, decode_record
from bridge.portal.requests import RequestRefused
from bridge.portal.store.ingest import ReceivedRecord

_STRUCTURED, _BATCH, _JSON = "application/cloudevents+json", "application/cloudevents-batch+json", "application/json"
_TYPE_PREFIX = "io.scheduled-events-bridge.transition."
_VERSION = "1.0"
_LARGEST_SEQUENCE = 2**63 - 1
_LARGEST_STATUS = 999
_DEEPEST = 64
_LONGEST_NAME = 256
#: Ten years. Every real event is far shorter.
_LONGEST_SECONDS = 10 * 366 * 86_400


class _Envelope(msgspec.Struct, frozen=True):
    specversion: str
    id: str
    source: str
    type: str
    data: msgspec.Raw


_one = msgspec.json.Decoder(_Envelope).decode
_several = msgspec.json.Decoder(list[_Envelope]).decode


def received_records(headers: Mapping[str, str], body: bytes, *, most_bytes: int) -> list[ReceivedRecord]:
    """Return the records of a request. *headers* have lowercase names.

    Raise RequestRefused with 413 if a record has more than *most_bytes*, and with 400 if the request is invalid. The
    message never quotes the request.
    """
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if content_type == _STRUCTURED:
            envelopes = [_one(body)]
        elif content_type == _BATCH:
            envelopes = _several(body)
        elif content_type == _JSON and "ce-specversion" in headers:
            envelopes = [_binary(headers, body)]
        else:
            raise RequestRefused(
                400, f"The Content-Type must be {_STRUCTURED}, {_BATCH}, or {_JSON} with the headers of a CloudEvent."
            )
        if any(len(memoryview(envelope.data)) > most_bytes for envelope in envelopes):
            raise RequestRefused(413, f"A record has more than {most_bytes} bytes.")
        received = [_record_of(envelope) for envelope in envelopes]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shape = f" ({error})" if isinstance(error, msgspec.ValidationError) else ""
        raise RequestRefused(400, f"The body is not a CloudEvent with a transition record{shape}.") from error
    if not received:
        raise RequestRefused(400, "The batch is empty.")
    return received


def _binary(headers: Mapping[str, str], body: bytes) -> _Envelope:
    names = ("specversion", "id", "source", "type")
    missing = [name for name in names if f"ce-{name}" not in headers]
    if missing:
        raise RequestRefused(400, f"The header ce-{missing[0]} is missing.")
    specversion, id_, source, type_ = (headers[f"ce-{name}"] for name in names)
    return _Envelope(specversion=specversion, id=id_, source=source, type=type_, data=msgspec.Raw(body))


def _record_of(envelope: _Envelope) -> ReceivedRecord:
    if envelope.specversion != _VERSION:
        raise RequestRefused(400, f"The specversion of a CloudEvent must be {_VERSION}.")
    if not envelope.type.startswith(_TYPE_PREFIX):
        raise RequestRefused(400, f"The type of a CloudEvent must begin with {_TYPE_PREFIX}.")
    body = bytes(envelope.data)
    record = decode_record(body)
    if record.id != envelope.id:
        raise RequestRefused(400, "The id of the CloudEvent differs from the id of the record.")
    _check_names(record)
    _check_depth([record.previous, None if record.event is None else record.event.extra])
    if record.approval is not None and not 0 <= (record.approval.http_status or 0) <= _LARGEST_STATUS:
        raise RequestRefused(400, "The http_status of a record is not a valid HTTP status.")
    if not 0 <= record.sequence <= _LARGEST_SEQUENCE:
        raise RequestRefused(400, "The sequence of a record must be from 0 to 2^63 - 1.")
    duration = 0 if record.event is None else record.event.duration_seconds or 0
    if not -1 <= duration <= _LONGEST_SECONDS:
        raise RequestRefused(400, f"The duration_seconds of an event must be from -1 to {_LONGEST_SECONDS}.")
    observed_at = _normal_time(record.observed_at)
    return ReceivedRecord(msgspec.structs.replace(record, observed_at=observed_at), body.decode())


def _normal_time(text: str) -> str:
    try:
        moment = parse_time(text)
        if moment.tzinfo is not None:
            return format_time(moment)
    except (ValueError, OverflowError):
        pass
    raise RequestRefused(400, "The observed_at of a record must be a time with a time zone.")


def _check_names(record: TransitionRecord) -> None:
    for name, value in (("id", record.id), ("stream_id", record.stream_id), ("vm.vm_id", record.vm.vm_id)):
        longest = 64 if name == "id" else _LONGEST_NAME
        if value is not None and not (1 <= len(value) <= longest and value.isascii() and value.isprintable()):
            raise RequestRefused(400, f"The {name} of a record must be 1 to {longest} printable ASCII characters.")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise RequestRefused(400, f"A record is nested more than {_DEEPEST} levels deep.")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
