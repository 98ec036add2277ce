"""DeadlineConnection: a keep-alive connection to one HTTP server, with a wall-clock deadline for every request.

The poll uses it. On a machine that is idle between two polls, a request over `http.client` takes less than half of the
CPU time of a request over requests and urllib3. The connection uses no proxy, follows no redirect, and retries nothing.
`bridge.http.watchdog` cuts overdue requests.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Mapping
from email.message import Message
from typing import NamedTuple

from bridge.errors import DeadlineExceeded
from bridge.http.watchdog import Call, Watched, address_shares, cut_calls_of

_CLOSE_SECONDS = 1.0


class Response(NamedTuple):
    """A response with any status."""

    status: int
    reason: str
    headers: Message
    body: bytes
    """Empty if *unread* has a reason."""
    unread: str | None = None
    """Why the body was not read: it is too large, or compressed although the request did not allow it."""


class DeadlineConnection:
    """A connection to *host*. Threads can share it; their requests run one after the other."""

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
        """Return the response. Raises DeadlineExceeded at the deadline, OSError, and http.client.HTTPException."""
        with self._is_free:
            call = Call(self, deadline_seconds)
            try:
                with call:
                    self._connection.begin(call)
                    self._connection.request(method, path, body, dict(headers))
                    response = self._connection.read_response(max_body_bytes)
            except (OSError, http.client.HTTPException) as exc:
                self._connection.close()
                _raise_if_cut(call, exc)
                raise
            # A body that ends with its connection looks complete after the watchdog has shut down the socket.
            _raise_if_cut(call, None)
            return response

    def close(self) -> None:
        """End the request of another thread, and close the connection. A later request opens it again."""
        cut_calls_of(self)
        if self._is_free.acquire(timeout=_CLOSE_SECONDS):
            self._connection.close()
            self._is_free.release()


class _Connection(Watched):
    _call: Call

    def begin(self, call: Call) -> None:
        """Let *call* use this connection. If the server has closed it, the request opens a new one."""
        self._call = call
        if self.sock is not None and _is_readable(self.sock):
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


def _is_readable(idle: socket.socket) -> bool:
    """Return whether the server has closed the *idle* connection, or sent bytes that no request asked for."""
    idle.settimeout(0)
    try:
        idle.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _raise_if_cut(call: Call, exc: Exception | None) -> None:
    if call.cut_by == "close":
        raise ConnectionAbortedError("the connection was closed") from exc
    if call.cut_by == "deadline" or isinstance(exc, TimeoutError):
        raise DeadlineExceeded(
            f"no complete answer within {call.deadline_seconds:g} s, so the request was cut"
        ) from exc
