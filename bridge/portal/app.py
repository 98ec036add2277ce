"""Builds the ASGI application that `bridge.portal.serve` runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from bridge.approval.signing import DecisionSigner
from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal import api, decisions_api, pages
from bridge.portal.agent_exchange import AgentExchange
from bridge.portal.agents import AgentRoutes
from bridge.portal.authentication import Authenticator
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.ingest import Ingest
from bridge.portal.login import LoginPages
from bridge.portal.maintenance import Maintenance
from bridge.portal.metrics import PortalMetrics
from bridge.portal.notifying import NotificationSender
from bridge.portal.pending_decisions import PendingDecisions
from bridge.portal.poll import PREFIX, LongPoll
from bridge.portal.requests import RETRY_AFTER_SECONDS, RequestRefused, error_answer, json_answer
from bridge.portal.server_sent_events import LiveUpdates
from bridge.portal.settings import PortalSettings
from bridge.portal.site import Site
from bridge.portal.store.database import StoreThreads, StoreUnavailable
from bridge.portal.store.event_details import approvers_here
from bridge.portal.store.verdicts import VerdictRefused
from bridge.portal.users import Users
from bridge.portal.verdicts import too_few

logger = logging.getLogger(__name__)

_ROOT = "/api/v1"
_NOTHING_HERE = "This address does not exist."
#: The portal might not have read the bodies of the requests that it refuses with one of these statuses.
_CLOSING = frozenset({401, 403, 413, 429})


class Application:
    """The ASGI application of the public listener. Call `load` first."""

    def __init__(
        self, settings: PortalSettings, *, threads: StoreThreads, metrics: PortalMetrics, clock: Clock
    ) -> None:
        self._settings = settings
        self._threads = threads
        self._metrics = metrics
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)
        attested = settings.agents.attested
        self._agents: AgentRoutes | None = None
        if attested is not None:
            self._agents = AgentRoutes(attested, documents=metrics.documents, clock=clock, store=threads.store)
        self._connected_agents = ConnectedAgents(clock)
        self._users = Users(settings.people, store=threads, clock=clock)
        self.pending_decisions = PendingDecisions(threads, clock=clock)
        self._live = LiveUpdates(store=threads, users=self._users, connected_agents=self._connected_agents, clock=clock)
        self._senders = [
            NotificationSender(
                each,
                origin=settings.people.origin or "",
                store=threads.store,
                connected_agents=self._connected_agents,
                sent=metrics.notifications,
                clock=clock,
            )
            for each in settings.notify
        ]
        self._agent_exchange = AgentExchange(threads, self._connected_agents, notify=self._live.check_now, clock=clock)
        self.tasks: list[Callable[[], Coroutine[Any, Any, None]]] = [each.follow for each in self._senders]
        self.tasks += [self.pending_decisions.follow, self._live.follow, self._agent_exchange.follow]
        """The functions that run until the portal cancels them."""
        authenticator = Authenticator(
            attested=None if self._agents is None else self._agents.tokens,
            agent_token=settings.agents.token(),
            webhook_secret=settings.agents.webhook_secret(),
            reader_token=settings.readers.token(),
            metrics=metrics,
            clock=clock,
        )
        self._poll = LongPoll(
            pending_decisions=self.pending_decisions,
            authenticator=authenticator,
            connected_agents=self._connected_agents,
            metrics=metrics,
            clock=clock,
        )
        handlers: dict[Any, Any] = {
            404: self._not_found,
            405: _not_allowed,
            RequestRefused: self._refused,
            StoreUnavailable: self._unavailable,
            Exception: _failed,
        }
        self._site = self._new_site()
        routes = [*self._machine_routes(authenticator), *pages.routes(self._site)]
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        with_clients: Any = ProxyHeadersMiddleware
        self._starlette: ASGIApp = with_clients(starlette, list(settings.people.proxy_addresses))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Count each response by route and status.

        The portal responds with 404 to any path that contains an encoded slash, because a proxy might decode the slash
        and check the permissions for a different path.
        """
        if scope["path"].startswith(PREFIX):
            await self._poll(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._metrics.answered(route.name if isinstance(route, Route) else "none", message["status"])
            await send(message)

        is_plain = b"%2f" not in scope["raw_path"].lower()
        await (self._starlette if is_plain else error_answer(404, _NOTHING_HERE))(scope, receive, counted)

    async def load(self) -> None:
        """Read the pending decisions, agents, and users from the database."""
        await self.pending_decisions.load()
        await self._agent_exchange.exchange()
        await self._users.load()
        approvers = await self._threads.read(approvers_here)
        why_not = too_few(self._settings.people.required_approvals, approvers)
        if approvers and why_not and not self._users.others_may_approve:
            logger.error("No event can be approved: %s", why_not)

    def stop(self) -> None:
        """Answer every open poll, and end every stream."""
        self.pending_decisions.stop()
        self._live.stop()

    def close(self) -> None:
        """Stop the notification senders, the OpenID Connect threads, and document verification."""
        for sender in self._senders:
            sender.close()
        self._users.close()
        if self._agents is not None:
            self._agents.close()

    def _machine_routes(self, authenticator: Authenticator) -> list[Route]:
        ingest = Ingest(
            store=self._threads,
            authenticator=authenticator,
            metrics=self._metrics,
            limits=self._settings.limits,
            clock=self._clock,
        )
        maintenance = Maintenance(self._settings, store=self._threads, vm_limits=ingest.vm_limits, clock=self._clock)
        self.tasks.append(maintenance.follow)
        keys = [key.trusted() for key in self._settings.keys]
        post_decisions = partial(decisions_api.post, self._site, keys, self._log)
        return [
            Route(f"{_ROOT}/decisions", post_decisions, methods=["POST"], name="bring"),
            Route(f"{_ROOT}/records", ingest.post, methods=["POST"], name="records"),
            *api.routes(self._site, authenticator, _ROOT),
            *([] if self._agents is None else self._agents.routes(_ROOT)),
        ]

    def _new_site(self) -> Site:
        key, signing = None, self._settings.signing
        if signing is not None:
            key = DecisionSigner(signing.private_key_file, kid=signing.kid, approver=signing.approver)
        return Site(
            users=self._users,
            store=self._threads,
            pending_decisions=self.pending_decisions,
            connected_agents=self._connected_agents,
            live=self._live,
            login=LoginPages(users=self._users, live=self._live, clock=self._clock),
            metrics=self._metrics,
            clock=self._clock,
            key=key,
            required=self._settings.people.required_approvals,
        )

    async def _not_found(self, request: Request, _error: Exception) -> Response:
        is_page = "text/html" in request.headers.get("accept", "") and _is_page(request)
        return await self._site.login.not_found(request) if is_page else error_answer(404, _NOTHING_HERE)

    async def _refused(self, request: Request, error: Any) -> Response:
        if _is_page(request):
            return self._site.login.refused(request, error)
        if isinstance(error, VerdictRefused):
            return json_answer({"error": str(error), "event": error.event}, status=error.status)
        return error_answer(error.status, str(error), ends=error.status in _CLOSING)

    async def _unavailable(self, request: Request, error: Exception) -> Response:
        self._log.problem("store", logging.ERROR, f"A request failed, because the database is not available: {error}")
        if not _is_page(request):
            return error_answer(503, "The database is not available.")
        answer = self._site.login.problem(request, 503, "The database is not available. Try again in a moment.")
        answer.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return answer


def _is_page(request: Request) -> bool:
    return not request.url.path.startswith((_ROOT, "/live", "/static"))


async def _not_allowed(_request: Request, error: Any) -> Response:
    answer = error_answer(405, "This address does not support the method.")
    answer.headers.update(error.headers or {})
    return answer


async def _failed(_request: Request, _error: Exception) -> Response:
    return error_answer(500, "The request failed. See the portal's log.")  # uvicorn logs the error
