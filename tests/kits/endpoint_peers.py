"""HTTP peers for the tests of the endpoint."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from typing import Any

from bridge.sink import DeliveryFailed, DeliveryRejected
from bridge.testing.simulator.http_server import HttpServer
from bridge.testing.simulator.imds_api import Answer, Request
from sinks.http.endpoint import Endpoint

DEADLINE = 1.0

#: Timeout for a peer that responds.
PATIENCE_SECONDS = 30.0


class Peer:
    """A server with a configurable response that records requests."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.requests: queue.Queue[Request] = queue.Queue()
        self.answer = Answer(status=200, body=b"{}")
        self.connections = 0
        self._server = HttpServer(("127.0.0.1", 0), self._respond, threading.Event())
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._seen: list[Any] = []  # kept alive, because the id of a deleted object is soon reused
        self._server.start()
        self.scheme = "http" if tls is None else "https"
        self.port = self._server.server_port

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def _respond(self, connection: Any, request: Request) -> None:
        if not any(each is connection for each in self._seen):
            self._seen.append(connection)
            self.connections += 1
        self.requests.put(request)
        connection.write(self.answer)

    def close(self) -> None:
        self._server.close()


class RawPeer:
    """A socket that reads a request on each connection and then runs *behaviour*."""

    def __init__(self, behaviour: Any) -> None:
        self._behaviour = behaviour
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.stop = threading.Event()
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                with contextlib.suppress(OSError), connection:
                    connection.recv(65536)
                    self._behaviour(self, connection)

    def close(self) -> None:
        self.stop.set()
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.join(5)


def outcome(endpoint: Endpoint) -> tuple[str, frozenset[str]]:
    """Send a POST, and return its outcome and the flags of its error."""
    try:
        endpoint.post(b"{}", {"Content-Type": "application/json"})
    except DeliveryRejected:
        return "parked", frozenset()
    except DeliveryFailed as error:
        said = {name for name in ("needs_attention", "gone") if getattr(error, name)}
        return "failed", frozenset(said | ({"retry_after"} if error.retry_after is not None else set()))
    return "delivered", frozenset()
