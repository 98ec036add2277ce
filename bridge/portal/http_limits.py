"""HTTP on one connection, within bounds: a head's size and time, requests in line, and what a client leaves untaken.

uvicorn parses with httptools and sets none of these: a header without an end would take all memory, a client that sends
a byte now and then would keep its connection for ever, and each request that is none would be a line of the log. Here a
connection that breaks a bound is refused or cut, which is counted, and logged once.

An application finds its connection in the scope, under CONNECTION, and can have itself told when the client goes. A
task that waits for that, for each of five thousand held polls, would take more memory than the polls themselves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal.metrics import PortalMetrics

logger = logging.getLogger(__name__)

CONNECTION = "bridge.connection"
_BAD, _TOO_SLOW, _HEAD_TOO_LARGE = 400, 408, 431
_ROUTE = "none"


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a connection."""

    head_bytes: int = 32 * 1024
    headers: int = 100
    in_line: int = 8
    """Requests that came before the one ahead of them was answered."""
    head_seconds: float = 10.0
    """From its first byte, or from the beginning of the connection, to its end."""
    rest_seconds: float = 5.0
    """For the rest of a body that was answered without it, and for the next request."""
    stalled_seconds: float = 30.0
    """For a client to take what was sent to it, once more waits than the system keeps."""


class Refusals:
    """Counts connections that broke a bound, and logs them once."""

    def __init__(self, metrics: PortalMetrics, *, clock: Clock) -> None:
        self._metrics = metrics
        self._log = ThrottledLog(logger, clock=clock)

    def add(self, status: int, why: str) -> None:
        """Note one that is answered with *status*; *why* is one of a few sentences."""
        self._metrics.answered(_ROUTE, status)
        self._log.problem(why, logging.WARNING, f"A connection was refused: {why}")

    def cut(self, why: str) -> None:
        """Note one that is ended without an answer."""
        self._metrics.cut()
        self._log.problem(why, logging.WARNING, f"A connection was cut: {why}")


class _Broken(Exception):
    """A bound is broken; leads out of the parser."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Due(NamedTuple):
    """When a connection is cut, on the loop's clock, and why."""

    at: float
    why: str


_NEVER = _Due(math.inf, "")


