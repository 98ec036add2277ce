"""The portal's ASGI application, built from the settings. `bridge.portal.serve` listens."""

from __future__ import annotations

import logging
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridge.approval.signing import DecisionSigner
from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal.agents import AgentRoutes
from bridge.portal.api import Api
from bridge.portal.authentication import Authenticator
from bridge.portal.connected_agents import AgentExchange, ConnectedAgents
from bridge.portal.deciding import VerdictService
from bridge.portal.decisions_api import DecisionsApi
from bridge.portal.ingest import Ingest
from bridge.portal.metrics import PortalMetrics
from bridge.portal.pages import Pages
from bridge.portal.pending_decisions import PendingDecisions
from bridge.portal.poll import PREFIX, LongPoll
from bridge.portal.requests import RequestRefused, error_answer
from bridge.portal.sentences import too_few
from bridge.portal.server_sent_events import LiveUpdates
from bridge.portal.settings import PortalSettings
from bridge.portal.signing import PortalKey
from bridge.portal.store.database import Store, StoreThreads, StoreUnavailable
from bridge.portal.store.event_details import approvers_here
from bridge.portal.users import Users
from bridge.portal.verdicts_api import VerdictsApi

logger = logging.getLogger(__name__)

_ROOT = "/api/v1"


def agent_routes(settings: PortalSettings, *, store: Store, metrics: PortalMetrics, clock: Clock) -> AgentRoutes | None:
    """Return the routes for agent tokens; None: attested documents are not configured."""
    attested = settings.agents.attested
    if attested is None:
        return None
    return AgentRoutes(attested, count=metrics.attested, clock=clock, store=store)


