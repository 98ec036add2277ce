"""Serves the agents' long poll for decisions (PROTOCOL.md, sections 2 to 4).

The path is ``GET /api/v1/vms/{vmId}/decisions``.

A portal process serves thousands of open polls, so each poll must be cheap. An open poll needs only a timer, and reads
decisions from memory. For the same reason, a connection passes its polls to this module without ASGI, a web framework,
or a task, which would double the memory and the CPU time.

A poll ends when a decision for its VM arrives, when the client disconnects, or when the portal stops. Otherwise, the
poll ends after a random 80% to 100% of the requested wait, so that agents that started together do not keep polling at
the same time. All polls of the same tenth of a second end together, because a busy CPU needs a third less time for each
poll than a CPU that wakes for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable
from functools import lru_cache, partial
from urllib.parse import parse_qsl

import msgspec
from starlette.responses import Response

from bridge.logs import ThrottledLog
from bridge.portal.authentication import Authenticator
from bridge.portal.connected_agents import HEADER
from bridge.portal.http_limits import LimitedHttp
from bridge.portal.pending_decisions import Answer
from bridge.portal.requests import RequestRefused, error_answer, json_answer, whole_number
from bridge.portal.site import Site
from bridge.portal.store.database import StoreUnavailable

logger = logging.getLogger(__name__)

_URL = re.compile(rb"/api/v1/vms/([A-Za-z0-9._:-]{1,128})/decisions(?:\?(.*))?")
_LARGEST_INDEX = 2**53 - 1
_LONGEST_WAIT_SECONDS = 600
_LEAST_OF_WAIT = 0.8
_ENDS_PER_SECOND = 10
_ROUTE = "decisions"


class Poll(msgspec.Struct):
    """An open poll of an agent."""

    connection: LimitedHttp
    vm_key: str
    after: int
    """The agent has received every decision up to this number."""
    answer: Callable[[], None] | None = None
    timer: asyncio.TimerHandle | None = None


class LongPoll:
    """Answers the polls of agents."""

    def __init__(self, site: Site, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._pending_decisions = site.pending_decisions
        self._connected_agents = site.connected_agents
        self._metrics = site.metrics
        self._clock = site.clock
        self._log = ThrottledLog(logger, clock=site.clock)
        site.metrics.open_polls.set_function(site.pending_decisions.open_polls)

    def __call__(self, connection: LimitedHttp) -> None:
        """Answer the poll that *connection* has received, now or later."""
        try:
            self._begin(connection)
        except RequestRefused as error:
            self._respond(connection, error_answer(error.status, str(error)))

    def _begin(self, connection: LimitedHttp) -> None:
        """Begin a poll. Raise RequestRefused if the request is invalid."""
        url = _URL.fullmatch(connection.url)
        if url is None:
            raise RequestRefused(404, "This address does not exist.")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in connection.headers}
        vm_key = url[1].decode().lower()
        own_vm = self._authenticator.own_vm(headers)
        self._authenticator.check_vm(own_vm, vm_key)
        if any(headers.get(name, "0") != "0" for name in ("content-length", "transfer-encoding")):
            raise RequestRefused(400, "A poll has no body.")
        after, seconds = _index_and_wait(url[2] or b"")
        report, poll = headers.get(HEADER, ""), Poll(connection, vm_key, after)
        hold = partial(self._hold, poll, seconds, report, is_attested=own_vm is not None)
        if after <= self._pending_decisions.index:
            hold()
        else:  # the agent might have polled another process earlier
            task = connection.loop.create_task(self._catch_up(poll, hold))
            connection.tasks.add(task)
            task.add_done_callback(connection.tasks.discard)

    async def _catch_up(self, poll: Poll, hold: Callable[[], None]) -> None:
        try:
            await self._pending_decisions.catch_up()
        except StoreUnavailable as error:
            self._log.problem("store", logging.ERROR, f"A poll cannot be answered: {error}")
            self._respond(poll.connection, error_answer(503, "The database is not available."))
            return
        if poll.after > self._pending_decisions.index:
            poll.after = 0  # the database was restored, so send all decisions
        hold()

    def _hold(self, poll: Poll, seconds: float, report: str, *, is_attested: bool) -> None:
        """Record the agent as connected, and answer the poll now or later."""
        connection, pending, vm_key, after = poll.connection, self._pending_decisions, poll.vm_key, poll.after
        if connection.transport.is_closing():
            return
        self._connected_agents.begins(vm_key, report, index=after, is_attested=is_attested)
        if after == 0 or pending.has_new(vm_key, after) or pending.is_stopping:
            self._answer(poll)
            return
        seconds *= _LEAST_OF_WAIT + (1.0 - _LEAST_OF_WAIT) * self._clock.random()
        end = math.ceil((connection.loop.time() + seconds) * _ENDS_PER_SECOND) / _ENDS_PER_SECOND
        poll.answer = partial(self._answer, poll)
        poll.timer = connection.loop.call_at(end, poll.answer)
        pending.wait(vm_key, poll.answer)
        connection.call_when_gone = partial(self._end, poll)

    def _answer(self, poll: Poll) -> None:
        self._end(poll)
        answer = self._pending_decisions.answer(poll.vm_key, poll.after)
        self._respond(poll.connection, _response(answer, is_last=self._pending_decisions.is_stopping))

    def _end(self, poll: Poll) -> None:
        poll.connection.call_when_gone = None
        self._connected_agents.ends(poll.vm_key)
        if poll.timer is not None and poll.answer is not None:
            poll.timer.cancel()
            self._pending_decisions.stop_waiting(poll.vm_key, poll.answer)
            poll.answer = None  # removes the reference cycle

    def _respond(self, connection: LimitedHttp, response: Response) -> None:
        self._metrics.answered(_ROUTE, response.status_code)
        connection.respond(response)


@lru_cache(maxsize=64)  # most agents of a fleet send the same query
def _index_and_wait(query: bytes) -> tuple[int, float]:
    parameters = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    wait_seconds = whole_number(parameters, "wait", lowest=1, highest=_LARGEST_INDEX)
    return whole_number(parameters, "index", lowest=0, highest=_LARGEST_INDEX), min(wait_seconds, _LONGEST_WAIT_SECONDS)


@lru_cache(maxsize=8)  # most answers are the same, without a decision
def _response(answer: Answer, *, is_last: bool) -> Response:
    return json_answer(answer, headers={"Connection": "close"} if is_last else {})
