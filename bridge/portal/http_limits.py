"""Limits the header size and the receive time of HTTP/1.1 requests.

uvicorn does not limit the size of request headers or the time that a client takes to send a request. Endless headers
could use all memory, and a client that sends one byte at a time could keep its connection open forever.

For limits on bodies, see `bridge.portal.requests`. Configure all other limits in the proxy (deploy/portal/nginx.conf).

A connection passes the polls of agents to the long poll without ASGI. All other requests pass through ASGI, and their
scope contains the connection under the key CONNECTION.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from bridge.logs import ThrottledLog
from bridge.portal.metrics import PortalMetrics

CONNECTION = "bridge.connection"
#: The longest time from the start of a connection or a request to the last byte of the request.
REQUEST_SECONDS = 20.0
_MOST_HEAD_BYTES = 32 * 1024
_POLLS = b"/api/v1/vms/"
_CLOSE = (b"connection", b"close")


class LimitedHttp(HttpToolsProtocol):
    """An HTTP/1.1 connection with these limits."""

    # Slots save 2 KB, because CPython adds a dictionary to an object with 30 or more attributes.
    __slots__ = (
        *("_awaits_response", "_has_new_poll", "_head_bytes", "_is_in_head", "_is_poll", "_is_receiving"),
        *("_keeps_alive", "_log", "_metrics", "_polls", "_request_seconds", "_timer", "call_when_gone"),
    )

    def __init__(
        self, *, request_seconds: float, metrics: PortalMetrics, log: ThrottledLog, polls: Any = None, **uvicorns: Any
    ) -> None:
        super().__init__(**uvicorns)
        self._request_seconds = request_seconds
        self._metrics = metrics
        self._log = log
        self._polls = polls
        self._head_bytes = 0
        self._is_in_head = self._is_receiving = self._is_poll = self._has_new_poll = self._awaits_response = False
        self._keeps_alive = True
        self._timer: asyncio.TimerHandle | None = None
        self.call_when_gone: Callable[[], object] | None = None

    def connection_made(self, transport: Any) -> None:
        """Start a timer that closes the connection if the client does not send a request.

        Browsers often open connections that they do not use.
        """
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._request_seconds, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the application, and remove the reference cycles of this object."""
        super().connection_lost(exc)
        self._stop_timer()
        if self.call_when_gone is not None:
            self.call_when_gone()
        uvicorns: Any = self
        uvicorns.scope = uvicorns.cycle = None

    def data_received(self, data: bytes) -> None:
        """Parse *data*. Limit the size of the headers, and the time of a request."""
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self._abort("The headers of a request are too large.")
        if self._has_new_poll:
            self._start_poll()
        if self._timer is None and self._is_receiving:
            reason = "A request did not arrive in time."
            self._timer = self.loop.call_later(self._request_seconds, self._abort, reason)
        elif self._timer is None and self.timeout_keep_alive_task is None and not self._is_busy():
            self._timer = self.loop.call_later(self._request_seconds, self.transport.close)

    def on_message_begin(self) -> None:
        """Start a request. If the client pipelines requests, abort the connection."""
        if self._is_busy() or self.flow.write_paused:
            self._abort("The client sent a request before it read the response to the previous request.")
        super().on_message_begin()
        self._head_bytes, self._is_in_head, self._is_receiving = 0, True, True
        self._stop_timer()

    def on_headers_complete(self) -> None:
        """Start the application, unless the request is a poll."""
        self._is_in_head = False
        if self.transport.is_closing():
            return
        self._is_poll = self._polls is not None and self.url.startswith(_POLLS) and self.parser.get_method() == b"GET"
        if self._is_poll:
            self._keeps_alive = self.parser.get_http_version() == "1.1" and self.parser.should_keep_alive()
        else:
            scope: Any = self.scope
            scope[CONNECTION] = self
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Ignore the body of a poll."""
        if not self._is_poll:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer."""
        self._is_receiving = False
        self._stop_timer()
        if self._is_poll:
            self._has_new_poll = self._awaits_response = not self.transport.is_closing()
        else:
            super().on_message_complete()

    def _start_poll(self) -> None:
        """Start a poll. The parser has returned, so it has found any pipelined request."""
        self._has_new_poll = False
        if self.transport.is_closing():
            return
        try:
            self._polls(self)
        except Exception:
            self.logger.exception("A poll failed.")
            self.transport.abort()
        uvicorns: Any = self
        uvicorns.headers = uvicorns.scope = None  # saves 2 KB for each open poll, mostly the token

    def _is_busy(self) -> bool:
        """Return whether the response to the last request is incomplete."""
        cycle: Any = self.cycle
        return self._awaits_response or (cycle is not None and not cycle.response_complete)

    def respond(self, response: Response) -> None:
        """Send the response to a poll."""
        self._awaits_response = False
        if self.transport.is_closing():
            return
        headers = [*self.server_state.default_headers, *response.raw_headers]
        if not self._keeps_alive and _CLOSE not in headers:
            headers.append(_CLOSE)
        lines = b"".join([b"%b: %b\r\n" % each for each in headers])
        self.transport.write(b"".join([STATUS_LINE[response.status_code], lines, b"\r\n", response.body]))
        if _CLOSE in headers:
            self.transport.close()
        else:
            self.on_response_complete()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abort(self, reason: str) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self._metrics.connections_cut.inc()
            self._log.problem(reason, logging.WARNING, f"A connection was aborted: {reason}")
        self.transport.abort()
