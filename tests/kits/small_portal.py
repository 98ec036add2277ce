"""A small, correct ops portal, written from PROTOCOL.md.

`SmallPortal` meets every requirement. Subclasses that override one method break one requirement.
"""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from outside_portal import Signer


@dataclass(frozen=True)
class Asked:
    """A request for decisions."""

    vm_id: str
    index: int
    wait_seconds: float
    token: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Said:
    """A response."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def attested(vm_id: str, nonce: str) -> str:
    """Return a simulated attested document with plain content and a digest."""
    content = json.dumps({"nonce": nonce, "vmId": vm_id}).encode()
    return base64.b64encode(content + hashlib.sha256(content).digest()).decode()


class SmallPortal:
    """Serves the VM *vm_id*, which sends *token*. *signer* signs decisions. With *tls*, the portal uses HTTPS."""

    def __init__(self, signer: Signer, *, vm_id: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        self.signer, self.vm_id, self.token = signer, vm_id, token
        self.epoch = str(uuid.uuid4())
        self.changed = threading.Condition()
        self.decisions: list[tuple[int, str]] = []
        self.newest = 1
        self.records: list[Mapping[str, Any]] = []
        self.challenges: set[str] = set()
        self.documents: list[str] = []
        """The attested documents that received a token."""
        self._server = _Server(self)
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Return the value for `approval.remote.url`."""
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}/api/v1"

    @property
    def records_url(self) -> str:
        return f"{self.url}/records"

    def close(self) -> None:
        """Stop the portal, and complete held requests."""
        self._server.is_stopped = True
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # Decisions.

    def decide(self, verdict: str, record: Mapping[str, Any]) -> None:
        """Sign a decision on the event of *record*, and add it for the VM."""
        self.put(self.signed(verdict, record))

    def signed(self, verdict: str, record: Mapping[str, Any]) -> str:
        return self.signer.decide(record, verdict)

    def put(self, token: str) -> None:
        with self.changed:
            self.newest += 1
            self.decisions.append((self.newest, token))
            self.changed.notify_all()

    # Responses.

    def polled(self, asked: Asked) -> Said | None:
        """Return the response to a poll. None closes the connection without a response."""
        refused = self.refused(asked)
        if refused is not None:
            return refused
        value = self.value(asked)
        return Said(200, self.body(value), self.headers())

    def refused(self, asked: Asked) -> Said | None:
        if asked.token != f"Bearer {self.token}":
            return Said(401)
        return None if asked.vm_id == self.vm_id else Said(403)

    def value(self, asked: Asked) -> dict[str, Any]:
        """Wait, and return the decisions after the index."""
        deadline = time.monotonic() + asked.wait_seconds
        with self.changed:
            while not self.is_due(asked) and (left := deadline - time.monotonic()) > 0 and not self._server.is_stopped:
                self.changed.wait(left)
            tokens = self.after(asked.index)
            return {"index": self.newest, "decisions": tokens, "epoch": self.epoch}

    def is_due(self, asked: Asked) -> bool:
        """Return whether *asked* completes before its wait ends."""
        return not asked.index or asked.index > self.newest or bool(self.after(asked.index))

    def after(self, index: int) -> list[str]:
        return [token for at, token in self.decisions if at > index]

    def body(self, value: dict[str, Any]) -> bytes:
        return json.dumps(value).encode()

    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"}

    def challenged(self) -> Said:
        nonce = self.nonce()
        self.challenges.add(nonce)
        return Said(200, json.dumps({"nonce": nonce}).encode())

    def nonce(self) -> str:
        return uuid.uuid4().hex

    def attested(self, document: str) -> Said:
        """Return the token for *document*, or the reason for its rejection."""
        reason = self.why_not(document)
        if reason is not None:
            return self.refusal(reason)
        self.documents.append(document)
        return Said(200, self.given())

    def given(self) -> bytes:
        return json.dumps({"token": self.token, "expires_in": 3600}).encode()

    def refusal(self, reason: str) -> Said:
        """Return the response to a document that is rejected because of *reason*."""
        status = {"too_large": 413, "malformed": 400, "old_nonce": 409, "replayed": 409}.get(reason, 403)
        return Said(status, json.dumps({"error": "It is refused.", "reason": reason}).encode())

    def why_not(self, document: str) -> str | None:
        if len(document) > 32 * 1024:
            return "too_large"
        content, digest = base64.b64decode(document)[:-32], base64.b64decode(document)[-32:]
        if not content:
            return "malformed"
        if not self.is_signed(content, digest):
            return "forged"
        if json.loads(content)["nonce"] not in self.challenges:
            return "old_nonce"
        return "replayed" if self.was_taken(document) else None

    def is_signed(self, content: bytes, digest: bytes) -> bool:
        return hashlib.sha256(content).digest() == digest

    def was_taken(self, document: str) -> bool:
        return document in self.documents

    def posted(self, record: Mapping[str, Any]) -> int:
        self.records.append(record)
        return 204


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, portal: SmallPortal) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.portal = portal
        self.is_stopped = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log only errors of the server, because clients might disconnect."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        parts, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        *_, vms, vm_id, decisions = parts.path.split("/")
        if (vms, decisions) != ("vms", "decisions"):
            self._say(Said(404))
            return
        index, wait = int(query["index"][0]), float(query["wait"][0])
        token = self.headers.get("Authorization", "")
        self._say(self.server.portal.polled(Asked(vm_id, index, wait, token, dict(self.headers))))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/agents/challenge"):
            self._say(self.server.portal.challenged())
            return
        if self.path.endswith("/agents/token"):
            self._say(self.server.portal.attested(json.loads(body)["document"]))
            return
        if self.headers.get("Authorization") != f"Bearer {self.server.portal.token}":
            self._say(Said(401))
            return
        self._say(Said(self.server.portal.posted(json.loads(body)["data"])))

    def _say(self, said: Said | None) -> None:
        if said is None:
            self.close_connection = True
            return
        self.send_response(said.status)
        for name, value in said.headers.items():
            self.send_header(name, value)
        if said.status not in (204, 304):
            self.send_header("Content-Length", str(len(said.body)))
        self.end_headers()
        self.wfile.write(said.body)

    def log_message(self, *_: object) -> None:
        pass
