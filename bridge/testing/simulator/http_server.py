"""The sockets under the simulator: HTTP/1.1 with keep-alive, one thread a connection, and a close that leaves nothing.

The standard server keeps connection threads alive after it is closed when a client keeps its connection; this one
shuts every connection down and waits for its thread, so that a test ends without open sockets. Answers leave in one
write, and Nagle's algorithm is off: a poll must not wait 40 ms for an acknowledgement.
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
    """One client; every request goes to the server's `respond`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    """Buffered, so that headers and body leave in one segment."""
    timeout = None

    @property
    def stop(self) -> threading.Event:
        """Return what is set when the server closes."""
        return cast("HttpServer", self.server).stop

    def handle_request(self) -> None:
        """Read one request and let the server answer it."""
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

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = handle_request  # noqa: N815 - the names that http.server calls

    def write(self, answer: Answer) -> None:
        """Write *answer* whole."""
        self.wfile.write(self.head(answer, len(answer.body)))
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        self.wfile.flush()

    def head(self, answer: Answer, length: int) -> bytes:
        """Return the status line and headers of *answer*, for a body of *length* bytes."""
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

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that http.server uses
        """Leave the console alone."""
        logger.debug(format, *args)


class HttpServer(ThreadingHTTPServer):
    """A server whose `close` leaves no thread and no socket behind."""

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
        """Bind, without the look-up of a name that http.server does."""
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
        """Accept connections in a thread."""
        self._acceptor = threading.Thread(
            target=self.serve_forever,
            kwargs={"poll_interval": _ACCEPT_POLL_SECONDS},
            name=f"simulator:{self.server_port}",
            daemon=True,
        )
        self._acceptor.start()

    def close(self) -> None:
        """Stop accepting, end every connection, wait for the threads; may be called twice."""
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
        """Handle one connection in a thread of its own, and remember both."""
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        with self._lock:
            self._connections[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        """End one connection and forget it."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - of socketserver
        """Take a client that went away as nothing; log anything else."""
        problem = sys.exc_info()[1]
        if not isinstance(problem, OSError):
            logger.error("The simulator failed on a request from %s", client_address, exc_info=problem)
