"""A stub of an ops portal: the other side of PROTOCOL.md over HTTPS, with faults on request.

The stub shares only the signing code with the agent: a decision is signed as `decide` signs it, or replaced by any
text. Held requests are checked again after each change, so a fault applies immediately, even to a held request.
Deadlines use the real time.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attesting import Attesting
from private_ca import PrivateCa

from bridge.approval.signing import DecisionSigner, generate_key
from bridge.events.event import ScheduledEvent
from bridge.testing.simulator.faults import Fault, FaultQueue
from bridge.testing.simulator.faulty_answers import answer_with_fault
from bridge.testing.simulator.http_server import Connection, HttpServer
from bridge.testing.simulator.imds_api import Answer, Request, error

_PATH = re.compile(r"/api/v1/vms/([^/]+)/decisions")
_MOST_DECISIONS = 1_000
_LONGEST_WAIT_SECONDS = 3_600.0


@dataclass(frozen=True, kw_only=True)
class PortalRequest:
    """One received request of an agent."""

    vm_id: str
    index: int
    wait_seconds: float
    authorization: str | None
    at_seconds: float
    """Monotonic seconds."""
    asked: Request


class PortalStub:
    """Listens on a free port of 127.0.0.1 after its creation. Its keys and certificates are in *directory*.

    *bearer* is the required token. If *attesting* is given, the portal requires a token for the requested VM. If
    *client_certificates* is true, the agent must present a certificate from `client_certificate`. If *tls* is false,
    the portal uses plain HTTP.
    """

    def __init__(
        self,
        directory: Path,
        *,
        tls: bool = True,
        bearer: str | None = None,
        client_certificates: bool = False,
        attesting: Attesting | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.bearer = bearer
        self.attesting = attesting
        self._ca = PrivateCa(directory / "ca") if tls else None
        self._tls = self._ca.server_context(wants_client=client_certificates) if self._ca is not None else None
        self._signers: dict[str, tuple[DecisionSigner, Path]] = {}
        self.kid = "portal-key"
        self.add_key(self.kid, approver="portal")
        self.epoch: str | None = None
        """The `epoch` of responses, or None to omit it."""
        self._changed = threading.Condition()
        self._index = 1
        self._queues: dict[str, list[tuple[int, str]]] = {}
        """The index and the token of each decision, by VM."""
        self._faults = FaultQueue()
        self._requests: list[PortalRequest] = []
        # Bound without listening, so that no other process gets the port while the portal is down.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self._server: HttpServer | None = None
        self.up()

    # The agent's configuration.

    @property
    def url(self) -> str:
        """Return the value for `approval.remote.url`."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._held.getsockname()[1]}/api/v1"

    @property
    def ca_file(self) -> Path | None:
        """Return the file of the CA, or None without TLS."""
        return None if self._ca is None else self._ca.ca_file

    def client_certificate(self, name: str = "agent") -> tuple[Path, Path]:
        """Return a new client certificate of the portal's CA and its key."""
        if self._ca is None:
            raise ValueError("A portal without TLS has no client certificates.")
        return self._ca.issue(name)

    def add_key(self, kid: str, *, approver: str) -> Path:
        """Create a key pair for *approver*, and return the file of the public key."""
        pair = generate_key(self._directory / f"{kid}.key")
        signer = DecisionSigner(pair.private_key_file, kid=kid, approver=approver)
        self._signers[kid] = (signer, pair.public_key_file)
        return pair.public_key_file

    def key_tables(self) -> list[dict[str, str]]:
        """Return the tables of `[[approval.remote.keys]]` for all keys."""
        return [
            {"kid": kid, "approver": signer.approver, "public_key_file": str(public_key_file)}
            for kid, (signer, public_key_file) in self._signers.items()
        ]

    def toml(self, **settings: object) -> str:
        """Return `[approval.remote]` for an agent's configuration, with the additional keys *settings*."""
        ca_file = {} if self.ca_file is None else {"ca_file": str(self.ca_file)}
        lines = ["[approval.remote]", *_toml_lines({"url": self.url, **ca_file, **settings})]
        for key in self.key_tables():
            lines += ["[[approval.remote.keys]]", *_toml_lines(key)]
        return "\n".join(lines) + "\n"

    # Decisions.

    def decide(
        self,
        event: ScheduledEvent,
        *,
        vm_id: str,
        decision: str = "approve",
        reason: str | None = None,
        jti: str | None = None,
    ) -> str:
        """Sign and add a decision on *event* for the VM *vm_id*, and return the token."""
        signer, _ = self._signers[self.kid]
        now = datetime.now(timezone.utc)
        token = signer.sign(vm_id, event, decision, now=now, valid_seconds=3600, reason=reason, jti=jti)
        self.put(vm_id, token)
        return token

    def put(self, vm_id: str, *tokens: str) -> int:
        """Add *tokens* (any texts) for the VM *vm_id*, and return the last index."""
        with self._changed:
            for token in tokens:
                self._index += 1
                self._queues.setdefault(vm_id.lower(), []).append((self._index, token))
            self._changed.notify_all()
            return self._index

    def lose_state(self, *, epoch: str | None = None) -> None:
        """Restart with the first index, like a restored portal. Later responses contain *epoch*."""
        with self._changed:
            self.epoch = epoch
            self._index, self._queues = 1, {}
            self._changed.notify_all()

    # Faults.

    def strike(self, kind: str, **details: Any) -> None:
        """Queue a fault of *kind*, one of the simulator's `KINDS`, with the `Fault` fields *details*."""
        with self._changed:
            self._faults.add(Fault(kind=kind, target="all", **details))
            self._changed.notify_all()

    def down(self) -> None:
        """Break every connection and refuse new ones."""
        server, self._server = self._server, None
        if server is not None:
            server.stop.set()
            with self._changed:
                self._changed.notify_all()
            server.close()

    def up(self) -> None:
        """Listen again on the same port."""
        if self._server is None:
            self._server = _Server(self._held.getsockname(), self._respond, threading.Event())
            self._server.tls = self._tls
            self._server.start()

    def close(self) -> None:
        """Stop the portal permanently."""
        self.down()
        self._held.close()

    def __enter__(self) -> PortalStub:  # noqa: PYI034  # Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests.

    @property
    def requests(self) -> tuple[PortalRequest, ...]:
        """Return all requests so far, including those with a fault."""
        with self._changed:
            return tuple(self._requests)

    def wait_for_requests(self, count: int, *, timeout_seconds: float = 10.0) -> bool:
        """Wait up to *timeout_seconds* for *count* requests in total, and return whether they arrived."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._requests) >= count, timeout_seconds)

    def _respond(self, connection: Connection, request: Request) -> None:
        asked = _read(request)
        if self.attesting is not None and request.path.startswith(("/api/v1/agents/", "/api/v1/records")):
            self._attest(connection, request)
            return
        if asked is None or request.method != "GET":
            connection.write(error(404, "There is nothing here."))
            return
        with self._changed:
            self._requests.append(asked)
            self._changed.notify_all()
        if self.bearer is not None and asked.authorization != f"Bearer {self.bearer}":
            connection.write(error(401, "This token is not known."))
            return
        if self.attesting is not None and self.attesting.vm_of(request) != asked.vm_id:
            connection.write(error(401, "This token is not one of that VM."))
            return
        found = self._found(asked, connection.stop)
        if isinstance(found, Answer):
            connection.write(found)
        elif found is not None:
            answer_with_fault(connection, found, lambda: self._answer(asked) or self._nothing())
        else:
            connection.close_connection = True

    def _attest(self, connection: Connection, request: Request) -> None:
        assert self.attesting is not None
        fault = self._faults.take("all", request.method, request.path)
        if fault is None:
            connection.write(self.attesting.answer(request))
        else:
            answer_with_fault(connection, fault, lambda: error(500, "It is not answered."))

    def _found(self, asked: PortalRequest, stop: threading.Event) -> Answer | Fault | None:
        """Wait for the response to *asked*. None means that the portal stopped."""
        until = asked.at_seconds + min(asked.wait_seconds, _LONGEST_WAIT_SECONDS)
        with self._changed:
            while not stop.is_set():
                found = self._faults.take("all", "GET", asked.vm_id) or self._answer(asked)
                if found is not None:
                    return found
                left_seconds = until - time.monotonic()
                if left_seconds <= 0:
                    return self._nothing()
                self._changed.wait(left_seconds)
        return None

    def _answer(self, asked: PortalRequest) -> Answer | None:
        """Return the immediate response to *asked*, or None without a new decision."""
        with self._changed:
            if asked.index > self._index:
                return self._nothing()
            new = [(index, token) for index, token in self._queues.get(asked.vm_id, ()) if index > asked.index]
            if not new and asked.index:
                return None
            page = new[:_MOST_DECISIONS]
            index = page[-1][0] if len(page) < len(new) else self._index
            return self._said(index, [token for _, token in page])

    def _nothing(self) -> Answer:
        with self._changed:
            return self._said(self._index, [])

    def _said(self, index: int, decisions: list[str]) -> Answer:
        epoch = {} if self.epoch is None else {"epoch": self.epoch}
        return Answer(body=json.dumps({"index": index, "decisions": decisions, **epoch}).encode())


def _read(request: Request) -> PortalRequest | None:
    """Return the parsed poll, or None if *request* is not a poll."""
    path = _PATH.fullmatch(request.path)
    try:
        index, wait_seconds = int(request.query["index"]), float(request.query["wait"])
    except (KeyError, ValueError):
        return None
    if path is None:
        return None
    return PortalRequest(
        vm_id=path[1],
        index=index,
        wait_seconds=wait_seconds,
        authorization=request.headers.get("authorization"),
        at_seconds=time.monotonic(),
        asked=request,
    )


class _Server(HttpServer):
    """The server with TLS."""

    tls: ssl.SSLContext | None = None

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. The handshake runs at the first read, so that a slow client blocks no other."""
        connection, address = super().get_request()
        if self.tls is None:
            return connection, address
        try:
            connection.getpeername()  # otherwise, wrap_socket does not close a socket that was reset
            secure = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError:
            connection.close()
            raise
        return secure, address


def _toml_lines(table: Mapping[str, object]) -> list[str]:
    # A JSON string, number, or boolean is also valid TOML.
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]
