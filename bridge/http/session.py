"""requests, with a wall-clock deadline on every call.

requests' own timeout is per read: a peer that drips a byte now and then never ends it. So the connections made here
note their socket, and one watchdog thread for the whole process shuts down the sockets of a call that is overdue;
whatever that call was blocked in (a send, a TLS handshake, a header, a body) returns at once. What is noted is a
duplicate of the descriptor, because wrapping in TLS puts another object in the socket's place, and because a response
with ``Connection: close`` outlives its connection.

Arming is cheap: the watchdog is woken only for a call that ends before everything it waits for already, so a poll
once a second with a deadline of five wakes it about every fifth time.

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
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import requests
import requests.adapters
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from bridge.errors import DeadlineExceeded
from bridge.http.failures import causes

#: What a call may answer with unless it says otherwise.
MAX_BODY_BYTES = 1024 * 1024

_CHUNK_BYTES = 64 * 1024

#: Sent again after a keep-alive connection turns out to be closed: RFC 9110 section 9.2.2, without those that write.
_RESENT_METHODS = frozenset({"GET", "HEAD"})

_DISCONNECTS = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


class ResponseTooLarge(requests.RequestException):
    """The body is larger than the caller allows; the connection was closed without reading the rest."""


class DeadlineSession(requests.Session):
    """A session whose every call ends by its deadline, with a body that is read whole and bounded.

    It differs from `requests.Session` on purpose: *deadline_seconds* is required, redirects are never followed,
    nothing is tried twice (but see `send`), the environment is not read (``trust_env`` is False; set it to have
    proxies from the environment), cookies are not kept and response hooks are not run. ``proxies``, ``verify``,
    ``cert`` and ``headers`` are set as ever. Threads may share it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False
        adapter = _DeadlineAdapter()
        self.mount("https://", adapter)
        self.mount("http://", adapter)

    def request(  # type: ignore[override] # a call without a deadline shall not pass
        self,
        method: str,
        url: str,
        *,
        deadline_seconds: float,
        max_body_bytes: int = MAX_BODY_BYTES,
        params: Mapping[str, str] | None = None,
        data: bytes | str | Mapping[str, str] | None = None,
        json: Any = None,
        headers: Mapping[str, str | bytes] | None = None,
        auth: Any = None,
        proxies: Mapping[str, str] | None = None,
        verify: bool | str | None = None,
        cert: str | tuple[str, str] | None = None,
    ) -> requests.Response:
        """Build a request and `send` it; raises what `send` raises."""
        request = requests.Request(method.upper(), url, params=params, data=data, json=json, headers=headers, auth=auth)
        return self.send(
            self.prepare_request(request),
            deadline_seconds=deadline_seconds,
            max_body_bytes=max_body_bytes,
            proxies=proxies,
            verify=verify,
            cert=cert,
        )

    def send(  # type: ignore[override] # likewise
        self,
        request: requests.PreparedRequest,
        *,
        deadline_seconds: float,
        max_body_bytes: int = MAX_BODY_BYTES,
        proxies: Mapping[str, str] | None = None,
        verify: bool | str | None = None,
        cert: str | tuple[str, str] | None = None,
    ) -> requests.Response:
        """Return the answer to *request*, whatever its status, with the body in ``content``.

        A request prepared once may be sent again and again: a third of the cost of a call is preparing it. A GET or
        HEAD that finds its kept-alive connection closed by the peer, before any answer, is sent once more on a new
        connection within the same deadline; anything else that failed is the caller's to send again.

        Raises DeadlineExceeded at the deadline (also when a read or connect timed out by itself), ResponseTooLarge,
        and otherwise the requests exception that `requests.Session.send` would.
        """
        if not 0 < deadline_seconds < math.inf:
            raise ValueError(f"deadline_seconds is {deadline_seconds}; a call needs a positive, finite deadline.")
        call = _Call(self, deadline_seconds)
        try:
            _thread.call = call
            _watchdog.arm(call)
            response = self._exchange(request, call, self._settings(request, proxies, verify, cert))
            _read_body(response, max_body_bytes)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as exc:
            _raise_if_cut(call, request, exc)
            if isinstance(exc, urllib3.exceptions.HTTPError):
                raise requests.ConnectionError(exc, request=request) from exc
            raise
        finally:
            _thread.call = None
            _watchdog.disarm(call)
        # A body that ends with its connection looks complete when the socket was shut down under it.
        _raise_if_cut(call, request, None)
        response.elapsed = timedelta(seconds=time.monotonic() - call.started_at)
        return response

    def close(self) -> None:
        """Close the idle connections, and break off every call in flight in another thread."""
        _watchdog.cut_session(self)
        super().close()

    def _settings(
        self,
        request: requests.PreparedRequest,
        proxies: Mapping[str, str] | None,
        verify: bool | str | None,  # noqa: FBT001 - the shape that requests has for it
        cert: str | tuple[str, str] | None,
    ) -> dict[str, Any]:
        if self.trust_env or proxies:
            merged = self.merge_environment_settings(
                str(request.url), dict(proxies or {}), stream=True, verify=verify, cert=cert
            )
            return dict(merged)
        return {
            "stream": True,
            "proxies": self.proxies,
            "verify": self.verify if verify is None else verify,
            "cert": self.cert if cert is None else cert,
        }

    def _exchange(self, request: requests.PreparedRequest, call: _Call, settings: dict[str, Any]) -> requests.Response:
        adapter = self.get_adapter(str(request.url))
        try:
            return adapter.send(request, timeout=call.remaining_seconds(), **settings)
        except requests.ConnectionError as exc:
            is_stale = call.is_reused and call.cut_by is None and _is_disconnect(exc)
            if not is_stale or request.method not in _RESENT_METHODS:
                raise
        return adapter.send(request, timeout=call.remaining_seconds(), **settings)


