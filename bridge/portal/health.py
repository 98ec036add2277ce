"""Serves ``/healthz``, ``/readyz``, and ``/metrics`` on a separate listener.

These pages need no authentication.

If the portal listens on a loopback address, it rejects requests unless their Host header is localhost or a loopback
address. The agent applies the same rule to its status listener.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from bridge.clock import Clock, format_time
from bridge.errors import BridgeError
from bridge.http.failures import are_loopback_hosts
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import CONTENT_TYPE
from bridge.portal.metrics import PortalMetrics
from bridge.portal.requests import json_answer
from bridge.portal.store.database import StoreThreads
from bridge.portal.store.open_events import numbers

logger = logging.getLogger(__name__)

_READ_SECONDS = 0.8  # the default timeout of a probe is one second
_FOREIGN_NAME = "This listener on a loopback address accepts only localhost or a loopback address in the Host header.\n"


@dataclass(kw_only=True, eq=False)
class Health:
    """The pages for probes and for Prometheus."""

    store: StoreThreads
    metrics: PortalMetrics
    is_local: bool
    is_stopping: Callable[[], bool]
    clock: Clock

    def __post_init__(self) -> None:
        self._log = ThrottledLog(logger)

    def app(self) -> Starlette:
        """Return the application."""
        pages = (("/healthz", self._healthz), ("/readyz", self._readyz), ("/metrics", self._metrics_page))
        return Starlette(routes=[Route(path, self._guarded(page)) for path, page in pages])

    def _guarded(self, page: Callable[[Request], object]) -> Callable[[Request], object]:
        async def answer(request: Request) -> Response:
            if self.is_local and not are_loopback_hosts(request.headers.getlist("host")):
                return PlainTextResponse(_FOREIGN_NAME, status_code=421)
            found: Response = await page(request)  # type: ignore[misc]
            return found

        return answer

    async def _healthz(self, _request: Request) -> Response:
        return json_answer({"status": "ok"})

    async def _readyz(self, _request: Request) -> Response:
        if self.is_stopping():
            return json_answer({"status": "stopping"}, status=503)
        why = await self._why_not_read() or self.store.store.why_not_written()
        if why is not None:
            return json_answer({"status": "not ready", "why": why}, status=503)
        return json_answer({"status": "ready"})

    async def _metrics_page(self, _request: Request) -> Response:
        await self._why_not_read()
        return Response(self.metrics.page(), headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})

    async def _why_not_read(self) -> str | None:
        try:
            now = format_time(self.clock.now())
            self.metrics.show(*await asyncio.wait_for(self.store.read(numbers, now=now), _READ_SECONDS))
        except (BridgeError, asyncio.TimeoutError) as error:
            why = str(error) or f"The database did not respond within {_READ_SECONDS:g} s."
            self._log.problem("database", logging.ERROR, f"The portal is not ready: {why}")
            return why
        self._log.recovered("database", "The database is available again.")
        return None
