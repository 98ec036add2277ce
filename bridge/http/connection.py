"""DeadlineConnection is the HTTP client of the IMDS poll. Each request has a deadline.

The client keeps one connection open. The agent polls every second, and a request over `http.client` takes less than
half of the CPU time of a request over requests. The connection uses no proxy, follows no redirects, and retries
nothing.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Mapping
from email.message import Message
from typing import NamedTuple

from urllib3.util import wait_for_read

from bridge.http.watchdog import Call, Watched, address_shares, cut_calls_of

_CLOSE_SECONDS = 1.0


class Response(NamedTuple):
    """A response with any status."""

    status: int
    reason: str
    headers: Message
    body: bytes
    """The body. It is empty if *unread* is set."""
    unread: str | None = None
    """The reason why the body was not read. The body is too large or unexpectedly compressed."""


class DeadlineConnection:
    """A connection to *host*. Threads can share the connection, and their requests run one after another."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = _Connection(host, port)
        self._is_free = threading.Lock()

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        deadline_seconds: float,
        max_body_bytes: int,
        body: bytes | None = None,
    ) -> Response:
        """Send a request and return the response.

        Raises DeadlineExceeded at the deadline, OSError, and http.client.HTTPException.
        """
        with self._is_free:
            call = Call(self, deadline_seconds)
            try:
                with call:
                    self._connection.begin(call)
                    self._connection.request(method, path, body, dict(headers))
                    response = self._connection.read_response(max_body_bytes)
            except (OSError, http.client.HTTPException) as exc:
                self._connection.close()
                call.raise_if_cut(exc, is_timeout=isinstance(exc, TimeoutError))
                raise
            # A body that ends with its connection looks complete after the watchdog has shut down the socket.
            call.raise_if_cut()
            return response

    def close(self) -> None:
        """Cancel the request of another thread and close the connection. The next request opens it again."""
        cut_calls_of(self)
        if self._is_free.acquire(timeout=_CLOSE_SECONDS):
            self._connection.close()
            self._is_free.release()


class _Connection(Watched):
    _call: Call

    def begin(self, call: Call) -> None:
        self._call = call
        if self.sock is not None and wait_for_read(self.sock, timeout=0):
            self.close()
        if self.sock is not None:
            self.sock.settimeout(call.remaining_seconds())
            self.watch(call)

    def connect(self) -> None:
        error: OSError = OSError("the name has no address")
        for address, seconds in address_shares(self._call, self.host, self.port):
            try:
                self.sock = socket.create_connection((address, self.port), seconds)
            except OSError as exc:
                error = exc
            else:
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.watch_new(self._call, self.sock)
                return
        raise error

    def read_response(self, max_body_bytes: int) -> Response:
        response = self.getresponse()
        coding = response.headers.get("Content-Encoding", "identity").strip().lower()
        unread = None
        body = b""
        if coding not in {"", "identity"}:
            unread = "The response has a Content-Encoding, although the request allows none."
        else:
            limit = max_body_bytes + 1  # Python 3.10 allocates the whole argument of read
            body = response.read(limit if response.length is None else min(response.length, limit))
            if len(body) > max_body_bytes:
                unread = f"The response is larger than {max_body_bytes // 1024**2} MiB."
            elif response.length:
                raise http.client.IncompleteRead(body, response.length)
        if unread is not None:
            response.close()
            self.close()
        return Response(response.status, response.reason, response.headers, b"" if unread else body, unread)
