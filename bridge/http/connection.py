"""Provides DeadlineConnection, an HTTP client for one server, with a deadline per request.

The IMDS poll and the built-in sinks use this client instead of the `requests` library, because it needs half the CPU
time and saves 3 MB of memory. For the same reason, it does not read headers with the email parser of `http.client`. The
client keeps one connection open. It does not follow redirects, retry requests, or read environment variables.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
from collections.abc import Callable, Mapping
from email.message import Message
from typing import Any, NamedTuple

from bridge.http.watchdog import Call, Watched, connected_socket, watchdog

_CLOSE_SECONDS = 0.2
_MAX_LINE_BYTES, _MAX_HEADERS = 65_536, 100  # the limits of http.client


class HttpResponse(NamedTuple):
    """A response with any status. The names match those of `requests.Response`."""

    status_code: int
    reason: str
    headers: Message
    content: bytes
    """The body. It is empty if *unread* is set."""
    unread: str | None = None
    """The reason why the body was not read. The body is too large or unexpectedly compressed."""


class DeadlineConnection:
    """A connection to *host*. Threads can share it, and it handles one request at a time.

    *tls* is called for each new connection and returns the TLS context, so that renewed certificates take effect. If
    *tls* is None, the connection is not encrypted. *proxy* is the host and port of an HTTP proxy. *proxy_headers* are
    sent only to this proxy. TLS connections use a tunnel through the proxy. Without TLS, the caller must pass a
    complete URL to `request` if there is a proxy.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        proxy: tuple[str, int] | None = None,
        proxy_headers: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = _Connection(*(proxy or (host, port)))
        self._connection.tls, self._connection.tls_host = tls, host
        if tls is not None:
            self._connection.default_port = http.client.HTTPS_PORT
            if proxy is not None:
                self._connection.set_tunnel(host, port, dict(proxy_headers or {}))
        self._proxy_headers = {} if tls is not None else dict(proxy_headers or {})
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
    ) -> HttpResponse:
        """Return the response. Raises DeadlineExceeded, OSError, and http.client.HTTPException."""
        with self._is_free:
            call = Call(self, deadline_seconds)
            try:
                with call:
                    self._connection.begin(call)
                    self._connection.request(method, path, body, {**self._proxy_headers, **headers})
                    response = self._connection.read_response(max_body_bytes)
            except (OSError, http.client.HTTPException) as exc:
                self._connection.close()
                call.raise_if_cut(exc, is_timeout=isinstance(exc, TimeoutError))
                raise
            # If the watchdog shuts down the socket, a body without a length looks complete.
            call.raise_if_cut()
            return response

    def close(self) -> None:
        """Cancel the request of another thread and close the connection."""
        watchdog.cut_session(self)
        if self._is_free.acquire(timeout=_CLOSE_SECONDS):
            self._connection.close()
            self._is_free.release()


class _Response(http.client.HTTPResponse):
    def begin(self) -> None:
        self.status = http.client.CONTINUE
        while self.status == http.client.CONTINUE:
            version, self.status, self.reason = self._read_status()  # type: ignore[attr-defined]  # typeshed lacks it
            self.headers = self.msg = self._read_headers()
        self.version = 10 if version in {"HTTP/1.0", "HTTP/0.9"} else 11
        self.reason, self.code = self.reason.strip(), self.status
        self.chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        self.chunk_left = None
        length = self.headers.get("Content-Length", "")
        self.length = int(length) if length.isdecimal() and not self.chunked else None
        if self.status in {http.client.NO_CONTENT, http.client.NOT_MODIFIED}:
            self.length = 0
        is_kept = self.version == 11 and "close" not in self.headers.get("Connection", "").lower()  # noqa: PLR2004
        self.will_close = not is_kept or (self.length is None and not self.chunked)

    def _read_headers(self) -> http.client.HTTPMessage:
        headers = http.client.HTTPMessage()
        for _ in range(_MAX_HEADERS):
            line = self.fp.readline(_MAX_LINE_BYTES + 1)
            if len(line) > _MAX_LINE_BYTES:
                raise http.client.LineTooLong("header line")
            if line in {b"\r\n", b"\n", b""}:
                return headers
            name, _, value = line.decode("iso-8859-1").partition(":")
            headers.set_raw(name, value.strip())  # in Python 3.14, setting an item rejects invalid names
        raise http.client.HTTPException(f"got more than {_MAX_HEADERS} headers")


class _Connection(Watched):
    response_class = _Response
    _call: Call
    tls: Callable[[], ssl.SSLContext] | None
    tls_host: str
    _unsent: list[bytes] | None = None

    def begin(self, call: Call) -> None:
        self._call, self._unsent = call, None
        if self.sock is not None and self.is_readable():
            self.close()
        if self.sock is None:
            self.connect()
        else:
            self.sock.settimeout(call.remaining_seconds())
            self.watch(call)
        self._unsent = []

    def connect(self) -> None:
        context = None if self.tls is None else self.tls()  # call first, because it may raise an error
        self.sock = connected_socket(self._call, self.host, self.port)
        self.watch_new(self._call, self.sock)
        if self._tunnel_host is not None:  # type: ignore[attr-defined]  # typeshed lacks both names
            self._tunnel()  # type: ignore[attr-defined]
        if context is not None:
            self.sock = context.wrap_socket(self.sock, server_hostname=self.tls_host)

    def send(self, data: Any) -> None:
        """Buffer the headers and the body, so that the client can send both in one packet."""
        if self._unsent is None:  # the request for a tunnel
            super().send(data)
        else:
            self._unsent.append(data)

    def _send_collected(self) -> None:
        """Send the request.

        If the server has closed the connection, the method ignores the error, so that the client can still read a
        response that the server sent before.
        """
        request, self._unsent = b"".join(self._unsent or ()), None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().send(request)

    def read_response(self, max_body_bytes: int) -> HttpResponse:
        self._send_collected()
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
        return HttpResponse(response.status, response.reason, response.headers, b"" if unread else body, unread)
