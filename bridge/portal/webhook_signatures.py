"""Signs and verifies Standard Webhooks (https://www.standardwebhooks.com).

All agents share one secret, so the signature of a record proves that an agent sent the record, but not which agent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping

_TOLERANCE_SECONDS = 300  # recommended by the specification
_VERSION = "v1"
_SECRET_PREFIX = "whsec_"  # noqa: S105  # the prefix of a secret
_KEY_BYTES = range(24, 65)  # the specification requires 192 to 512 bits
_MOST_SIGNATURES = 16


def usable_keys(secrets: Iterable[str]) -> list[bytes]:
    """Return the keys of those *secrets* that are ``whsec_`` and Base64 of 24 to 64 bytes."""
    keys = [_decoded(text.removeprefix(_SECRET_PREFIX)) for text in secrets]
    return [key for key in keys if len(key) in _KEY_BYTES]


def signature_headers(message_id: str, body: bytes, keys: Iterable[bytes], *, timestamp: int) -> dict[str, str]:
    """Return the headers of a webhook with *body*. *timestamp* is in Unix seconds."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    found = [base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in keys]
    headers = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
    return {**headers, "webhook-signature": " ".join(f"{_VERSION},{each}" for each in found)} if found else headers


def is_signed(headers: Mapping[str, str], body: bytes, keys: Iterable[bytes], now: float) -> bool:
    """Return whether *headers* contain a recent signature of *body* by one of *keys*.

    The timestamp of the signature must be at most five minutes before or after *now*.
    """
    sent_at = headers.get("webhook-timestamp", "")
    if not (sent_at.isascii() and sent_at.isdecimal() and len(sent_at) < len(str(2**63))):
        return False
    if abs(now - int(sent_at)) > _TOLERANCE_SECONDS:
        return False
    signed = f"{headers.get('webhook-id', '')}.{sent_at}.".encode() + body
    valid = [hmac.new(key, signed, hashlib.sha256).digest() for key in keys]
    for part in headers.get("webhook-signature", "").split(" ")[:_MOST_SIGNATURES]:
        version, _, text = part.partition(",")
        signature = _decoded(text)
        if version == _VERSION and any(hmac.compare_digest(signature, each) for each in valid):
            return True
    return False


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
