"""Reads the records in an HTTP request that contains CloudEvents 1.0.

The Content-Type header determines the CloudEvents mode (structured, batched, or binary). The portal stores each record
unchanged, because a newer agent might send fields that this version does not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from bridge.clock import format_time
from bridge.events.event import ScheduledEvent, VmIdentity
from bridge.events.record import Approval, TransitionRecord
from bridge.portal.requests import RequestRefused
from bridge.portal.store.ingest import ReceivedRecord
from bridge.text import EXCERPT_CHARACTERS, one_line

_STRUCTURED, _BATCH, _JSON = "application/cloudevents+json", "application/cloudevents-batch+json", "application/json"
_DEEPEST = 64
#: Ten years. Every real event is far shorter.
_LONGEST_SECONDS = 10 * 366 * 86_400
#: The timeline cannot show a time near the limits of the calendar.
_YEARS = range(2000, 2200)

_Id = Annotated[str, Meta(pattern=r"^[ -~]{1,64}\Z")]
_Name = Annotated[str, Meta(pattern=r"^[ -~]{1,256}\Z")]
_Time = Annotated[datetime, Meta(tz=True)]


class _Envelope(msgspec.Struct, frozen=True):
    specversion: Annotated[str, Meta(pattern=r"^1\.0\Z")]
    id: str
    source: str
    type: Annotated[str, Meta(pattern=r"^io\.scheduled-events-bridge\.transition\.")]
    data: msgspec.Raw


class _Event(ScheduledEvent, frozen=True, kw_only=True, dict=True):
    not_before: _Time | None = None
    duration_seconds: Annotated[int, Meta(ge=-1, le=_LONGEST_SECONDS)] | None = None


class _Vm(VmIdentity, frozen=True, kw_only=True):
    vm_id: _Name | None = None


class _Approval(Approval, frozen=True, kw_only=True):
    jws_sha256: Annotated[tuple[_Name, ...], Meta(max_length=1_000)] = ()
    http_status: Annotated[int, Meta(ge=0, le=999)] | None = None


class _Record(TransitionRecord, frozen=True, kw_only=True):
    """A record whose values fit into the database."""

    id: _Id
    stream_id: _Name
    sequence: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    event: _Event | None
    vm: _Vm
    approval: _Approval | None = None


_one = msgspec.json.Decoder(_Envelope).decode
_several = msgspec.json.Decoder(list[_Envelope]).decode
_record = msgspec.json.Decoder(_Record).decode


def received_records(headers: Mapping[str, str], body: bytes, *, most_bytes: int) -> list[ReceivedRecord]:
    """Return the records of a request. *headers* have lowercase names.

    Raise RequestRefused with 413 if a record has more than *most_bytes*, and with 400 if the request is invalid.
    """
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if content_type == _STRUCTURED:
            envelopes = [_one(body)]
        elif content_type == _BATCH:
            envelopes = _several(body)
        elif content_type == _JSON and "ce-specversion" in headers:
            attributes = {name[3:]: value for name, value in headers.items() if name.startswith("ce-")}
            envelopes = [msgspec.convert({**attributes, "data": msgspec.Raw(body)}, _Envelope)]
        else:
            raise RequestRefused(
                400, f"The Content-Type must be {_STRUCTURED}, {_BATCH}, or {_JSON} with the headers of a CloudEvent."
            )
        if any(len(memoryview(envelope.data)) > most_bytes for envelope in envelopes):
            raise RequestRefused(413, f"A record has more than {most_bytes} bytes.")
        received = [_record_of(envelope) for envelope in envelopes]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        shape = f" ({one_line(str(error), EXCERPT_CHARACTERS)})" if isinstance(error, msgspec.ValidationError) else ""
        raise RequestRefused(400, f"The body is not a CloudEvent with a transition record{shape}.") from error
    if not received:
        raise RequestRefused(400, "The batch is empty.")
    return received


def _record_of(envelope: _Envelope) -> ReceivedRecord:
    body = bytes(envelope.data)
    record = _record(body)
    if record.id != envelope.id:
        raise RequestRefused(400, "The id of the CloudEvent differs from the id of the record.")
    _check_depth([record.previous, None if record.event is None else record.event.extra])
    observed_at, event = format_time(msgspec.convert(record.observed_at, _Time)), record.event
    if event is not None and event.not_before is not None:
        not_before = event.not_before.astimezone(timezone.utc)
        if not_before.year not in _YEARS:
            raise RequestRefused(400, "The not_before of an event must be from 2000 to 2199.")
        event = msgspec.structs.replace(event, not_before=not_before)
    return ReceivedRecord(msgspec.structs.replace(record, observed_at=observed_at, event=event), body.decode())


def _check_depth(value: Any, levels: int = _DEEPEST) -> None:
    if not levels:
        raise RequestRefused(400, f"A record is nested more than {_DEEPEST} levels deep.")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, levels - 1)
