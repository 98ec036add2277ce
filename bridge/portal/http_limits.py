"""Limits the header size and the receive time of HTTP/1.1 requests.

uvicorn does not limit the size of request headers or the time that a client takes to send a request. Endless headers
could use all memory, and a client that sends one byte at a time could keep its connection open forever.

For limits on bodies, see `bridge.portal.requests`. Configure all other limits in the proxy (deploy/portal/nginx.conf).

The ASGI scope contains the connection under the key CONNECTION. With this connection, the long poll registers a
callback that runs when the client disconnects. A callback needs less memory than a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bridge.logs import ThrottledLog
from bridge.portal.metrics import PortalMetrics

CONNECTION = "bridge.connection"
#: The longest time from the start of a connection or a request to the last byte of the request.
REQUEST_SECONDS = 20.0
_MOST_HEAD_BYTES = 32 * 1024


class LimitedHttp(HttpToolsProtocol):
    """An HTTP/1.1 connection with these limits."""

    # Slots save 2 KB, because CPython adds a dictionary to an object with 30 or more attributes.
    __slots__ = ("_call_at_end", "_head_bytes", "_is_in_head", "_log", "_metrics", "_request_seconds", "_timer")

    def __init__(self, *, request_seconds: float, metrics: PortalMetrics, log: ThrottledLog, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._request_seconds = request_seconds
        self._metrics = metrics
        self._log = log
        self._head_bytes = 0
        self._is_in_head = False
        self._timer: asyncio.TimerHandle | None = None
        self._call_at_end: Callable[[], object] | None = None

    def call_when_gone(self, call: Callable[[], object] | None) -> None:
        """Run *call* when the connection ends. None removes the callback."""
        self._call_at_end = call
        if self.transport.is_closing() and call is not None:
            call()

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
        if self._call_at_end is not None:
            self._call_at_end()
        uvicorns: Any = self
        self._call_at_end = uvicorns.scope = uvicorns.cycle = None

    def data_received(self, data: bytes) -> None:
        """Parse *data*. Abort the connection if the headers are too large."""
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self._abort("The headers of a request are too large.")

    def on_message_begin(self) -> None:
        """Start the timer of a request."""
        super().on_message_begin()
        self._head_bytes, self._is_in_head = 0, True
        self._stop_timer()
        reason = "A request did not arrive in time."
        self._timer = self.loop.call_later(self._request_seconds, self._abort, reason)

    def on_headers_complete(self) -> None:
        """Start the application. If the client pipelines requests, abort the connection."""
        self._is_in_head = False
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._abort("The client sent a request before the response to the previous request.")
            return
        scope: Any = self.scope
        scope[CONNECTION] = self
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().on_message_complete()

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
