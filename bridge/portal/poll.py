"""Serves the agents' long poll for decisions (PROTOCOL.md, sections 2 to 4).

The path is ``GET /api/v1/vms/{vmId}/decisions``.

A portal process serves thousands of open polls, so each poll must be cheap. An open poll needs only a future and a
timer, and reads decisions from memory. For the same reason, this module does not use a web framework.

A poll ends when a decision for its VM arrives, when the client disconnects, or when the portal stops. Otherwise, the
poll ends after a random 80% to 100% of the requested wait, so that agents that started together do not keep polling at
the same time.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from bridge.logs import ThrottledLog
from bridge.portal.authentication import Authenticator
from bridge.portal.connected_agents import HEADER
from bridge.portal.http_limits import CONNECTION, LimitedHttp
from bridge.portal.pending_decisions import wake
from bridge.portal.requests import RequestRefused, error_answer, json_answer, whole_number
from bridge.portal.site import Site
from bridge.portal.store.database import StoreUnavailable

logger = logging.getLogger(__name__)

PREFIX = "/api/v1/vms/"
_PATH = re.compile(rb"/api/v1/vms/([A-Za-z0-9._:-]{1,128})/decisions")
_LARGEST_INDEX = 2**53 - 1
_LONGEST_WAIT_SECONDS = 600
_LEAST_OF_WAIT = 0.8
_ROUTE = "decisions"


class Poll(msgspec.Struct, frozen=True):
    """The request of an agent."""

    vm_key: str
    after: int
    """The agent has received every decision up to this number."""
    wait_seconds: float


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one poll."""
        poll = None
        try:
            poll = await self._begin(scope)
            has_new = poll.after == 0 or self._pending_decisions.has_new(poll.vm_key, poll.after)
            scope["headers"].clear()  # saves 2 KB for each open poll, mostly the token
            is_due = has_new or self._pending_decisions.is_stopping
            if not is_due and not await self._wait_for_decision(poll, scope[CONNECTION]):
                return
        except RequestRefused as error:
            response = error_answer(error.status, str(error))
        except StoreUnavailable as error:
            self._log.problem("store", logging.ERROR, f"A poll cannot be answered: {error}")
            response = error_answer(503, "The database is not available.")
        else:
            headers = {"Connection": "close"} if self._pending_decisions.is_stopping else {}
            response = json_answer(self._pending_decisions.answer(poll.vm_key, poll.after), headers=headers)
        finally:
            if poll is not None:
                self._connected_agents.ends(poll.vm_key)
        self._metrics.answered(_ROUTE, response.status_code)
        await response(scope, receive, send)

    async def _begin(self, scope: Scope) -> Poll:
        """Check the request, and record the agent as connected."""
        # Plain dicts cost half as much as the classes of Starlette, and agents send many polls.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        if scope["method"] != "GET":
            raise RequestRefused(405, "Use GET.")
        path = _PATH.fullmatch(scope["raw_path"])
        if path is None:
            raise RequestRefused(404, "This address does not exist.")
        vm_key = path[1].decode().lower()
        own_vm = self._authenticator.own_vm(headers)
        self._authenticator.check_vm(own_vm, vm_key)
        if any(headers.get(name, "0") != "0" for name in ("content-length", "transfer-encoding")):
            raise RequestRefused(400, "A poll has no body.")
        wait_seconds = whole_number(query, "wait", lowest=1, highest=_LARGEST_INDEX)
        index = whole_number(query, "index", lowest=0, highest=_LARGEST_INDEX)
        if index > self._pending_decisions.index:
            await self._pending_decisions.catch_up()  # the agent might have polled another process earlier
        # If the database was restored, the agent's index can exceed the portal's. Then send all decisions.
        after = index if index <= self._pending_decisions.index else 0
        self._connected_agents.begins(vm_key, headers.get(HEADER, ""), index=after, is_attested=own_vm is not None)
        return Poll(vm_key, after, min(wait_seconds, _LONGEST_WAIT_SECONDS))

    async def _wait_for_decision(self, poll: Poll, connection: LimitedHttp) -> bool:
        """Wait for a decision. Return False if the client has disconnected."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        connection.call_when_gone(partial(wake, woken))
        share = _LEAST_OF_WAIT + (1.0 - _LEAST_OF_WAIT) * self._clock.random()
        timer = loop.call_later(poll.wait_seconds * share, wake, woken)
        self._pending_decisions.wait(poll.vm_key, woken)
        try:
            await woken
        finally:
            self._pending_decisions.stop_waiting(poll.vm_key, woken)
            timer.cancel()
            connection.call_when_gone(None)
        return not connection.transport.is_closing()
