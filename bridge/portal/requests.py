"""Reads and validates requests, and builds JSON responses and error responses.

The portal stops reading a body that exceeds the size limit. For limits on headers and slow requests, see
`bridge.portal.http_limits`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from bridge.errors import BridgeError
from bridge.portal.fleet import key_of_event_id
from bridge.text import without_nul

MAX_BODY_BYTES = 1024 * 1024
RETRY_AFTER_SECONDS = 2
#: The portal might not have read the bodies of the requests that it refuses with one of these statuses.
_CLOSING = frozenset({401, 403, 413, 429})
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
_MOST_FIELDS = 1_000
_MOST_CHARACTERS = 200
#: The largest position of a row in a list.
MOST_ROWS = 10**9
KEY = re.compile("[0-9a-f]{32}")
DIGEST = re.compile("[0-9a-f]{64}")
_GROUP = re.compile(r"(resource_group|labels\.[^:\n]{1,256}):[^\n]{0,1024}")
_CURSOR = re.compile("[0-9]{1,9}(~[0-9T:.Z-]{1,24}~[01])?~[0-9T:.Z-]{1,24}~[0-9a-f]{32}")
#: The pages to which a login can redirect.
_NEXT = re.compile(r"/(timeline|agents|audit|events/[0-9a-f]{32})?")

Form = Mapping[str, Sequence[str]]
_Body = TypeVar("_Body")


class RequestRefused(BridgeError):
    """The request is refused with *status* and the message as JSON."""

    def __init__(self, status: int, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


def size_of(request: Request) -> int:
    """Return the size of the body in bytes, or the limit if the size is unknown or larger."""
    length = request.headers.get("content-length", "")  # the server accepts only digits
    return min(int(length[: len(str(MAX_BODY_BYTES)) + 1] or MAX_BODY_BYTES), MAX_BODY_BYTES)


async def body_of(request: Request, *, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the body. Raise RequestRefused if the body has more than *most_bytes*."""
    parts, too_large = bytearray(), RequestRefused(413, f"The body is larger than {most_bytes} bytes.")
    length = request.headers.get("content-length", "")  # the server accepts only digits
    if len(length) > len(str(most_bytes)) or int(length or 0) > most_bytes:
        raise too_large
    try:
        async for part in request.stream():
            if len(parts) + len(part) > most_bytes:
                raise too_large
            parts.extend(part)
    except ClientDisconnect:
        raise RequestRefused(400, "The client disconnected.") from None
    return bytes(parts)


async def json_of(request: Request, kind: type[_Body], *, most_bytes: int = MAX_BODY_BYTES) -> _Body:
    """Return the JSON body as a *kind*. Raise RequestRefused (400) if it is invalid."""
    body = await body_of(request, most_bytes=most_bytes)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(400, f"The body is invalid: {error}.") from error


async def form_of(request: Request) -> Form:
    """Return the fields of the form in *request*. Raise RequestRefused if the form is invalid."""
    body = await body_of(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise RequestRefused(400, f"The Content-Type of a form must be {FORM}.")
    try:
        return parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError as error:  # includes UnicodeDecodeError
        raise RequestRefused(400, "The form cannot be read.") from error


def one(form: Form, name: str) -> str:
    """Return the value of a field, or "" if the field is missing or repeated."""
    values = form.get(name, ())
    return values[0] if len(values) == 1 else ""


def key_of(name: str) -> str:
    """Return the key of the event with the key or EventId *name*."""
    return name if KEY.fullmatch(name) else key_of_event_id(name)


def text_of(request: Request, name: str) -> str:
    """Return the query parameter *name*, with at most 200 characters."""
    return without_nul(request.query_params.get(name, "").strip())[:_MOST_CHARACTERS]


def choice_of(request: Request, name: str, choices: Collection[str], default: str = "") -> str:
    """Return the parameter *name*. Raise RequestRefused unless it is one of *choices*."""
    choice = request.query_params.get(name) or default
    if choice != default and choice not in choices:
        raise RequestRefused(400, f"{name} must be one of {', '.join(choices)}.")
    return choice


def group_of(request: Request) -> str:
    """Return the requested group of VMs, or "" for all VMs."""
    group = request.query_params.get("group", "")
    if group and not _GROUP.fullmatch(group):
        raise RequestRefused(400, "A group is resource_group:NAME or labels.NAME:VALUE.")
    return without_nul(group.casefold() if group.startswith("resource_group:") else group)


def cursor_of(request: Request) -> str | None:
    """Return the cursor, or None for the first page."""
    text = request.query_params.get("cursor")
    if text is not None and not _CURSOR.fullmatch(text):
        raise RequestRefused(400, "cursor must be the cursor of an earlier response.")
    return text


def own_page(text: str) -> str:
    """Return *text* if it is the address of a page of this portal. Otherwise, return "/"."""
    return text if _NEXT.fullmatch(text) else "/"


def whole_number(
    parameters: Mapping[str, str], name: str, default: int | None = None, *, lowest: int, highest: int
) -> int:
    """Return the parameter *name*, which must be a number from *lowest* to *highest*."""
    text = parameters.get(name, "")
    if not text and name not in parameters and default is not None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(highest)) and lowest <= int(text) <= highest):
        raise RequestRefused(400, f"{name} must be a whole number from {lowest} to {highest}.")
    return int(text)


def json_answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return *value* as a JSON response that caches must not store."""
    return Response(
        msgspec.json.encode(value),
        status_code=status,
        media_type=JSON,
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **(headers or {})},
    )


def error_answer(status: int, message: str, *, retry_after_seconds: float | None = None) -> Response:
    """Return an error response with *message*."""
    headers = {}
    if retry_after_seconds is not None:
        headers["Retry-After"] = str(math.ceil(retry_after_seconds))
    if status == 401:  # noqa: PLR2004  # RFC 9110, section 15.5.2
        headers["WWW-Authenticate"] = "Bearer"
    if status == 503:  # noqa: PLR2004
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if status in _CLOSING:
        headers["Connection"] = "close"
    return json_answer({"error": message}, status=status, headers=headers)
