"""Signs and verifies Standard Webhooks (https://www.standardwebhooks.com).

All agents share one secret, so the signature of a record proves that an agent sent it, but not which one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping

_TOLERANCE_SECONDS = 300  # recommended by the specification
_SECRET_PREFIX = "whsec_"  # noqa: S105  # the prefix of a secret
_KEY_BYTES = range(24, 65)  # the specification requires 192 to 512 bits
_MOST_SIGNATURES = 16


def usable_keys(secrets: Iterable[str]) -> list[bytes]:
    """Return the keys of valid *secrets*: ``whsec_`` and then 24 to 64 bytes as Base64."""
    keys = [_decoded(text.removeprefix(_SECRET_PREFIX)) for text in secrets]
    return [key for key in keys if len(key) in _KEY_BYTES]


def signature_headers(message_id: str, body: bytes, keys: Iterable[bytes], *, timestamp: int) -> dict[str, str]:
    """Return the headers of a webhook with *body*. *timestamp* is in Unix seconds."""
    headers = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
    found = _signatures(message_id, str(timestamp), body, keys)
    return {**headers, "webhook-signature": " ".join(found)} if found else headers


def is_signed(headers: Mapping[str, str], body: bytes, keys: Iterable[bytes], now: float) -> bool:
    """Return whether *headers* contain a recent signature of *body* by one of *keys*.

    The timestamp of the signature must be at most five minutes before or after *now*.
    """
    sent_at = headers.get("webhook-timestamp", "")
    if not re.fullmatch("[0-9]{1,18}", sent_at) or abs(now - int(sent_at)) > _TOLERANCE_SECONDS:
        return False
    given = headers.get("webhook-signature", "").encode().split()[:_MOST_SIGNATURES]
    valid = _signatures(headers.get("webhook-id", ""), sent_at, body, keys)
    return any(hmac.compare_digest(each, one.encode()) for one in valid for each in given)


def _signatures(message_id: str, timestamp: str, body: bytes, keys: Iterable[bytes]) -> list[str]:
    signed = f"{message_id}.{timestamp}.".encode() + body
    found = [hmac.digest(key, signed, hashlib.sha256) for key in keys]
    return [f"v1,{base64.b64encode(each).decode()}" for each in found]


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # includes binascii.Error
        return b""
