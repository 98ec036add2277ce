"""Parses the Scheduled Events document and this VM's identity from IMDS responses.

The agent must not invent or lose an event. The parser therefore rejects a body that is not valid JSON, has no list of
Events, or has an event without an EventStatus. An invalid value in another field, such as Description, must not stop
the agent. The parser reads such a field as None and keeps the value in ``extra``.

The parser replaces lone surrogates with U+FFFD, converts integers beyond 64 bits to text, and limits the nesting depth,
so that every result can be written as JSON.

Microsoft describes the fields in "Scheduled Events for Linux VMs in Azure" and "Azure Instance Metadata Service".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from bridge import strict_json
from bridge.errors import DocumentInvalid
from bridge.events.event import Document, Incarnation, ScheduledEvent, VmIdentity
from bridge.text import excerpt

#: Enough for a hundred events with a thousand VMs each.
MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
#: Real documents have 4,000 to 9,000 characters.
MAX_ATTESTED_CHARACTERS = 48 * 1024

_MAX_DEPTH = 64
_INT64 = range(-(2**63), 2**63)

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_document(body: bytes, *, api_version: str = "") -> Document:
    """Return the document in *body*. Raises DocumentInvalid if *body* is not a document.

    A document is a UTF-8 JSON object of at most 4 MiB, with or without a byte order mark. It contains a list of Events,
    and each event is an object whose EventStatus is a string.
    """
    value = _json_object(body, "The Scheduled Events document")
    events = value.get("Events")
    if not isinstance(events, list):
        raise DocumentInvalid(
            f"The Scheduled Events document has {_kind(events)} instead of a list of Events: {excerpt(body)}"
        )
    return Document(
        api_version=api_version,
        incarnation=_incarnation(value.get("DocumentIncarnation")),
        events=tuple(_event(event, position, body) for position, event in enumerate(events)),
    )


def parse_identity(body: bytes) -> VmIdentity:
    """Return the identity in *body*, a response of ``/metadata/instance/compute``.

    Empty strings become None. Raises DocumentInvalid if *body* is not a JSON object or has neither a name nor a vmId.
    """
    value = _json_object(body, "The instance document")

    def text(name: str) -> str | None:
        return value[name] if isinstance(value.get(name), str) and value[name] else None

    identity = VmIdentity(
        name=text("name"),
        vm_id=text("vmId"),
        resource_id=text("resourceId"),
        subscription_id=text("subscriptionId"),
        resource_group=text("resourceGroupName"),
        location=text("location"),
        scale_set=text("vmScaleSetName"),
        zone=text("zone"),
        placement_group_id=text("placementGroupId"),
        size=text("vmSize"),
        fault_domain=text("platformFaultDomain"),
        update_domain=text("platformUpdateDomain"),
        tags=_tags(value),
    )
    if identity.name is None and identity.vm_id is None:
        raise DocumentInvalid(f"The instance document has neither a name nor a vmId: {excerpt(body)}")
    return identity


def parse_attested(body: bytes) -> str:
    """Return the signed document of a ``/metadata/attested/document`` response, in base64.

    Raises DocumentInvalid if the signed document is missing or too long. Only the portal verifies the signature.
    """
    value = _json_object(body, "The attested document")
    signature = value.get("signature")
    if not isinstance(signature, str) or not 0 < len(signature) <= MAX_ATTESTED_CHARACTERS or not signature.isascii():
        raise DocumentInvalid(f"The attested document has no valid signature field: {excerpt(body)}")
    return signature


def parse_not_before(text: str) -> datetime | None:
    """Return the time in *text* in UTC, or None if *text* is empty or not a time.

    Azure writes times in RFC 1123 format. Older API versions use ISO 8601, and their times without a zone are in UTC.
    The year 1 means that no time is set. The parser ignores the weekday, because an example in Microsoft's
    documentation has a wrong weekday.
    """
    moment = _iso_8601(text.strip()) or _rfc_1123(text)
    try:
        moment = None if moment is None else moment.astimezone(timezone.utc)
    except OverflowError:
        return None
    return moment if moment is not None and moment.year > 1 else None


def _iso_8601(text: str) -> datetime | None:
    with suppress(msgspec.ValidationError):
        moment = msgspec.convert(text, datetime)
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
    return None


def _rfc_1123(text: str) -> datetime | None:
    with suppress(ValueError, OverflowError):
        moment = parsedate_to_datetime(text)
        # The library returns no zone if the zone is unknown, and reads the year 0001 as 2001 (RFC 5322, section 4.3).
        return moment if moment.tzinfo is not None and " 0001 " not in text else None
    return None


def _json_object(body: bytes, what: str) -> dict[str, Any]:
    if len(body) > MAX_DOCUMENT_BYTES:
        raise DocumentInvalid(f"{what} has {len(body)} bytes, above the limit of {MAX_DOCUMENT_BYTES}: {excerpt(body)}")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise DocumentInvalid(f"{what} is not UTF-8 at byte {exc.start}: {excerpt(body)}") from exc
    if not text.strip():
        raise DocumentInvalid(f"{what} is empty, so the state is unknown.")
    try:
        value = _clean(strict_json.loads(text, allows_duplicates=True), depth=0)
    except ValueError as exc:
        raise DocumentInvalid(f"{what} is not valid JSON ({exc}): {excerpt(body)}") from exc
    if not isinstance(value, dict):
        raise DocumentInvalid(f"{what} is {_kind(value)} instead of an object: {excerpt(body)}")
    return value


def _clean(value: Any, *, depth: int) -> Any:
    """Return *value* in a form that every JSON parser accepts."""
    if depth > _MAX_DEPTH:
        raise strict_json.JsonRefused(f"nested more than {_MAX_DEPTH} deep")
    if type(value) is int and value not in _INT64:
        return str(value)
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_clean(item, depth=depth + 1) for item in value]
    if isinstance(value, dict):
        return {_LONE_SURROGATE.sub("\ufffd", key): _clean(item, depth=depth + 1) for key, item in value.items()}
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _incarnation(value: Any) -> Incarnation:
    if isinstance(value, float) and value.is_integer():
        number = int(value)  # JSON has one kind of number: 5.0 is 5 (RFC 8259 section 6)
        return number if number in _INT64 else str(number)
    return value if type(value) in {int, str} else None


def _event(value: Any, position: int, body: bytes) -> ScheduledEvent:
    if not isinstance(value, dict):
        raise DocumentInvalid(
            f"Event {position} of the Scheduled Events document is {_kind(value)} instead of an object: {excerpt(body)}"
        )
    status = value.get("EventStatus")
    if not isinstance(status, str):
        raise DocumentInvalid(
            f"The EventStatus of event {position} of the Scheduled Events document is {_kind(status)} instead of a "
            f"string: {excerpt(body)}"
        )
    rest = {name: field for name, field in value.items() if name != "EventStatus"}
    not_before_raw = _take(rest, "NotBefore", _as_text)
    return ScheduledEvent(
        event_id=_take(rest, "EventId", lambda field: _as_text(field) or None),
        event_type=_take(rest, "EventType", _as_text),
        event_status=status,
        resource_type=_take(rest, "ResourceType", _as_text),
        resources=_resources(rest),
        not_before=None if not_before_raw is None else parse_not_before(not_before_raw),
        not_before_raw=not_before_raw,
        description=_take(rest, "Description", _as_text),
        event_source=_take(rest, "EventSource", _as_text),
        duration_seconds=_duration(rest),
        extra=rest,
    )


def _take(rest: dict[str, Any], name: str, read: Callable[[Any], Any]) -> Any:
    """Remove the field *name* from *rest*, and return its converted value.

    If the value is invalid (*read* returns None), the field stays in *rest*.
    """
    field = rest.get(name)
    value = None if field is None else read(field)
    if field is None or value is not None:
        rest.pop(name, None)
    return value


def _as_text(field: Any) -> str | None:
    return field if isinstance(field, str) else None


def _as_names(field: Any) -> tuple[str, ...] | None:
    if isinstance(field, list) and all(isinstance(name, str) for name in field):
        return tuple(field)
    return None


def _resources(rest: dict[str, Any]) -> tuple[str, ...] | None:
    """Return Resources. In version 2017-03-01, the field can also be a text."""
    if rest.get("Resources") is not None:
        return _take(rest, "Resources", _as_names)  # type: ignore[no-any-return]
    rest.pop("Resources", None)
    return _take(  # type: ignore[no-any-return]
        rest, "ResourceName", lambda field: (field,) if isinstance(field, str) else _as_names(field)
    )


def _duration(rest: dict[str, Any]) -> int | None:
    """Return DurationInSeconds. Azure sends -1 if the duration is unknown."""
    seconds = _take(rest, "DurationInSeconds", lambda field: field if type(field) is int and field >= -1 else None)
    return None if seconds == -1 else seconds


def _tags(value: dict[str, Any]) -> dict[str, str]:
    tags = value.get("tagsList")
    return {
        tag["name"]: tag["value"]
        for tag in (tags if isinstance(tags, list) else [])
        if isinstance(tag, dict) and isinstance(tag.get("name"), str) and isinstance(tag.get("value"), str)
    }
