"""An independent ops portal with signers, written only from PROTOCOL.md, which shares no code with the agent.

The stub in portal_stub.py signs with the code of `decide`, so it cannot detect an error that both sides share. This
portal creates the digest, the token, and the long poll from the text of the page, with records as a sink receives them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
import uuid
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HEADER = {"alg": "EdDSA", "typ": "scheduled-events-decision+jwt"}
_MOST_DECISIONS = 1_000
_MOST_BYTES = 1024 * 1024


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


class OutsidePortal:
    """Responds to long polls (sections 2 to 4) on a free port of 127.0.0.1. The VM trusts *signers*."""

    def __init__(self, *signers: Signer) -> None:
        self.signers = signers
        self.epoch = str(uuid.uuid4())
        self._changed = threading.Condition()
        self._index = 1
        self._decisions: list[tuple[int, str, str]] = []
        self._asked: list[int] = []
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        """Complete every request, and stop."""
        self._server.stopped.set()
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def toml(self, *signers: Signer, required_approvals: int = 1) -> str:
        """Return `[approval.remote]` for an agent that trusts *signers*, by default all."""
        keys = "".join(signer.table() for signer in signers or self.signers)
        return (
            f'[approval.remote]\nurl = "http://127.0.0.1:{self._server.server_port}/api/v1"\nwait_seconds = 5\n'
            f"required_approvals = {required_approvals}\n{keys}"
        )

    def put(self, vm_id: str, *tokens: str) -> None:
        """Add *tokens* (any texts) for the VM *vm_id*, and wait until its agent polls with the next index."""
        with self._changed:
            for token in tokens:
                self._index += 1
                self._decisions.append((self._index, vm_id.lower(), token))
            self._changed.notify_all()

    def is_read(self) -> bool:
        """Return whether the agent has polled with the last index, so that it has received every decision."""
        with self._changed:
            return bool(self._asked) and self._asked[-1] == self._index

    def answer(self, vm_id: str, index: int, wait_seconds: float) -> bytes:
        """Wait (section 3), and return the body for one request."""
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            self._asked.append(index)
            while True:
                if index > self._index:
                    return self._body(self._index, [])
                new = [(at, token) for at, whose, token in self._decisions if whose == vm_id and at > index]
                left_seconds = deadline - time.monotonic()
                if new or not index or left_seconds <= 0 or self._server.stopped.is_set():
                    return self._page(new)
                self._changed.wait(left_seconds)

    def _page(self, new: list[tuple[int, str]]) -> bytes:
        """Return as many of *new* as fit into one response, oldest first."""
        page, size = [], 0
        for at, token in new[:_MOST_DECISIONS]:
            size += len(token) + 3
            if size > _MOST_BYTES - 1_000:
                break
            page.append((at, token))
        is_all = len(page) == len(new)
        return self._body(self._index if is_all else page[-1][0], [token for _, token in page])

    def _body(self, index: int, tokens: list[str]) -> bytes:
        return json.dumps({"index": index, "epoch": self.epoch, "decisions": tokens}).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, portal: OutsidePortal) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.portal = portal
        self.stopped = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because a killed agent leaves broken connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        """Respond to one long poll."""
        parts, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        *_, vms, vm_id, decisions = parts.path.split("/")
        if (vms, decisions) != ("vms", "decisions"):
            self.send_error(404)
            return
        body = self.server.portal.answer(vm_id, int(query["index"][0]), float(query["wait"][0]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
