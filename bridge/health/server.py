"""The HTTP server of /healthz, /readyz and /metrics, for probes, Prometheus and people with curl.

It delays nothing in the agent and no peer can block it: each connection has a thread, gets one answer and is closed; of
more than sixteen at once the oldest is cut, so that a peer which never finishes its request keeps no probe out. A port
that is taken is an ERROR in the log and tried again, because the agent's work matters more than its health page.

On loopback it answers to no foreign name in the header Host: else any web page that somebody on this machine looks at
could have its own name point here, and read what stands here.
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
#: The default, half a second, would cost an idle agent an eighth of its polls. It is needed where a listening socket
#: cannot be woken by its shutdown.
_WAKE_SECONDS = 60.0 if sys.platform == "linux" else 0.5
_RETRY_SECONDS = 10.0
#: How long a connection waits that could not be accepted: without a descriptor the next try fails as well.
_REFUSED_SECONDS = 0.25
_TEXT = "text/plain; charset=utf-8"
_FOREIGN_NAME = (
    b"This listens on loopback, and answers to localhost or a loopback address as the name of its host alone.\n"
)


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one page."""

    status: int = 200
    content_type: str = "application/json"
    body: bytes


Pages = Mapping[str, Callable[[], Response]]
"""A function for each path; called on the thread of its request, so it must be bounded in time."""


class HealthServer:
    """Serves *pages* on *host* and *port*, from `open` to `close`; port 0 takes a free one."""

    def __init__(self, host: str, port: int, pages: Pages, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._address = (host, port)
        self._pages = pages
        self._monotonic = monotonic
        self._log = ThrottledLog(logger)
        self._server: _Server | None = None
        self._next_try = float("-inf")

    @property
    def port(self) -> int | None:
        """The port that is listened on; None while there is none."""
        return None if self._server is None else int(self._server.server_address[1])

    def open(self) -> None:
        """Listen, unless that is done; otherwise try again at most every ten seconds. Call it now and then."""
        if self._server is not None or self._monotonic() < self._next_try:
            return
        self._next_try = self._monotonic() + _RETRY_SECONDS
        host, port = self._address
        try:
            self._server = self._started()
        except OSError as error:
            self._log.problem(
                "listen",
                logging.ERROR,
                f"status.listen: {host}:{port} cannot be listened on: {error.strerror or error}. The agent works "
                "without /healthz, /readyz and /metrics, and tries again. Free the port, or set another one.",
            )
            return
        self._log.recovered("listen", "The port of status.listen is there now.")
        logger.info("Health and metrics are served.", extra={"listen": f"{host}:{self.port}"})

    def _started(self) -> _Server:
        """Return a server that listens; raise OSError when the port, or a thread, cannot be had."""
        server = _Server(*self._address, self._pages)
        serving = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": _WAKE_SECONDS}, name="status", daemon=True
        )
        try:
            serving.start()
        except RuntimeError as error:
            server.server_close()
            raise OSError(str(error)) from error
        return server

    def close(self) -> None:
        """Stop listening and cut every connection."""
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
    # On Windows it would let another program take the port over.
    allow_reuse_address = os.name != "nt"
    request_queue_size = 64

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        self.pages = pages
        self.is_local = is_loopback(host)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.is_closing = threading.Event()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # No name is looked up: that has no deadline of its own.
        super().__init__(("127.0.0.1" if host == "localhost" else host, port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; where that fails, wait a little, or the loop would try it again without end."""
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
        except RuntimeError:  # no thread is to be had: one request after the other is better than no answer
            self.process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock, suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def cut_all(self) -> None:
        """End every connection."""
        with self._lock:
            cut = list(self._open)
        for request in cut:
            _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # socketserver's signature
        # Called where the error is caught; a prober that goes away is no news.
        logger.debug("A request for status was not finished: %r", sys.exc_info()[1])


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

    do_HEAD = do_GET  # noqa: N815  # the standard library calls it so

    def _response(self, path: str) -> Response:
        if self.server.is_local and not are_loopback_hosts(self.headers.get_all("Host", [])):
            return Response(status=421, content_type=_TEXT, body=_FOREIGN_NAME)
        page = self.server.pages.get(path)
        if page is None:
            return Response(
                status=404, content_type=_TEXT, body=f"There is {', '.join(sorted(self.server.pages))}.\n".encode()
            )
        try:
            return page()
        except Exception:
            logger.exception("%s failed.", path)
            return Response(status=500, content_type=_TEXT, body=b"It failed; see the agent's log.\n")

    def log_message(self, *_: object) -> None:
        """Log nothing: a probe each ten seconds is no change of state."""


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