class LimitedHttp(HttpToolsProtocol):
    """One connection."""

    # In its dictionary they would be too many: from 30 on, each connection has one of its own of two kilobytes.
    __slots__ = (
        "_answering",
        "_bounds",
        "_due",
        "_head_bytes",
        "_is_in_head",
        "_is_message_whole",
        "_refusals",
        "_stalled",
        "_when_gone",
        "is_gone",
    )

    def __init__(self, *, limits: HttpLimits, refusals: Refusals, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._refusals = refusals
        self._head_bytes = 0
        self._is_in_head = False
        self._is_message_whole = True
        self._due = _NEVER
        self._stalled = _NEVER
        self._answering: Any = None
        self._when_gone: Callable[[], object] | None = None
        self.is_gone = False
        """Whether the connection has ended."""

    def call_when_gone(self, call: Callable[[], object] | None) -> None:
        """Have *call* called once, when the connection ends, now if it has; None: nothing."""
        self._when_gone = call
        if self.is_gone and call is not None:
            call()

    def answer_at_once(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write the whole answer of the request under way, in one packet, not uvicorn's two; return whether it could.

        It cannot while the client has not yet taken what was written before: then the answer has to wait.
        """
        cycle = self._answering
        if cycle is None or cycle.response_started or self.flow.write_paused:
            return False
        lines = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
            if name == b"connection":
                cycle.keep_alive = False  # we say nothing else there
        lines.append(b"\r\n" if cycle.keep_alive or b"connection" in lines else b"connection: close\r\n\r\n")
        lines.append(body)
        cycle.response_started = cycle.response_complete = True
        self.transport.write(b"".join(lines))
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()
        return True

    def cut_if_due(self, now: float) -> None:
        """End the connection when its time is over; *now* is the loop's."""
        if now < self._due.at and now < self._stalled.at:
            if self.transport.is_closing() and self._stalled is _NEVER:
                self._stalled = _Due(now + self._limits.stalled_seconds, "its client takes nothing.")
            return
        self._refusals.cut(min(self._due, self._stalled).why)
        self.transport.abort()

    # What the loop says of the connection.

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._due = self._after(self._limits.head_seconds, "the head of a request did not come in time.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers a request of it, or will."""
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._answering, *waiting):  # uvicorn tells the newest alone
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        self.is_gone = True
        if self._when_gone is not None:
            self._when_gone()
        self._let_go()

    def _let_go(self) -> None:
        """Drop what leads back here, or thousands of connections stay in memory until the collector comes by."""
        self._answering = self._when_gone = None
        uvicorns: Any = self
        uvicorns.scope = uvicorns.cycle = None

    def pause_writing(self) -> None:
        """Begin to wait for the client to take what was sent."""
        super().pause_writing()
        self._stalled = self._after(self._limits.stalled_seconds, "its client takes nothing.")

    def resume_writing(self) -> None:
        """Wait for the client no more."""
        super().resume_writing()
        self._stalled = _NEVER

    def data_received(self, data: bytes) -> None:
        """Read on; refuse what breaks a bound, or is no HTTP."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
            if self._is_in_head:
                self._head_bytes += len(data)
                self._check_head(self._head_bytes)
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = False  # it is answered as if it had not asked for another protocol
        except _Broken as broken:
            self._refuse(broken)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, _Broken) else _Broken(_BAD, "it is no request of HTTP/1.1."))

    # What the parser says of a request.

    def on_message_begin(self) -> None:
        """Begin to wait for the end of a head."""
        super().on_message_begin()
        self._head_bytes, self._is_in_head, self._is_message_whole = 0, True, False
        self._due = self._after(self._limits.head_seconds, "the head of a request did not come in time.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; raise _Broken for one too many."""
        if len(self.headers) >= self._limits.headers:
            raise _Broken(_HEAD_TOO_LARGE, f"a request has more than {self._limits.headers} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Have the request answered, in its turn."""
        self._check_head(len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
        self._is_in_head, self._due = False, _NEVER
        scope: Any = self.scope
        scope[CONNECTION] = self
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle
        elif len(self.pipeline) > self._limits.in_line:
            raise _Broken(_BAD, "too many requests came before the one ahead of them was answered.")
        else:
            self.flow.resume_reading()  # or nobody would see the client go

    def on_message_complete(self) -> None:
        """Begin to wait for the next request, when this one was answered before its end."""
        super().on_message_complete()
        self._is_message_whole = True
        if self.cycle.response_complete:
            self._rest("the next request did not come in time.")

    def on_response_complete(self) -> None:
        """Begin to wait for the rest of the request that was answered, or for the next."""
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        self._when_gone = None
        super().on_response_complete()
        if self._answering is None and not self._is_in_head:
            self._rest("the rest of a request did not come in time.")

    def _rest(self, why: str) -> None:
        self._due = self._after(self._limits.rest_seconds + 1.0, why)  # uvicorn closes one that only waits, before that

    def _after(self, seconds: float, why: str) -> _Due:
        return _Due(self.loop.time() + seconds, why)

    def _check_head(self, size: int) -> None:
        if size > self._limits.head_bytes:
            raise _Broken(_HEAD_TOO_LARGE, f"the head of a request is larger than {self._limits.head_bytes} bytes.")

    def _refuse(self, broken: _Broken) -> None:
        if self.transport.is_closing():
            return
        cycle = self._answering
        is_of_that = cycle is self.cycle and not self._is_in_head and not self._is_message_whole
        if cycle is not None and not (is_of_that and not cycle.response_started):
            self._refusals.cut(str(broken))  # an answer now would be taken for that of the request before
            self.transport.abort()
            return
        if cycle is not None:  # it is the body of that request
            cycle.disconnected = True
            cycle.message_event.set()
        self._refusals.add(broken.status, str(broken))
        body = msgspec.json.encode({"error": f"The connection is refused: {broken}"})
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[broken.status] + head.encode() + body)
        self.transport.close()
