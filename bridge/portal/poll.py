"""The long poll of PROTOCOL.md, sections 2 to 4: ``GET /api/v1/vms/{vmId}/decisions``, as a raw ASGI application.

Five thousand of them are held at a time, so each is as little as can be: a future and a timer; its connection says when
the client goes. No framework stands between, and the database is never asked. A held poll is answered when something
comes for its VM, at a random time between 0.8 and 1.0 of what it may wait (or all agents of a fleet that restarted
together would come back together for ever), when its client goes, and when the portal stops.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal.authentication import AuthenticationFailure, Authenticator
from bridge.portal.connected_agents import HEADER, ConnectedAgents
from bridge.portal.http_limits import CONNECTION, LimitedHttp
from bridge.portal.metrics import PortalMetrics
from bridge.portal.pending_decisions import PendingDecisions
from bridge.portal.requests import RequestRefused, whole_number
from bridge.portal.store.database import StoreUnavailable

logger = logging.getLogger(__name__)

PREFIX = "/api/v1/vms/"
_PATH = re.compile(rb"/api/v1/vms/([A-Za-z0-9._:-]{1,128})/decisions")
_LARGEST_INDEX = 2**53 - 1
_LONGEST_WAIT_SECONDS = 600
_LEAST_OF_WAIT = 0.8
_RETRY_AFTER_SECONDS = 5
_OK, _BAD, _FORBIDDEN, _NOT_FOUND, _NOT_ALLOWED, _UNAVAILABLE = 200, 400, 403, 404, 405, 503
_ROUTE = "decisions"
#: What an agent writes.
_USUAL_QUERY = re.compile(rb"index=([0-9]{1,15})&wait=([0-9]{1,15})")
_BODY = ("content-length", "transfer-encoding")
_READ = frozenset({b"authorization", HEADER.encode(), *(name.encode() for name in _BODY)})


class Poll(msgspec.Struct, frozen=True):
    """What an agent asks."""

    vm_key: str
    index: int
    wait_seconds: float


class LongPoll:
    """Answers agents."""

    def __init__(
        self,
        *,
        pending_decisions: PendingDecisions,
        authenticator: Authenticator,
        connected_agents: ConnectedAgents,
        metrics: PortalMetrics,
        clock: Clock,
    ) -> None:
        self._pending_decisions = pending_decisions
        self._authenticator = authenticator
        self._connected_agents = connected_agents
        self._metrics = metrics
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer one request."""
        poll = None
        try:
            headers = _headers(scope)
            asked = self._asked(scope, headers)
            received_index = asked.index if asked.index <= self._pending_decisions.index else 0  # of another history
            self._connected_agents.begins(asked.vm_key, headers.get(HEADER, ""), index=received_index)
            poll = asked
            if poll.index > self._pending_decisions.index:
                await self._pending_decisions.catch_up()  # the agent may have polled at another process
            if not self._is_due(poll) and not await self._held(poll, scope[CONNECTION]):
                return
        except RequestRefused as error:
            await self._send(scope[CONNECTION], send, error.status, {"error": str(error)})
        except StoreUnavailable as error:
            self._log.problem("store", logging.ERROR, f"A poll cannot be answered: {error}")
            await self._send(scope[CONNECTION], send, _UNAVAILABLE, {"error": "The database cannot be read now."})
        else:
            after = 0 if poll.index > self._pending_decisions.index else poll.index
            await self._send(scope[CONNECTION], send, _OK, self._pending_decisions.answer(poll.vm_key, after))
        finally:
            if poll is not None:
                self._connected_agents.ends(poll.vm_key)

    def _asked(self, scope: Scope, headers: Mapping[str, str]) -> Poll:
        if scope["method"] != "GET":
            raise RequestRefused(_NOT_ALLOWED, "Ask with GET.")
        path = _PATH.fullmatch(scope["raw_path"])
        if path is None:
            raise RequestRefused(_NOT_FOUND, "There is nothing here.")
        vm_key = path[1].decode().lower()
        if not self._authenticator.agent(headers).may_speak_for(vm_key):
            raise self._authenticator.refused(
                AuthenticationFailure.NOT_YOURS, "Decisions of another VM than the one that asks.", status=_FORBIDDEN
            )
        if any(headers.get(name, "0") != "0" for name in _BODY):
            raise RequestRefused(_BAD, "A poll has no body.")
        index, wait_seconds = _numbers(scope["query_string"])
        return Poll(vm_key, index, min(wait_seconds, _LONGEST_WAIT_SECONDS))

    def _is_due(self, poll: Poll) -> bool:
        """Return whether there is an answer at once."""
        is_first_or_lost = poll.index == 0 or poll.index > self._pending_decisions.index
        return (
            is_first_or_lost
            or self._pending_decisions.is_stopping
            or self._pending_decisions.has_new(poll.vm_key, poll.index)
        )

    async def _held(self, poll: Poll, connection: LimitedHttp) -> bool:
        """Wait until there is an answer for *poll*; return False when its client has gone."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake(*_: object) -> None:
            if not woken.done():
                woken.set_result(None)

        connection.call_when_gone(wake)
        share = _LEAST_OF_WAIT + (1.0 - _LEAST_OF_WAIT) * self._clock.random()
        timer = loop.call_later(poll.wait_seconds * share, wake)
        self._pending_decisions.wait(poll.vm_key, woken)
        self._metrics.held_polls.inc()
        try:
            await woken
        finally:
            self._metrics.held_polls.dec()
            self._pending_decisions.stop_waiting(poll.vm_key, woken)
            timer.cancel()
            connection.call_when_gone(None)
        return not connection.is_gone

    async def _send(self, connection: LimitedHttp, send: Send, status: int, value: object) -> None:
        body = msgspec.json.encode(value)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        if status == 401:  # noqa: PLR2004  # RFC 9110, section 15.5.2
            headers.append((b"www-authenticate", b"Bearer"))
        if status == _UNAVAILABLE:
            headers.append((b"retry-after", str(_RETRY_AFTER_SECONDS).encode()))
        if self._pending_decisions.is_stopping:
            headers.append((b"connection", b"close"))
        self._metrics.answered(_ROUTE, status)
        if not connection.answer_at_once(status, headers, body):
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope) -> Mapping[str, str]:
    """Return the headers that the portal reads, of several of one name the last. Thousands are read in a second."""
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _READ}


def _numbers(query: bytes) -> tuple[int, int]:
    """Return the index and the wait that *query* asks for; raise RequestRefused."""
    usual = _USUAL_QUERY.fullmatch(query)
    if usual is not None and usual[2].strip(b"0"):
        return int(usual[1]), int(usual[2])
    found = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    wait_seconds = whole_number(found, "wait", lowest=1, highest=_LARGEST_INDEX)
    return whole_number(found, "index", lowest=0, highest=_LARGEST_INDEX), wait_seconds
