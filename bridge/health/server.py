"""Runs one HTTP server for /healthz, /readyz, and /metrics, and another for /serving.

Each connection has its own thread and is closed after one request. If more than sixteen connections are open, the
server closes the oldest one, so that incomplete requests cannot block health probes. If the port is in use, the agent
logs an ERROR and tries again later, but continues to poll and deliver.

If the server listens on a loopback address, it rejects requests whose Host header contains a name other than localhost
or a loopback address. This prevents DNS rebinding, which would let a web page in a local browser read the health pages.
The server of /serving accepts every Host header, because load balancers set their own.
"""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from bridge.http.failures import are_loopback_hosts, is_loopback
from bridge.logs import ThrottledLog

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 16
_READ_SECONDS = 5.0
#: On Linux, shutting down the listening socket wakes the server thread. Other systems need a short interval, although
#: it wakes an idle agent more often.
_WAKE_SECONDS = 60.0 if sys.platform == "linux" else 0.5
_RETRY_SECONDS = 10.0
#: The server waits after a failed accept. If no descriptor is free, the next attempt also fails.
_REFUSED_SECONDS = 0.25
_TEXT = "text/plain; charset=utf-8"
_FOREIGN_NAME = b"This server listens on loopback. Use localhost or a loopback address as the name of the host.\n"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The response of one page."""

    status: int = 200
    content_type: str = "application/json"
    body: bytes


Pages = Mapping[str, Callable[[], Response]]
"""A function for each path. The function runs on the thread of the request and must return quickly."""


class HealthServer:
    """Serves *pages* on *host* and *port* between `open` and `close`.

    If *port* is 0, the system selects a free port. If *host* is empty, the server does not listen. Log messages name
    the configuration key *setting*.
    """

    def __init__(
        self,
        host: str,
        port: int,
        pages: Pages,
        *,
        setting: str = "status.listen",
        accepts_any_host: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = (host, port)
        self._setting = setting
        self._accepts_any_host = accepts_any_host
        self._pages = pages
        self._monotonic = monotonic
        self._log = ThrottledLog(logger)
        self._server: _Server | None = None
        self._next_try = float("-inf")

    @property
    def port(self) -> int | None:
        """Return the port, or None if the server does not listen."""
        return None if self._server is None else int(self._server.server_address[1])

    def open(self) -> None:
        """Listen, unless the server already listens. Try at most once every ten seconds."""
        if not self._address[0] or self._server is not None or self._monotonic() < self._next_try:
            return
        self._next_try = self._monotonic() + _RETRY_SECONDS
        host, port = self._address
        try:
            server = _Server(host, port, self._pages, accepts_any_host=self._accepts_any_host)
        except OSError as error:
            self._log.problem(
                "listen",
                logging.ERROR,
                f"The agent cannot listen on {host}:{port} ({self._setting}): {error.strerror or error}. It runs "
                f"without {', '.join(self._pages)}, and tries again. Free the port, or set another port.",
            )
            return
        options = {"poll_interval": _WAKE_SECONDS}
        threading.Thread(target=server.serve_forever, kwargs=options, name="status", daemon=True).start()
        self._server = server
        self._log.recovered("listen", f"The agent listens on {self._setting} again.")
        logger.info("%s: listening.", self._setting, extra={"listen": f"{host}:{self.port}"})

    def close(self) -> None:
        """Stop listening and close all connections."""
        server, self._server = self._server, None
        if server is not None:
            server.is_closing.set()
            _cut(server.socket)  # wakes the loop that `shutdown` waits for
            server.shutdown()
            server.cut_all()
            server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    # On Windows, this option would allow another program to use the same port.
    allow_reuse_address = os.name != "nt"
    request_queue_size = 64

    def __init__(self, host: str, port: int, pages: Pages, *, accepts_any_host: bool) -> None:
        self.pages = pages
        self.is_local = is_loopback(host) and not accepts_any_host
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.is_closing = threading.Event()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # The code avoids a name lookup, because a lookup has no deadline.
        super().__init__(("127.0.0.1" if host == "localhost" else host, port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Wait after a failure to keep the loop from using 100% of a CPU."""
        try:
            return super().get_request()
        except OSError:
            self.is_closing.wait(_REFUSED_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._open) >= _MOST_CONNECTIONS:
                _cut(self._open.pop(0))
            self._open.append(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can start, so respond to one request at a time
            self.process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock, suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def cut_all(self) -> None:
        with self._lock:
            for request in self._open:
                _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # socketserver's signature
        # It is normal that a client disconnects early, so do not log an error.
        logger.debug("A status request was not completed: %r", sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "scheduled-events-bridge"
    sys_version = ""
    error_content_type = _TEXT
    error_message_format = "%(message)s\n"
    timeout = _READ_SECONDS

    def do_GET(self) -> None:
        response = self._response(self.path.partition("?")[0])
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    do_HEAD = do_GET  # noqa: N815  # the name that the standard library calls

    def _response(self, path: str) -> Response:
        if self.server.is_local and not are_loopback_hosts(self.headers.get_all("Host", [])):
            return Response(status=421, content_type=_TEXT, body=_FOREIGN_NAME)
        page = self.server.pages.get(path)
        if page is None:
            return Response(
                status=404, content_type=_TEXT, body=f"Valid paths: {', '.join(sorted(self.server.pages))}.\n".encode()
            )
        try:
            return page()
        except Exception:
            logger.exception("%s failed.", path)
            return Response(status=500, content_type=_TEXT, body=b"The page failed. See the log of the agent.\n")

    def log_message(self, *_: object) -> None:
        """Log nothing, because probes every few seconds would fill the log."""


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