def retry_after_seconds(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """Return the wish of a Retry-After header in seconds, null when there is none or it cannot be read.

    RFC 9110 section 10.2.3: whole seconds or an HTTP date; a date that has passed is 0.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:18])
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - (now or datetime.now(timezone.utc))).total_seconds())


class _Call:
    """One call in flight: when it ends, the wires it uses, and who cut it."""

    __slots__ = ("cut_by", "deadline_seconds", "expires_at", "is_reused", "session", "started_at", "wires")

    def __init__(self, session: DeadlineSession, deadline_seconds: float) -> None:
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
    """A second descriptor of a connection's socket, good for shutting it down whatever became of the first."""

    __slots__ = ("_socket", "is_orphan")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected.dup()
        self.is_orphan = False

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):  # the peer was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class _Watchdog:
    """The one thread that cuts overdue calls; it starts with the first call and sleeps while there is none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # an RLock: a collected pool closes its connections anywhere
        self._calls: set[_Call] = set()
        self._wakes_at = math.inf
        self._last_expiry = -math.inf
        self._thread: threading.Thread | None = None

    def arm(self, call: _Call) -> None:
        with self._changed:
            self._calls.add(call)
            self._last_expiry = call.expires_at
            if self._thread is None or not self._thread.is_alive():
                self._wakes_at = call.expires_at
                self._thread = threading.Thread(target=self._watch, name="deadline-watchdog", daemon=True)
                self._thread.start()
            elif call.expires_at < self._wakes_at:
                self._wakes_at = call.expires_at
                self._changed.notify()

    def disarm(self, call: _Call) -> None:
        with self._changed:
            self._calls.discard(call)
            for wire in call.wires:
                if wire.is_orphan:
                    wire.close()
            call.wires.clear()

    def attach(self, call: _Call, wire: _Wire) -> None:
        """Let *call* be cut at *wire*; one that was cut already is cut there too."""
        with self._changed:
            call.wires.append(wire)
            if call.cut_by is not None:
                wire.shut_down()

    def release(self, wire: _Wire, call: _Call | None) -> None:
        """Close *wire*, or leave that to the end of *call*, which may still read the body through it."""
        with self._changed:
            if call is not None and wire in call.wires:
                wire.is_orphan = True
            else:
                wire.close()

    def cut_session(self, session: DeadlineSession) -> None:
        with self._changed:
            for call in self._calls:
                if call.session is session:
                    self._cut(call, "close")

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for call in [call for call in self._calls if call.expires_at <= now]:
                    self._calls.discard(call)
                    self._cut(call, "deadline")
                idle_until = self._last_expiry if self._last_expiry > now else math.inf
                self._wakes_at = min((call.expires_at for call in self._calls), default=idle_until)
                is_idle = math.isinf(self._wakes_at)
                self._changed.wait(None if is_idle else min(self._wakes_at - now, threading.TIMEOUT_MAX))

    @staticmethod
    def _cut(call: _Call, cut_by: str) -> None:
        call.cut_by = call.cut_by or cut_by
        for wire in call.wires:
            wire.shut_down()


class _InFlight(threading.local):
    """The call that this thread is in: urllib3 offers no way to hand it down to a connection."""

    call: _Call | None = None


_thread = _InFlight()
_watchdog = _Watchdog()


class _WatchedConnection(HTTPConnection):
    """A connection that the call using it can be cut at."""

    _wire: _Wire | None = None

    def _new_conn(self) -> socket.socket:
        call = _thread.call
        if call is None:
            return super()._new_conn()
        connected = self._connect_any(call)
        self._release_wire()
        try:
            connected.settimeout(call.remaining_seconds())
            self._wire = _Wire(connected)
        except OSError:  # out of descriptors
            connected.close()
            raise
        _watchdog.attach(call, self._wire)
        return connected

    def _connect_any(self, call: _Call) -> socket.socket:
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
        call = _thread.call
        if call is not None and self._wire is not None and self._wire not in call.wires:
            call.is_reused = True
            _watchdog.attach(call, self._wire)
        super().request(*args, **kwargs)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._release_wire()

    def _release_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            _watchdog.release(wire, _thread.call)


class _WatchedTlsConnection(_WatchedConnection, HTTPSConnection):
    """The same under TLS."""

    def connect(self) -> None:
        try:
            super().connect()
        except BaseException as exc:
            _close_half_made(exc)
            raise


class _WatchedPool(HTTPConnectionPool):
    ConnectionCls = _WatchedConnection


class _WatchedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTlsConnection


_POOL_CLASSES = {"http": _WatchedPool, "https": _WatchedTlsPool}


class _DeadlineAdapter(requests.adapters.HTTPAdapter):
    """requests' adapter over watched connections; `send` is left alone, so that ``responses`` can stand in for it."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOL_CLASSES

    def proxy_manager_for(self, proxy: str, **proxy_kwargs: Any) -> Any:
        if proxy.lower().startswith("socks"):
            raise requests.exceptions.InvalidProxyURL(
                f"The proxy {urllib3.util.parse_url(proxy).host!r} is a SOCKS proxy, whose connections cannot be "
                "cut at a deadline; use an http:// or https:// proxy."
            )
        manager = super().proxy_manager_for(proxy, **proxy_kwargs)
        manager.pool_classes_by_scheme = _POOL_CLASSES
        return manager


