"""The watchdog: one thread per process that ends every HTTP call at its wall-clock deadline.

The timeout of requests applies to each read, so a peer that sends a byte now and then never exceeds it. The watchdog
shuts down the sockets of an overdue call instead. A blocked send, handshake, or read then returns immediately, with
and without TLS. Each connection keeps a second descriptor of its socket, because TLS replaces the first socket object,
and because a response with ``Connection: close`` outlives its connection. A call on an open connection needs no new
descriptor, so polls continue when the process has no free descriptors.

A call wakes the thread only if the call is due before the thread wakes anyway, so most calls do not wake the thread.

The watchdog cannot end a name lookup, because ``getaddrinfo`` has no socket. Callers that use names instead of
addresses need an outer deadline, as the delivery host has.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import threading
import time


class Call:
    """One call in flight, as a context manager: its deadline, its sockets, and the reason why it was cut.

    Every connection that the thread uses inside the context belongs to the call.
    """

    __slots__ = ("closed", "cut_by", "deadline_seconds", "expires_at", "session", "sockets", "started_at")

    def __init__(self, session: object, deadline_seconds: float) -> None:
        self.session = session
        self.deadline_seconds = deadline_seconds
        self.started_at = time.monotonic()
        self.expires_at = self.started_at + deadline_seconds
        self.cut_by: str | None = None
        self.sockets: list[socket.socket] = []
        self.closed: list[socket.socket] = []
        """The sockets whose connections were closed during the call. A response can still use them."""

    def __enter__(self) -> None:
        _watchdog.begin(self)
        _in_flight.call = self

    def __exit__(self, *_: object) -> None:
        _in_flight.call = None
        _watchdog.end(self)
        for each in self.closed:
            each.close()

    def remaining_seconds(self) -> float:
        """Return the time left. The value is never 0, because a socket timeout of 0 means non-blocking."""
        return max(0.001, self.expires_at - time.monotonic())

    def cut(self, cut_by: str) -> None:
        """Shut down the sockets; *cut_by* is "deadline" or "close"."""
        self.cut_by = self.cut_by or cut_by
        for each in self.sockets:
            with contextlib.suppress(OSError):  # the peer has already closed the connection
                each.shutdown(socket.SHUT_RDWR)


class _Watchdog:
    """Cuts overdue calls on one daemon thread, which starts with the first call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None

    def begin(self, call: Call) -> None:
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # not alive: after a fork
                self._thread = threading.Thread(target=self._watch, name="deadline-watchdog", daemon=True)
                self._thread.start()
            self._calls.add(call)
            if call.expires_at < self._wakes_at:
                self._wakes_at = call.expires_at
                self._changed.notify()

    def watch(self, call: Call, duplicate: socket.socket) -> None:
        """Let *call* be cut at *duplicate*. If the call is already cut, cut it again."""
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
    """The call of this thread. urllib3 offers no way to pass it to a connection."""

    call: Call | None = None


_in_flight = _InFlight()
_watchdog = _Watchdog()


def current_call() -> Call | None:
    """Return the call of this thread."""
    return _in_flight.call


def cut_calls_of(session: object) -> None:
    """Cut every call of *session* that is in flight."""
    _watchdog.cut_session(session)


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
            _watchdog.watch(call, self._duplicate)
            self._watched_for = call

    def is_readable(self) -> bool:
        """Return whether the peer has closed the idle connection, or sent bytes that no request asked for."""
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
        """Close the connection. A call in flight keeps the duplicate, because its response can use the socket."""
        super().close()
        duplicate, self._duplicate = self._duplicate, None
        if duplicate is not None and _in_flight.call is not None:
            _in_flight.call.closed.append(duplicate)
        elif duplicate is not None:
            duplicate.close()


def connected_socket(call: Call, host: str, port: int) -> socket.socket:
    """Return a socket that is connected to one of the addresses of *host*. Each gets an equal share of the time left.

    With the whole time for each address, a name with two dead addresses would take twice the deadline.
    """
    error = OSError("the name has no address")
    name = host.strip("[]")
    encoded = name.encode() if name.isascii() else name.encode("idna")  # bytes: the codec for a str needs 1 MB
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
