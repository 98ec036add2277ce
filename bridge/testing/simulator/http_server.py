"""Runs the simulator's HTTP server, which ends all connections and threads when it stops.

The HTTP server in the standard library leaves the threads of open connections running when it is closed. This server
closes every connection and waits for every thread, so tests do not leak sockets. Each response is sent in one write,
without Nagle's algorithm, to avoid waiting 40 ms for an acknowledgment.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from bridge.testing.simulator.imds_api import Answer, Request

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 20
_ACCEPT_POLL_SECONDS = 0.05
_JOIN_SECONDS = 5.0


class Connection(BaseHTTPRequestHandler):
    """One client connection. The server's `respond` function handles every request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    """Enables buffering, so that the server sends the headers and the body in one segment."""
    timeout = None

    @property
    def stop(self) -> threading.Event:
        """Return the event that is set when the server closes."""
        return cast("HttpServer", self.server).stop

    def handle_request(self) -> None:
        """Read one request, and write the response."""
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if not 0 <= length <= _MAX_BODY_BYTES or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            self.write(Answer(status=411, body=b'{"error": "Send a Content-Length of at most 1 MiB."}'))
            return
        url = urlsplit(self.path)
        request = Request(
            method=self.command,
            path=url.path,
            query=dict(parse_qsl(url.query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(length),
        )
        cast("HttpServer", self.server).respond(self, request)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = handle_request  # noqa: N815 - http.server calls these names

    def write(self, answer: Answer) -> None:
        """Write the response *answer*."""
        self.wfile.write(self.head(answer, len(answer.body)))
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        self.wfile.flush()

    def head(self, answer: Answer, length: int) -> bytes:
        """Return the status line and the headers of *answer* for a body of *length* bytes."""
        reason = self.responses.get(answer.status, ("Unknown", ""))[0]
        lines = [
            f"HTTP/1.1 {int(answer.status)} {reason}",
            "Server: IMDS/simulated",
            f"Date: {self.date_time_string()}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {length}",
            *(f"{name}: {value}" for name, value in answer.headers.items()),
        ]
        if self.close_connection:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in http.server
        """Log the message at level DEBUG."""
        logger.debug(format, *args)


class HttpServer(ThreadingHTTPServer):
    """An HTTP server with one thread per connection.

    `close` ends all threads and closes all sockets.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], respond: Callable[[Connection, Request], None], stop: threading.Event
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.respond = respond
        self.stop = stop
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._acceptor: threading.Thread | None = None
        super().__init__(address, Connection)

    def server_bind(self) -> None:
        """Bind without the name lookup of http.server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)

    @property
    def endpoint(self) -> str:
        """Return ``http://HOST:PORT`` of this server."""
        host = str(self.server_address[0])
        return f"http://[{host}]:{self.server_port}" if ":" in host else f"http://{host}:{self.server_port}"

    def start(self) -> None:
        """Accept connections on a separate thread."""
        self._acceptor = threading.Thread(
            target=self.serve_forever,
            kwargs={"poll_interval": _ACCEPT_POLL_SECONDS},
            name=f"simulator:{self.server_port}",
            daemon=True,
        )
        self._acceptor.start()

    def close(self) -> None:
        """Stop the server, close every connection, and wait for the threads.

        A second call has no effect.
        """
        self.stop.set()
        if self._acceptor is not None:
            self.shutdown()
            self._acceptor.join(_JOIN_SECONDS)
            self._acceptor = None
        self.server_close()
        with self._lock:
            connections = dict(self._connections)
        for connection, thread in connections.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(_JOIN_SECONDS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle one connection on a separate thread."""
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        with self._lock:
            self._connections[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        """Close one connection."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the signature of socketserver
        """Log the error, unless the client closed its connection."""
        problem = sys.exc_info()[1]
        if not isinstance(problem, OSError):
            logger.error("The simulator failed on a request from %s", client_address, exc_info=problem)
