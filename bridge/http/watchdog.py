"""Ends HTTP requests that exceed their deadline.

One watchdog thread serves the whole process.

The timeout in the `requests` library applies to each read, so a server that sends one byte at a time can keep a request
open indefinitely. When a request reaches its deadline, the watchdog shuts down its sockets, and any blocked send, TLS
handshake, or read returns immediately.

Each connection keeps a duplicate of its socket for the watchdog. The original is not enough, because TLS replaces the
socket object, and the client can still read a response with ``Connection: close`` after it has closed the connection.
All requests on a connection share one duplicate, so polling continues even if the process runs out of file descriptors.

The watchdog cannot interrupt a name lookup, because ``getaddrinfo`` does not expose a socket. Callers that use host
names need a second deadline, such as the one in `bridge.delivery.sender`.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import threading
import time

from bridge.errors import DeadlineExceeded


class Call:
    """A running request with a deadline. Use this class as a context manager.

    While the context is active, the watchdog can close any connection that the thread uses.
    """

    __slots__ = ("closed", "cut_by", "deadline_seconds", "expires_at", "session", "sockets")

    def __init__(self, session: object, deadline_seconds: float) -> None:
        self.session = session
        self.deadline_seconds = deadline_seconds
        self.expires_at = time.monotonic() + deadline_seconds
        self.cut_by: str | None = None
        self.sockets: list[socket.socket] = []
        self.closed: list[socket.socket] = []
        """The sockets of connections that were closed during the request. The response can still use them."""

    def __enter__(self) -> None:
        watchdog.begin(self)
        in_flight.call = self

    def __exit__(self, *_: object) -> None:
        in_flight.call = None
        watchdog.end(self)
        for each in self.closed:
            each.close()

    def remaining_seconds(self) -> float:
        """Return the time left. It is never 0, because a socket timeout of 0 means non-blocking."""
        return max(0.001, self.expires_at - time.monotonic())

    def cut(self, cut_by: str) -> None:
        """Shut down the sockets. *cut_by* is "deadline" or "close"."""
        self.cut_by = self.cut_by or cut_by
        for each in self.sockets:
            with contextlib.suppress(OSError):  # the peer has already closed the connection
                each.shutdown(socket.SHUT_RDWR)

    def raise_if_cut(self, error: Exception | None = None, *, is_timeout: bool = False) -> None:
        """Raise an error if the request was aborted or has timed out."""
        if self.cut_by == "close":
            raise ConnectionAbortedError("the connection was closed") from error
        is_late = error is not None and time.monotonic() >= self.expires_at
        if self.cut_by == "deadline" or is_timeout or is_late:
            seconds = f"{self.deadline_seconds:g} s"
            raise DeadlineExceeded(f"no complete response within {seconds}, so the request was cut") from error


class _Watchdog:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None

    def begin(self, call: Call) -> None:
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # after a fork, the thread is not alive
                self._thread = threading.Thread(target=self._watch, name="deadline-watchdog", daemon=True)
                self._thread.start()
            self._calls.add(call)
            if call.expires_at < self._wakes_at:
                self._wakes_at = call.expires_at
                self._changed.notify()

    def watch(self, call: Call, duplicate: socket.socket) -> None:
        with self._changed:
            call.sockets.append(duplicate)
            if call.cut_by is not None:
                call.cut(call.cut_by)

    def end(self, call: Call) -> None:
        with self._changed:
            self._calls.discard(call)

    def cut_session(self, session: object) -> None:
        with self._changed:
            for call in self._calls:
                if call.session is session:
                    call.cut("close")

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for call in self._calls:
                    if call.expires_at <= now and call.cut_by is None:
                        call.cut("deadline")
                self._wakes_at = min((each.expires_at for each in self._calls if each.cut_by is None), default=math.inf)
                is_idle = math.isinf(self._wakes_at)
                self._changed.wait(None if is_idle else min(self._wakes_at - now, threading.TIMEOUT_MAX))


class _InFlight(threading.local):
    """Stores the current thread's request, because urllib3 cannot pass it to a connection."""

    call: Call | None = None


in_flight = _InFlight()
watchdog = _Watchdog()


class Watched(http.client.HTTPConnection):
    """A connection whose socket the watchdog can shut down."""

    _watched_for: Call | None = None
    _duplicate: socket.socket | None = None

    def watch_new(self, call: Call, connected: socket.socket) -> None:
        """Let *call* use the new socket *connected*."""
        connected.settimeout(call.remaining_seconds())
        try:
            self._duplicate = socket.fromfd(connected.fileno(), connected.family, connected.type)
        except OSError:  # out of descriptors
            connected.close()
            raise
        self.watch(call)

    def watch(self, call: Call) -> None:
        """Let *call* use the open connection."""
        if self._duplicate is not None and self._watched_for is not call:
            watchdog.watch(call, self._duplicate)
            self._watched_for = call

    def is_readable(self) -> bool:
        """Return whether the peer closed the idle connection or sent unexpected bytes."""
        if self._duplicate is None:
            return True
        self._duplicate.settimeout(0)
        try:
            self._duplicate.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Close the connection.

        If a request is still running, the duplicate socket stays open, so that the watchdog can still interrupt the
        response.
        """
        super().close()
        duplicate, self._duplicate = self._duplicate, None
        if duplicate is not None and in_flight.call is not None:
            in_flight.call.closed.append(duplicate)
        elif duplicate is not None:
            duplicate.close()


def connected_socket(call: Call, host: str, port: int) -> socket.socket:
    """Return a socket connected to *host*. Each address gets an equal share of the time left."""
    error = OSError("the name has no address")
    name = host.strip("[]")
    encoded = name.encode() if name.isascii() else name.encode("idna")  # the codec for a str would need 1 MB
    found = socket.getaddrinfo(encoded, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, address) in enumerate(found):
        candidate = socket.socket(family, kind, protocol)
        try:
            candidate.settimeout(call.remaining_seconds() / (len(found) - number))
            candidate.connect(address)
            candidate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as exc:
            candidate.close()
            error = exc
        else:
            return candidate
    raise error
