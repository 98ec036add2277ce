"""The listener for /healthz, /readyz and /metrics: HTTP for probes, Prometheus and people with curl.

It never holds anything up and cannot be held up: every connection has a thread, answers one request and is closed; of
more than sixteen at once the oldest is cut, so that a peer which never finishes its request keeps no probe out. A port
that is taken is an ERROR in the log and tried again, because watching matters more than being watched.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from bridge.logs import ThrottledLog
from bridge.system.threads import run_daemon

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 16
_READ_SECONDS = 5.0
#: The default, half a second, would cost an idle agent an eighth of its polls.
_WAKE_SECONDS = 60.0
_RETRY_SECONDS = 10.0
_JOIN_SECONDS = 0.2
#: Half of what a stop has beyond its grace.
_RESOLVE_SECONDS = 0.5
_TEXT = "text/plain; charset=utf-8"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a page says."""

    status: int = 200
    content_type: str = "application/json"
    body: bytes


Pages = Mapping[str, Callable[[], Answer]]
"""A function for each path; called on the thread of its request, so it must be bounded in time."""


class HealthServer:
    """Serves *pages* on *host* and *port*, from `open` to `close`; port 0 takes a free one."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        self._address = (host, port)
        self._pages = pages
        self._report = ThrottledLog(logger)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._next_try = float("-inf")

    @property
    def port(self) -> int | None:
        """The port that is listened on; null while it cannot be had."""
        return None if self._server is None else int(self._server.server_address[1])

    def open(self) -> None:
        """Listen, unless that is done; otherwise try again at most every ten seconds. Call it now and then."""
        if self._server is not None or time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + _RETRY_SECONDS
        host, port = self._address
        try:
            server = _Server(self._address, self._pages)
        except (OSError, ValueError) as error:  # ValueError: a host name that IDNA refuses
            why = (error.strerror if isinstance(error, OSError) else None) or error
            self._report.problem(
                "listen",
                logging.ERROR,
                f"status.listen: {host}:{port} cannot be listened on: {why}. The agent works "
                "without /healthz, /readyz and /metrics, and tries again. Free the port, or set another one.",
            )
            return
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": _WAKE_SECONDS}, name="status", daemon=True
        )
        self._thread.start()
        self._report.recovered("listen", "The port of status.listen is there now.")
        logger.info("Health and metrics are served.", extra={"listen": f"{host}:{self.port}"})

    def close(self) -> None:
        """Stop to listen and cut every connection."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        # `shutdown` waits for the loop, which sleeps until somebody connects.
        threading.Thread(target=server.shutdown, name="status:shutdown", daemon=True).start()
        until = time.monotonic() + _JOIN_SECONDS
        while self._thread.is_alive() and time.monotonic() < until:
            with suppress(OSError):
                server.wake()
            self._thread.join(_JOIN_SECONDS / 10)
        server.cut_all()
        server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    # On Windows it would let another program take the port over.
    allow_reuse_address = os.name != "nt"
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], pages: Pages) -> None:
        self.pages = pages
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.address_family, target = _resolved(*address)
        super().__init__(target, _Handler)

    def wake(self) -> None:
        """Have the loop turn."""
        host, port = self.server_address[:2]
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared, not listened on
        name = str(host)
        socket.create_connection((anywhere.get(name, name), int(port)), timeout=_JOIN_SECONDS).close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._open) >= _MOST_CONNECTIONS:
                _cut(self._open.pop(0))
            self._open.append(request)
        super().process_request(request, client_address)

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
        answer = self._answer(self.path.partition("?")[0])
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET  # noqa: N815  # the standard library calls it so

    def _answer(self, path: str) -> Answer:
        page = self.server.pages.get(path)
        if page is None:
            return Answer(
                status=404, content_type=_TEXT, body=f"There is {', '.join(sorted(self.server.pages))}.\n".encode()
            )
        try:
            return page()
        except Exception:
            logger.exception("%s failed.", path)
            return Answer(status=500, content_type=_TEXT, body=b"It failed; see the agent's log.\n")

    def log_message(self, *_: object) -> None:
        """Log nothing: a probe each ten seconds is no change of state."""


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the address of *host*; raise OSError when the resolver takes too long.

    It has no deadline of its own, so it is asked on a thread that may be left behind.
    """
    found = run_daemon(
        "status:resolve", socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    try:
        family, _, _, _, address = found.result(_RESOLVE_SECONDS)[0]
    except FutureTimeout:
        raise OSError(errno.ETIMEDOUT, f"the name was not found within {_RESOLVE_SECONDS:g} s") from None
    return family, address


def _cut(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
