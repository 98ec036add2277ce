"""Signers of an ops portal, written only from PROTOCOL.md, which share no code with the agent.

The stub in portal_stub.py signs with the code of `decide`, so it cannot detect an error that both sides share. These
signers create the digest and the token from the text of the page, with records as a sink receives them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HEADER = {"alg": "EdDSA", "typ": "scheduled-events-decision+jwt"}


def b64(content: bytes) -> str:
    """Return *content* as base64url without padding."""
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def digest(event: Mapping[str, Any]) -> str:
    """Return the digest of the `event` of a record (section 6)."""
    names = event["resources"]
    members = {
        "DurationInSeconds": event["duration_seconds"],
        "EventId": event["event_id"],
        "EventSource": event["event_source"],
        "EventType": event["event_type"],
        "NotBefore": event["not_before_raw"],
        "Resources": None if names is None else sorted(set(names), key=lambda name: name.encode("utf-16-be")),
    }
    canonical = json.dumps(members, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


class Signer:
    """A signer with a key pair (section 5). The public key is in *directory*."""

    def __init__(self, directory: Path, kid: str, approver: str | None = None) -> None:
        self.kid, self.approver = kid, approver or kid
        self._key = Ed25519PrivateKey.generate()
        self.public_pem = self._key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.public_key_file = directory / f"{kid}.pub"
        self.publish()

    def publish(self) -> None:
        """Write the public key to the file in the VM's configuration."""
        self.public_key_file.write_bytes(self.public_pem)

    def table(self) -> str:
        """Return the key's table of the configuration."""
        return (
            f'[[approval.remote.keys]]\nkid = "{self.kid}"\napprover = "{self.approver}"\n'
            f'public_key_file = "{self.public_key_file}"\n'
        )

    def claims(self, record: Mapping[str, Any], decision: str = "approve", **changes: Any) -> dict[str, Any]:
        """Return the claims of a decision on the event of *record*. None removes a claim."""
        now = time.time()
        claims = {
            "iss": self.approver,
            "aud": record["vm"]["vm_id"],
            "sub": record["event"]["event_id"],
            "jti": str(uuid.uuid4()),
            "iat": now,
            "exp": now + 3600,
            "decision": decision,
            "event_digest": digest(record["event"]),
        }
        return {name: value for name, value in {**claims, **changes}.items() if value is not None}

    def sign(self, payload: bytes, header: bytes | None = None) -> str:
        """Return the token of *payload*."""
        head = json.dumps({**HEADER, "kid": self.kid}).encode() if header is None else header
        signed = f"{b64(head)}.{b64(payload)}"
        return f"{signed}.{b64(self.signature(signed.encode()))}"

    def signature(self, content: bytes) -> bytes:
        """Return the 64-byte signature of *content*."""
        return self._key.sign(content)

    def decide(self, record: Mapping[str, Any], decision: str = "approve", **changes: Any) -> str:
        """Return a token with the claims of `claims`."""
        return self.sign(json.dumps(self.claims(record, decision, **changes)).encode())