def _read_body(response: requests.Response, max_body_bytes: int) -> None:
    chunks: list[bytes] = []
    size = 0
    for chunk in response.iter_content(_CHUNK_BYTES):
        size += len(chunk)
        if size > max_body_bytes:
            response.close()
            raise ResponseTooLarge(
                f"The answer of {_without_secrets(response.url)} is larger than {max_body_bytes} bytes.",
                response=response,
            )
        chunks.append(chunk)
    response._content = b"".join(chunks)  # noqa: SLF001 - where `content` looks; requests has no other way in


def _close_half_made(exc: BaseException) -> None:
    """Close the TLS socket that *exc* left behind.

    ssl takes the descriptor over, and then raises without closing it when the connection was reset or cut before the
    handshake; the object is only left in the frames of the traceback.
    """
    trace = exc.__traceback__
    while trace is not None:
        made = trace.tb_frame.f_locals.get("self")
        if isinstance(made, ssl.SSLSocket):
            made.close()
        trace = trace.tb_next


def _is_disconnect(exc: BaseException) -> bool:
    """Return whether the peer hung up: reset, or closed without a byte of answer (RemoteDisconnected is a reset)."""
    return any(isinstance(cause, _DISCONNECTS) for cause in causes(exc))


def _raise_if_cut(call: _Call, request: requests.PreparedRequest, exc: Exception | None) -> None:
    """Raise why *call* was cut, if it was; a read or connect that timed out by itself counts as cut."""
    if call.cut_by == "close":
        where = _without_secrets(request.url)
        raise requests.ConnectionError(f"{request.method} {where}: its session was closed.", request=request) from exc
    is_timeout = isinstance(exc, requests.Timeout) or (exc is not None and time.monotonic() >= call.expires_at)
    if call.cut_by == "deadline" or is_timeout:
        raise DeadlineExceeded(
            f"{request.method} {_without_secrets(request.url)}: no complete answer within "
            f"{call.deadline_seconds:g} s, so the call was cut."
        ) from exc


def _without_secrets(url: str | None) -> str:
    """Return scheme, host and port of *url*: secrets travel in all the rest, the path of a webhook included."""
    parsed = urllib3.util.parse_url(url or "")
    return urllib3.util.Url(scheme=parsed.scheme, host=parsed.host, port=parsed.port).url
