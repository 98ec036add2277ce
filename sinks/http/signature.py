"""Signatures of the Standard Webhooks specification, version 1, with several secrets for rotation.

The signed text is ``id.timestamp.body``, and the key is the decoded base64 after ``whsec_``. Each secret makes one
signature, so receivers with the old and with the new secret can verify the same request.
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
    """Signs with every secret of *secret*, which is read again when its file changes."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._texts: tuple[str, ...] = ()
        self._keys: tuple[bytes, ...] = ()

    def headers(self, message_id: str, body: bytes, *, timestamp: int) -> dict[str, str]:
        """Return the headers for *body* at *timestamp*, in Unix seconds. Raise DeliveryFailed for a wrong secret.

        The id and the time are also sent without a secret, because a receiver detects a duplicate by its `webhook-id`.
        """
        headers = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
        signed = f"{message_id}.{timestamp}.".encode() + body
        signatures = [hmac.new(key, signed, hashlib.sha256).digest() for key in self.keys()]
        if signatures:
            headers["webhook-signature"] = " ".join(f"v1,{base64.b64encode(each).decode()}" for each in signatures)
        return headers

    def keys(self) -> tuple[bytes, ...]:
        """Return the keys, none without a configured secret; raise DeliveryFailed for a wrong secret."""
        texts = self._secret.values()
        if texts != self._texts:
            self._keys = tuple(_key(text, number) for number, text in enumerate(texts, start=1))
            self._texts = texts
        return self._keys


def _key(text: str, number: int) -> bytes:
    try:
        key = base64.b64decode(text.removeprefix(_PREFIX), validate=True) if text.startswith(_PREFIX) else b""
    except (binascii.Error, ValueError):
        key = b""
    if len(key) not in _KEY_BYTES:
        raise DeliveryFailed(
            f"Secret {number} of secret_file or secret_env is not {_PREFIX} and base64 of 24 to 64 bytes, all on one "
            'line. Make one with: echo "whsec_$(openssl rand -base64 32)"',
            needs_attention=True,
        )
    return key
