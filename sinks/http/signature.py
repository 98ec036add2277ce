"""Signs webhook requests according to the Standard Webhooks specification.

The signature is an HMAC-SHA256 of the text `id.timestamp.body`. The `webhook-signature` header contains the signature,
`webhook-id` contains the record's `id`, and `webhook-timestamp` contains the time in Unix seconds. A secret consists of
the prefix `whsec_` and the key in base64.

If more than one secret is configured, the `webhook-signature` header contains one signature per secret. While you
rotate a secret, receivers can verify requests with either the old or the new one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from bridge.sink import DeliveryFailed, Secret

_PREFIX = "whsec_"
#: Standard Webhooks: between 24 bytes (192 bits) and 64 bytes (512 bits).
_KEY_BYTES = range(24, 65)


class Signer:
    """Signs requests with secrets, and rereads the secrets when their file changes."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def headers(self, message_id: str, body: bytes, *, timestamp: int) -> dict[str, str]:
        """Return the headers for *body*. Raise DeliveryFailed if a secret is invalid.

        *timestamp* is in Unix seconds. If no secret is configured, the headers contain only the ID and the timestamp.
        """
        headers = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
        signed = f"{message_id}.{timestamp}.".encode() + body
        signatures = [hmac.new(key, signed, hashlib.sha256).digest() for key in self.keys()]
        if signatures:
            headers["webhook-signature"] = " ".join(f"v1,{base64.b64encode(each).decode()}" for each in signatures)
        return headers

    def keys(self) -> tuple[bytes, ...]:
        """Return the signing keys. Raise DeliveryFailed if a secret is invalid."""
        return tuple(_key(text, number) for number, text in enumerate(self._secret.values(), start=1))


def _key(text: str, number: int) -> bytes:
    try:
        key = base64.b64decode(text.removeprefix(_PREFIX), validate=True) if text.startswith(_PREFIX) else b""
    except (binascii.Error, ValueError):
        key = b""
    if len(key) not in _KEY_BYTES:
        raise DeliveryFailed(
            f"Secret {number} of secret_file or secret_env is invalid. A secret is {_PREFIX} and the base64 of 24 to "
            '64 bytes, on one line. To create a secret, run: echo "whsec_$(openssl rand -base64 32)"',
            needs_attention=True,
        )
    return key
