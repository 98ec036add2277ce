"""What every route needs of a request: its headers, its body within bounds, and answers in one shape.

A body is read as it comes and given up when it grows too large or takes too long: a client that sends a byte now and
then holds neither memory nor a task for more than ten seconds, and a thousand of them no more than there is room for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

MAX_BODY_BYTES = 1024 * 1024
#: Of all the bodies that are being read.
MAX_BODIES_BYTES = 64 * 1024 * 1024
BODY_SECONDS = 10.0
RETRY_AFTER_SECONDS = 2
JSON = "application/json"


class BodyRefused(Exception):
    """The body is not read to its end; *status* is 400, 408, 413 or 503."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyRoom:
    """The memory that bodies take while they are read; the application has it as ``state.bodies``."""

    def __init__(self, most_bytes: int = MAX_BODIES_BYTES) -> None:
        self._most_bytes = most_bytes
        self._taken = 0

    def take(self, size: int) -> None:
        """Take *size* bytes, to be given back with `give`; raise BodyRefused when there is no room."""
        if self._taken + size > self._most_bytes:
            raise BodyRefused(503, "Too many bodies come at once.")
        self._taken += size

    def give(self, size: int) -> None:
        """Give back *size* bytes."""
        self._taken -= size


def headers_of(request: Request) -> dict[str, str]:
    """Return the headers with names in lower case; of one that came twice both values, with a comma."""
    found: dict[str, str] = {}
    for name, value in request.headers.items():
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


async def body_of(request: Request, *, seconds: float, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the body; raise BodyRefused for more than *most_bytes*, and for one that does not come in time."""
    too_large = BodyRefused(413, f"The body is larger than {most_bytes} bytes.")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and (len(length) > len(str(most_bytes)) or int(length) > most_bytes):
        raise too_large

    room: BodyRoom = request.app.state.bodies
    parts = bytearray()

    async def whole() -> bytes:
        async for part in request.stream():
            if len(parts) + len(part) > most_bytes:
                raise too_large
            room.take(len(part))
            parts.extend(part)
        return bytes(parts)

    try:
        return await asyncio.wait_for(whole(), seconds)
    except asyncio.TimeoutError:
        raise BodyRefused(408, f"The body did not come within {seconds:g} s.") from None
    except ClientDisconnect:
        raise BodyRefused(400, "The client went away.") from None
    finally:
        room.give(len(parts))


def json_answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return *value* as JSON that no cache keeps."""
    return Response(
        msgspec.json.encode(value),
        status_code=status,
        media_type=JSON,
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **(headers or {})},
    )


def error_answer(status: int, message: str, *, ends: bool = False) -> Response:
    """Return *message* as the answer of a request that was refused; *ends*: the connection is closed after it."""
    headers = {}
    if status == 401:  # noqa: PLR2004  # RFC 9110, section 15.5.2
        headers["WWW-Authenticate"] = "Bearer"
    if status == 503:  # noqa: PLR2004
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if ends:
        headers["Connection"] = "close"
    return json_answer({"error": message}, status=status, headers=headers)
