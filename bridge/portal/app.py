"""The portal's application: all that agents, people and programs reach, made of the settings; `serve` listens."""

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
from bridge.portal import pages
from bridge.portal.agents import AgentRoutes
from bridge.portal.api import Api
from bridge.portal.book import DecisionBook
from bridge.portal.callers import Callers
from bridge.portal.connections import Connections
from bridge.portal.decisions import Carrier
from bridge.portal.desk import Desk
from bridge.portal.ingest import Ingest
from bridge.portal.live import Live
from bridge.portal.metrics import PortalMetrics
from bridge.portal.neighbours import Neighbours
from bridge.portal.people import People, Role
from bridge.portal.poll import PREFIX, LongPoll
from bridge.portal.requests import BodyRoom, error_answer
from bridge.portal.settings import PortalSettings
from bridge.portal.signing import PortalKey
from bridge.portal.store.database import Store, StoreThreads
from bridge.portal.store.stories import approvers_here
from bridge.portal.verdict_api import VerdictRoutes
from bridge.portal.words import too_few

logger = logging.getLogger(__name__)

_ROOT = "/api/v1"


def agent_routes(
    settings: PortalSettings, *, store: Store, metrics: PortalMetrics, clock: Clock, body_seconds: float
) -> AgentRoutes | None:
    """Return what gives tokens for attested documents; None: no such document counts here."""
    attested = settings.agents.attested
    if attested is None:
        return None
    shared = store if store.kind.is_shared else None
    return AgentRoutes(attested, count=metrics.attested, clock=clock, store=shared, body_seconds=body_seconds)


class Application:
    """What answers on the public listener; call `load` before it does, and have the `followers` follow meanwhile."""

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
        self._connections = Connections(clock)
        self._people = self._new_people()
        self.book = DecisionBook(threads, clock=clock)
        self.neighbours = Neighbours(threads, self._connections, clock=clock)
        self.live = Live(store=threads, people=self._people, connections=self._connections, clock=clock)
        self._callers = self._new_callers()
        self._divided = _Divided(
            LongPoll(
                book=self.book, callers=self._callers, connections=self._connections, metrics=metrics, clock=clock
            ),
            self._counted(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._divided(scope, receive, send)

    async def load(self) -> None:
        """Read what it must know before it answers."""
        await self.book.load()
        await self._people.load()
        approvers = await self._threads.read(approvers_here)
        why_not = too_few(self._settings.people.required_approvals, approvers)
        if approvers and why_not and not self._people.others_may_approve:
            logger.error("No event can be approved: %s", why_not)

    @property
    def followers(self) -> tuple[DecisionBook, Live, Neighbours]:
        """Return what follows the database."""
        return self.book, self.live, self.neighbours

    def tidy(self) -> None:
        """Keep what is not needed now in little room; called now and then."""
        self._connections.tidy()

    def stop(self) -> None:
        """Answer every poll that is held, and end every stream."""
        self.book.stop()
        self.live.stop()

    def _counted(self) -> ASGIApp:
        routes = [
            *self._machine_routes(),
            *self._person_routes(),
            *([] if self._agents is None else self._agents.routes(_ROOT)),
        ]
        handlers: dict[Any, Any] = {404: _not_found, 405: _not_allowed, Exception: _failed}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.state.bodies = BodyRoom()
        return _Counted(app, self._metrics)

    def _machine_routes(self) -> list[Route]:
        """Return what agents that send records, and programs, reach."""
        ingest = Ingest(
            store=self._threads,
            callers=self._callers,
            metrics=self._metrics,
            clock=self._clock,
            body_seconds=self._body_seconds,
        )
        api = Api(store=self._threads, callers=self._callers, connections=self._connections)
        carrier = Carrier(
            store=self._threads,
            book=self.book,
            keys=[key.trusted() for key in self._settings.keys],
            metrics=self._metrics,
            clock=self._clock,
            body_seconds=self._body_seconds,
        )
        return [
            Route(f"{_ROOT}/decisions", carrier.post, methods=["POST"], name="bring"),
            Route(f"{_ROOT}/records", ingest.post, methods=["POST"], name="records"),
            Route(f"{_ROOT}/events", api.events, name="events"),
            Route(f"{_ROOT}/events/{{key}}", api.event, name="event"),
            Route(f"{_ROOT}/events/{{key}}/records", api.records, name="records_of_event"),
            Route(f"{_ROOT}/agents", api.agents, name="agents"),
            Route(f"{_ROOT}/audit", api.audit, name="audit"),
            Route(f"{_ROOT}/export.jsonl", api.export, name="export"),
        ]

    def _person_routes(self) -> list[Route]:
        """Return what people reach: their verdicts as JSON, and the pages."""
        signing, desk = self._settings.signing, self._new_desk()
        verdicts = VerdictRoutes(people=self._people, desk=desk, clock=self._clock, body_seconds=self._body_seconds)
        return [
            *verdicts.routes(_ROOT),
            *pages.routes(
                people=self._people,
                desk=desk,
                store=self._threads,
                connections=self._connections,
                live=self.live,
                clock=self._clock,
                kid=None if signing is None else signing.kid,
                session_hours=self._settings.people.session_hours,
                body_seconds=self._body_seconds,
            ),
        ]

    def _new_callers(self) -> Callers:
        return Callers(
            attested=None if self._agents is None else self._agents.tokens,
            agent_token=self._settings.agents.token(),
            webhook_secret=self._settings.agents.webhook_secret(),
            reader_token=self._settings.readers.token(),
            metrics=self._metrics,
            clock=self._clock,
        )

    def _new_people(self) -> People:
        people = self._settings.people
        return People(
            store=self._threads,
            clock=self._clock,
            session_hours=people.session_hours,
            origin=people.origin,
            proxy_header=people.proxy_header,
            proxy_addresses=people.proxy_addresses,
            proxy_role=Role(people.proxy_role),
        )

    def _new_desk(self) -> Desk:
        signing = self._settings.signing
        key = None
        if signing is not None:
            key = PortalKey(DecisionSigner(signing.private_key_file, kid=signing.kid, approver=signing.approver))
        return Desk(
            store=self._threads,
            book=self.book,
            connections=self._connections,
            key=key,
            required=self._settings.people.required_approvals,
            clock=self._clock,
        )


class _Divided:
    """Gives long polls to *poll*, and everything else to *rest*."""

    def __init__(self, poll: ASGIApp, rest: ASGIApp) -> None:
        self._poll = poll
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_poll = scope["type"] == "http" and scope["path"].startswith(PREFIX)
        await (self._poll if is_poll else self._rest)(scope, receive, send)


class _Counted:
    """Counts the answers of *app* by route and status; a path that is no route counts as `none`.

    A slash that was encoded leads nowhere: what stands before the portal may have taken it for no slash, and let it by.
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


async def _not_found(_request: Request, _error: Exception) -> Response:
    return error_answer(404, "There is nothing here.")


async def _not_allowed(_request: Request, error: Any) -> Response:
    answer = error_answer(405, "This method is not for this address.")
    answer.headers.update(error.headers or {})
    return answer


async def _failed(_request: Request, _error: Exception) -> Response:
    # The error goes on to uvicorn, which logs it.
    return error_answer(500, "It failed; see the portal's log.")
