"""Connections whose calls end at their wall-clock deadline, and the watchdog that cuts those under TLS.

requests' own timeout is per read: a peer that drips a byte now and then never ends it. Without TLS the socket itself
gives each read and each write only what is left of the call (`_TimedSocket`), which costs nothing while all is well: a
poll of IMDS wakes no other thread. Under TLS one read of ours may be many of the socket, so one watchdog thread for the
whole process shuts down the sockets of a call that is overdue; whatever that call was blocked in (a send, a handshake,
a header, a body) returns at once. What it notes is a duplicate of the descriptor, because wrapping in TLS puts another
object in the socket's place, and because a response with ``Connection: close`` outlives its connection.

The watchdog is woken only for a call that ends before everything it waits for already.

One thing is out of reach: looking up a name. ``getaddrinfo`` has no socket to shut down, so a resolver that hangs
holds the call past its deadline. Addresses given as numbers are not affected; who calls with names keeps an outer
deadline, as the delivery host does.
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool


class Call:
    """One call in flight: when it ends, the wires it uses, and who cut it."""

    __slots__ = ("cut_by", "deadline_seconds", "expires_at", "is_reused", "session", "started_at", "wires")

    def __init__(self, session: object, deadline_seconds: float) -> None:
        self.session = session
        self.deadline_seconds = deadline_seconds
        self.started_at = time.monotonic()
        self.expires_at = self.started_at + deadline_seconds
        self.is_reused = False
        self.cut_by: str | None = None
        self.wires: list[_Wire] = []

    def remaining_seconds(self) -> float:
        """Return the time left, never 0: a socket timeout of 0 would mean something else."""
        return max(0.001, self.expires_at - time.monotonic())


class _Wire:
    """A second descriptor of a connection's socket, good for shutting it down whatever became of the first.

    *is_timed* says that the socket ends its calls itself, without the watchdog.
    """

    __slots__ = ("_socket", "is_orphan", "is_timed")

    def __init__(self, connected: socket.socket, *, is_timed: bool) -> None:
        self._socket = connected.dup()
        self.is_orphan = False
        self.is_timed = is_timed

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):  # the peer was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class _Watchdog:
    """The one thread that cuts overdue calls; it starts with the first that needs it and sleeps while there is none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # an RLock: a collected pool closes its connections anywhere
        self._calls: set[Call] = set()
        """Those in flight."""
        self._guarded: set[Call] = set()
        """Those of them that are to be cut here."""
        self._wakes_at = math.inf
        self._last_expiry = -math.inf
        self._thread: threading.Thread | None = None

    def begin(self, call: Call) -> None:
        with self._changed:
            self._calls.add(call)

    def end(self, call: Call) -> None:
        with self._changed:
            self._calls.discard(call)
            self._guarded.discard(call)
            for wire in call.wires:
                if wire.is_orphan:
                    wire.close()
            call.wires.clear()

    def attach(self, call: Call, wire: _Wire) -> None:
        """Let *call* be cut at *wire*; one that was cut already is cut there too."""
        with self._changed:
            call.wires.append(wire)
            if call.cut_by is not None:
                wire.shut_down()
            elif not wire.is_timed and call not in self._guarded:
                self._guard(call)

    def _guard(self, call: Call) -> None:
        self._guarded.add(call)
        self._last_expiry = call.expires_at
        if self._thread is None or not self._thread.is_alive():
            self._wakes_at = call.expires_at
            self._thread = threading.Thread(target=self._watch, name="deadline-watchdog", daemon=True)
            self._thread.start()
        elif call.expires_at < self._wakes_at:
            self._wakes_at = call.expires_at
            self._changed.notify()

    def release(self, wire: _Wire, call: Call | None) -> None:
        """Close *wire*, or leave that to the end of *call*, which may still read the body through it."""
        with self._changed:
            if call is not None and wire in call.wires:
                wire.is_orphan = True
            else:
                wire.close()

    def cut_session(self, session: object) -> None:
        with self._changed:
            for call in self._calls:
                if call.session is session:
                    self._cut(call, "close")

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for call in [call for call in self._guarded if call.expires_at <= now]:
                    self._guarded.discard(call)
                    self._cut(call, "deadline")
                idle_until = self._last_expiry if self._last_expiry > now else math.inf
                self._wakes_at = min((call.expires_at for call in self._guarded), default=idle_until)
                is_idle = math.isinf(self._wakes_at)
                self._changed.wait(None if is_idle else min(self._wakes_at - now, threading.TIMEOUT_MAX))

    @staticmethod
    def _cut(call: Call, cut_by: str) -> None:
        call.cut_by = call.cut_by or cut_by
        for wire in call.wires:
            wire.shut_down()


class _InFlight(threading.local):
    """The call that this thread is in: urllib3 offers no way to hand it down to a connection."""

    call: Call | None = None


