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

from bridge.clock import Clock
from bridge.errors import SecretUnavailable
from bridge.logs import ThrottledLog
from bridge.portal import api, pages
from bridge.portal.agents import AgentRoutes
from bridge.portal.authentication import Authenticator
from bridge.portal.connected_agents import AgentExchange
from bridge.portal.ingest import Ingest
from bridge.portal.maintenance import Maintenance
from bridge.portal.notifying import NotificationSender
from bridge.portal.poll import LongPoll
from bridge.portal.requests import RETRY_AFTER_SECONDS, RequestRefused, error_answer, json_answer
from bridge.portal.settings import PortalSettings
from bridge.portal.site import Site
from bridge.portal.store.database import StoreThreads, StoreUnavailable
from bridge.portal.store.event_details import approvers_here
from bridge.portal.store.verdicts import VerdictRefused
from bridge.portal.verdicts import too_few

logger = logging.getLogger(__name__)

_ROOT = "/api/v1"
_NOTHING_HERE = "This address does not exist."


class Application:
    """The ASGI application of the public listener. Call `load` first."""

    def __init__(self, settings: PortalSettings, *, threads: StoreThreads, clock: Clock) -> None:
        self._settings = settings
        self._log = ThrottledLog(logger, clock=clock)
        self.site = site = Site(settings, store=threads, clock=clock)
        attested = settings.agents.attested
        self._agents: AgentRoutes | None = None
        if attested is not None:
            self._agents = AgentRoutes(attested, documents=site.metrics.documents, clock=clock, store=threads.store)
        tokens = None if self._agents is None else self._agents.tokens
        authenticator = Authenticator(settings, site, attested=tokens)
        self.polls = LongPoll(site, authenticator)
        ingest = Ingest(site, authenticator, settings.limits)
        self._senders = [NotificationSender(each, site) for each in settings.notify]
        self._agent_exchange = AgentExchange(threads, site.connected_agents, notify=site.live.check_now, clock=clock)
        maintenance = Maintenance(settings, store=threads, vm_limits=ingest.vm_limits, clock=clock)
        self.tasks: list[Callable[[], Coroutine[Any, Any, None]]] = [each.follow for each in self._senders]
        """The functions that run until the portal cancels them."""
        self.tasks += [site.pending_decisions.follow, site.live.follow]
        self.tasks += [self._agent_exchange.follow, maintenance.follow]
        keys = [key.trusted() for key in settings.keys]
        post_decisions = partial(api.post_decisions, site, keys, self._log)
        routes = [
            Route(f"{_ROOT}/decisions", post_decisions, methods=["POST"], name="bring"),
            Route(f"{_ROOT}/records", ingest.post, methods=["POST"], name="records"),
            *api.routes(site, authenticator, _ROOT),
            *([] if self._agents is None else self._agents.routes(_ROOT)),
            *pages.routes(site),
        ]
        handlers: dict[Any, Any] = {
            404: self._not_found,
            RequestRefused: self._refused,
            StoreUnavailable: self._unavailable,
            SecretUnavailable: self._without_secret,
        }
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        with_clients: Any = ProxyHeadersMiddleware
        self._starlette: ASGIApp = with_clients(starlette, list(settings.people.proxy_addresses))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Count each response by route and status.

        The portal responds with 404 to any path that contains an encoded slash, because a proxy might decode the slash
        and check the permissions for a different path.
        """

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self.site.metrics.answered(route.name if isinstance(route, Route) else "none", message["status"])
            await send(message)

        is_plain = b"%2f" not in scope["raw_path"].lower()
        await (self._starlette if is_plain else error_answer(404, _NOTHING_HERE))(scope, receive, counted)

    async def load(self) -> None:
        """Read the pending decisions, agents, and users from the database."""
        await self.site.pending_decisions.load()
        await self._agent_exchange.exchange()
        await self.site.users.load()
        approvers = await self.site.store.read(approvers_here)
        why_not = too_few(self._settings.people.required_approvals, approvers)
        if approvers and why_not and not self.site.users.others_may_approve:
            logger.error("No event can be approved: %s", why_not)

    def stop(self) -> None:
        """Answer every open poll, and end every stream."""
        self.site.pending_decisions.stop()
        self.site.live.stop()

    def close(self) -> None:
        """Stop the notification senders, the OpenID Connect threads, and document verification."""
        for sender in self._senders:
            sender.close()
        if self.site.users.oidc is not None:
            self.site.users.oidc.close()
        if self._agents is not None:
            self._agents.close()

    async def _not_found(self, request: Request, _error: Exception) -> Response:
        is_page = "text/html" in request.headers.get("accept", "") and _is_page(request)
        return await self.site.login.not_found(request) if is_page else error_answer(404, _NOTHING_HERE)

    async def _refused(self, request: Request, error: Any) -> Response:
        if _is_page(request):
            return self.site.login.refused(request, error)
        if isinstance(error, VerdictRefused):
            return json_answer({"error": str(error), "event": error.event}, status=error.status)
        return error_answer(error.status, str(error), retry_after_seconds=error.retry_after_seconds)

    async def _without_secret(self, _request: Request, error: Exception) -> Response:
        self._log.problem("secret", logging.ERROR, str(error))
        return error_answer(503, "The portal cannot read its secret.")

    async def _unavailable(self, request: Request, error: Exception) -> Response:
        self._log.problem("store", logging.ERROR, f"A request failed, because the database is not available: {error}")
        why = "The database is not available. Try again in a moment."
        answer = await self._refused(request, RequestRefused(503, why))
        answer.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return answer


def _is_page(request: Request) -> bool:
    return not request.url.path.startswith((_ROOT, "/live", "/static"))
