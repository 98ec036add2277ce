"""Reads requests, and builds JSON responses and error responses.

The portal stops reading a body that exceeds the size limit. For limits on headers and slow requests, see
`bridge.portal.http_limits`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from bridge.errors import BridgeError

MAX_BODY_BYTES = 1024 * 1024
RETRY_AFTER_SECONDS = 2
JSON = "application/json"
_Body = TypeVar("_Body")


class RequestRefused(BridgeError):
    """The request is refused with *status* and the message as JSON."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def headers_of(request: Request) -> dict[str, str]:
    """Return the headers with lowercase names.

    The values of a repeated header are joined with a comma.
    """
    found: dict[str, str] = {}
    for name, value in request.headers.items():
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


async def body_of(request: Request, *, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the body. Raise RequestRefused if the body has more than *most_bytes*."""
    too_large = RequestRefused(413, f"The body is larger than {most_bytes} bytes.")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and (len(length) > len(str(most_bytes)) or int(length) > most_bytes):
        raise too_large
    parts = bytearray()
    try:
        async for part in request.stream():
            if len(parts) + len(part) > most_bytes:
                raise too_large
            parts.extend(part)
    except ClientDisconnect:
        raise RequestRefused(400, "The client disconnected.") from None
    return bytes(parts)


async def json_of(request: Request, kind: type[_Body]) -> _Body:
    """Return the JSON body as a *kind*. Raise RequestRefused (400) if it is invalid."""
    body = await body_of(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(400, f"The body is invalid: {error}.") from error


def whole_number(
    parameters: Mapping[str, str], name: str, default: int | None = None, *, lowest: int, highest: int
) -> int:
    """Return the parameter *name*.

    Raise RequestRefused unless it is a number from *lowest* to *highest*.
    """
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


def error_answer(
    status: int, message: str, *, ends: bool = False, retry_after_seconds: float | None = None
) -> Response:
    """Return an error response with *message*.

    If *ends* is true, the server then closes the connection.
    """
    headers = {}
    if retry_after_seconds is not None:
        headers["Retry-After"] = str(math.ceil(retry_after_seconds))
    if status == 401:  # noqa: PLR2004  # RFC 9110, section 15.5.2
        headers["WWW-Authenticate"] = "Bearer"
    if status == 503:  # noqa: PLR2004
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if ends:
        headers["Connection"] = "close"
    return json_answer({"error": message}, status=status, headers=headers)