class Application:
    """The application of the public listener. Call `load` first, and run the `followers` meanwhile."""

    def __init__(
        self,
        settings: PortalSettings,
        *,
        threads: StoreThreads,
        metrics: PortalMetrics,
        agents: AgentRoutes | None,
        clock: Clock,
        body_seconds: float,
    ) -> None:
        self._settings = settings
        self._threads = threads
        self._metrics = metrics
        self._agents = agents
        self._clock = clock
        self._body_seconds = body_seconds
        self._log = ThrottledLog(logger, clock=clock)
        self._connected_agents = ConnectedAgents(clock)
        self._users = Users(settings.people, store=threads, clock=clock)
        self.pending_decisions = PendingDecisions(threads, clock=clock)
        self.agent_exchange = AgentExchange(threads, self._connected_agents, clock=clock)
        self.live = LiveUpdates(store=threads, users=self._users, connected_agents=self._connected_agents, clock=clock)
        self._authenticator = self._new_authenticator()
        self._dispatcher = _Dispatcher(
            LongPoll(
                pending_decisions=self.pending_decisions,
                authenticator=self._authenticator,
                connected_agents=self._connected_agents,
                metrics=metrics,
                clock=clock,
            ),
            self._counted(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._dispatcher(scope, receive, send)

    async def load(self) -> None:
        """Read the state that requests need."""
        await self.pending_decisions.load()
        await self._users.load()
        approvers = await self._threads.read(approvers_here)
        why_not = too_few(self._settings.people.required_approvals, approvers)
        if approvers and why_not and not self._users.others_may_approve:
            logger.error("No event can be approved: %s", why_not)

    @property
    def followers(self) -> tuple[PendingDecisions, LiveUpdates, AgentExchange]:
        """Return the tasks that follow the database."""
        return self.pending_decisions, self.live, self.agent_exchange

    def stop(self) -> None:
        """Answer every held poll, and end every stream."""
        self.pending_decisions.stop()
        self.live.stop()

    def _counted(self) -> ASGIApp:
        routes = [
            *self._machine_routes(),
            *self._person_routes(),
            *([] if self._agents is None else self._agents.routes(_ROOT)),
        ]
        handlers: dict[Any, Any] = {
            404: _not_found,
            405: _not_allowed,
            RequestRefused: _refused,
            StoreUnavailable: self._unavailable,
            Exception: _failed,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.state.body_seconds = self._body_seconds
        return _Counted(app, self._metrics)

    async def _unavailable(self, _request: Request, error: Exception) -> Response:
        self._log.problem("store", logging.ERROR, f"A request failed, because the database is not available: {error}")
        return error_answer(503, "The database is not available.")

    def _machine_routes(self) -> list[Route]:
        """Return the routes for agents that send records, and for programs."""
        ingest = Ingest(
            store=self._threads,
            authenticator=self._authenticator,
            metrics=self._metrics,
            clock=self._clock,
        )
        api = Api(store=self._threads, authenticator=self._authenticator, connected_agents=self._connected_agents)
        decisions_api = DecisionsApi(
            store=self._threads,
            pending_decisions=self.pending_decisions,
            keys=[key.trusted() for key in self._settings.keys],
            metrics=self._metrics,
            clock=self._clock,
        )
        return [
            Route(f"{_ROOT}/decisions", decisions_api.post, methods=["POST"], name="bring"),
            Route(f"{_ROOT}/records", ingest.post, methods=["POST"], name="records"),
            *api.routes(_ROOT),
        ]

    def _person_routes(self) -> list[Route]:
        """Return the routes for people: verdicts as JSON, and the pages."""
        signing, verdict_service = self._settings.signing, self._new_verdict_service()
        verdicts = VerdictsApi(users=self._users, verdict_service=verdict_service, clock=self._clock)
        pages = Pages(
            users=self._users,
            verdict_service=verdict_service,
            store=self._threads,
            connected_agents=self._connected_agents,
            live=self.live,
            clock=self._clock,
            kid=None if signing is None else signing.kid,
        )
        return [
            *verdicts.routes(_ROOT),
            *pages.routes(),
        ]

    def _new_authenticator(self) -> Authenticator:
        return Authenticator(
            attested=None if self._agents is None else self._agents.tokens,
            agent_token=self._settings.agents.token(),
            webhook_secret=self._settings.agents.webhook_secret(),
            reader_token=self._settings.readers.token(),
            metrics=self._metrics,
            clock=self._clock,
        )

    def _new_verdict_service(self) -> VerdictService:
        signing = self._settings.signing
        key = None
        if signing is not None:
            key = PortalKey(DecisionSigner(signing.private_key_file, kid=signing.kid, approver=signing.approver))
        return VerdictService(
            store=self._threads,
            pending_decisions=self.pending_decisions,
            connected_agents=self._connected_agents,
            key=key,
            required=self._settings.people.required_approvals,
            clock=self._clock,
        )


class _Dispatcher:
    """Sends long polls to *poll* and all other requests to *rest*."""

    def __init__(self, poll: ASGIApp, rest: ASGIApp) -> None:
        self._poll = poll
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_poll = scope["type"] == "http" and scope["path"].startswith(PREFIX)
        await (self._poll if is_poll else self._rest)(scope, receive, send)


class _Counted:
    """Counts the responses of *app* by route and status; a path without a route counts as `none`.

    A path with an encoded slash gets a 404, because a proxy may have checked another path.
    """

    def __init__(self, app: Starlette, metrics: PortalMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._metrics.answered(route.name if isinstance(route, Route) else "none", message["status"])
            await send(message)

        is_plain = b"%2f" not in scope["raw_path"].lower()
        await (self._app if is_plain else error_answer(404, "There is nothing here."))(scope, receive, counted)


async def _refused(_request: Request, error: Any) -> Response:
    return error_answer(error.status, str(error), ends=error.closes_connection)


async def _not_found(_request: Request, _error: Exception) -> Response:
    return error_answer(404, "There is nothing here.")


async def _not_allowed(_request: Request, error: Any) -> Response:
    answer = error_answer(405, "This method is not for this address.")
    answer.headers.update(error.headers or {})
    return answer


async def _failed(_request: Request, _error: Exception) -> Response:
    # The error goes on to uvicorn, which logs it.
    return error_answer(500, "It failed; see the portal's log.")
