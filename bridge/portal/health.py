"""Serves ``/healthz``, ``/readyz``, and ``/metrics`` on a separate listener.

These pages need no authentication.

If the portal listens on a loopback address, it rejects requests unless their Host header is localhost or a loopback
address. The agent applies the same rule to its status listener.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from bridge.errors import BridgeError
from bridge.http.failures import are_loopback_hosts
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import CONTENT_TYPE
from bridge.portal.requests import error_answer, json_answer
from bridge.portal.site import Site
from bridge.portal.store.open_events import numbers

logger = logging.getLogger(__name__)

_READ_SECONDS = 0.8  # the default timeout of a probe is one second
_FOREIGN_NAME = "This listener on a loopback address accepts only localhost or a loopback address in the Host header.\n"


class Health:
    """The ASGI application of the operator listener."""

    def __init__(self, site: Site, *, is_local: bool, is_stopping: Callable[[], bool]) -> None:
        self._site = site
        self._is_local = is_local
        self._is_stopping = is_stopping
        self._log = ThrottledLog(logger)
        self._pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics_page}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        page = self._pages.get(scope["path"])
        if self._is_local and not are_loopback_hosts(Request(scope).headers.getlist("host")):
            answer: Response = PlainTextResponse(_FOREIGN_NAME, status_code=421)
        elif page is None:
            answer = error_answer(404, f"Valid paths: {', '.join(self._pages)}.")
        else:
            answer = await page()
        await answer(scope, receive, send)

    async def _healthz(self) -> Response:
        return json_answer({"status": "ok"})

    async def _readyz(self) -> Response:
        if self._is_stopping():
            return json_answer({"status": "stopping"}, status=503)
        why = await self._why_not_read() or self._site.store.store.why_not_written()
        if why is not None:
            return json_answer({"status": "not ready", "why": why}, status=503)
        return json_answer({"status": "ready"})

    async def _metrics_page(self) -> Response:
        await self._why_not_read()
        return Response(self._site.metrics.page(), headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})

    async def _why_not_read(self) -> str | None:
        try:
            reading = self._site.store.read(numbers, now=self._site.now())
            self._site.metrics.show(*await asyncio.wait_for(reading, _READ_SECONDS))
        except (BridgeError, asyncio.TimeoutError) as error:
            why = str(error) or f"The database did not respond within {_READ_SECONDS:g} s."
            self._log.problem("database", logging.ERROR, f"The portal is not ready: {why}")
            return why
        self._log.recovered("database", "The database is available again.")
        return None