_in_flight = _InFlight()
_watchdog = _Watchdog()


class Watched:
    """Lets *call* be cut at its deadline, with every connection that this thread uses meanwhile; a context manager."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        _in_flight.call = self._call
        _watchdog.begin(self._call)

    def __exit__(self, *_: object) -> None:
        _in_flight.call = None
        _watchdog.end(self._call)


def cut_calls_of(session: object) -> None:
    """Break off every call of *session* that is in flight."""
    _watchdog.cut_session(session)


class _TimedSocket(socket.socket):
    """A socket whose every read and write ends with the call that this thread is in."""

    __slots__ = ()

    def recv_into(self, *args: Any) -> int:
        self._end_with_call()
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        self._end_with_call()
        super().sendall(*args)

    def _end_with_call(self) -> None:
        call = _in_flight.call
        if call is not None:
            self.settimeout(call.remaining_seconds())


class _WatchedConnection(HTTPConnection):
    """A connection that the call using it can be cut at."""

    _is_timed = True
    """Whether its socket is a `_TimedSocket`, which TLS would not use."""
    _wire: _Wire | None = None
    _is_last = False

    @property
    def is_connected(self) -> bool:
        """Whether another request may be sent on it.

        None may after one that said ``Connection: close`` (RFC 9112 section 9.6), which urllib3 sends and forgets: the
        peer ends the connection, whether its answer says so or not, and the next request would run into that end.
        """
        return not self._is_last and super().is_connected

    def _new_conn(self) -> socket.socket:
        call = _in_flight.call
        if call is None:
            return super()._new_conn()
        connected = self._connect_any(call)
        self._release_wire()
        if self._is_timed:
            connected = _TimedSocket(connected.family, connected.type, connected.proto, connected.detach())
        try:
            connected.settimeout(call.remaining_seconds())
            self._wire = _Wire(connected, is_timed=self._is_timed)
        except OSError:  # out of descriptors
            connected.close()
            raise
        _watchdog.attach(call, self._wire)
        return connected

    def _connect_any(self, call: Call) -> socket.socket:
        """Connect to the first address that answers, each with a fair share of the time left.

        urllib3 gives every address the whole timeout, so that a name with two dead ones takes twice the deadline.
        """
        name = self._dns_host
        addresses = self._look_up(name)
        for tries_left in range(len(addresses), 1, -1):
            self._dns_host = addresses[-tries_left]
            self.timeout = call.remaining_seconds() / tries_left
            try:
                return super()._new_conn()
            except urllib3.exceptions.HTTPError:
                continue  # to the next; the last one says what is wrong
            finally:
                self._dns_host = name
        self._dns_host = addresses[-1]
        self.timeout = call.remaining_seconds()
        try:
            return super()._new_conn()
        finally:
            self._dns_host = name

    def _look_up(self, name: str) -> list[str]:
        try:
            found = socket.getaddrinfo(name.strip("[]"), self.port, type=socket.SOCK_STREAM)
        except socket.gaierror as exc:
            raise urllib3.exceptions.NameResolutionError(self.host, self, exc) from exc
        except UnicodeError as exc:
            raise urllib3.exceptions.LocationParseError(name) from exc
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def request(self, *args: Any, **kwargs: Any) -> None:
        call = _in_flight.call
        if call is not None and self._wire is not None and self._wire not in call.wires:
            call.is_reused = True
            _watchdog.attach(call, self._wire)
        super().request(*args, **kwargs)
        self._is_last = (kwargs.get("headers") or {}).get("Connection", "").lower() == "close"

    def close(self) -> None:
        self._is_last = False
        try:
            super().close()
        finally:
            self._release_wire()

    def _release_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            _watchdog.release(wire, _in_flight.call)


class _WatchedTlsConnection(_WatchedConnection, HTTPSConnection):
    """The same under TLS."""

    _is_timed = False

    def connect(self) -> None:
        try:
            super().connect()
        except BaseException as error:
            _close_half_made(error)
            raise


class _WatchedPool(HTTPConnectionPool):
    ConnectionCls = _WatchedConnection


class _WatchedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTlsConnection


POOL_CLASSES = {"http": _WatchedPool, "https": _WatchedTlsPool}


def _close_half_made(error: BaseException) -> None:
    """Close the TLS socket that *error* left behind.

    Python 3.10 and 3.11 give the descriptor to a new socket and raise without closing it when the connection was reset
    or cut before the handshake. That socket is left in the frames of the traceback, in a cycle which only the garbage
    collector takes apart.
    """
    trace = error.__traceback__
    while trace is not None:
        made = trace.tb_frame.f_locals.get("self")
        if isinstance(made, ssl.SSLSocket):
            made.close()
        trace = trace.tb_next
