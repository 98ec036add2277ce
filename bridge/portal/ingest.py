"""``POST /api/v1/records``: records in, as CloudEvents, from the sinks of the agents.

204 says that every record is stored, for good; the same records again change nothing. What a sink makes of the other
answers is in docs/reference/sinks.md: 400 and 413 park a record, 401, 403 and 503 keep it until somebody or time mends.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.requests import Request
from starlette.responses import Response

from bridge.clock import Clock, format_time
from bridge.logs import ThrottledLog
from bridge.portal.authentication import AuthenticationFailure, Authenticator
from bridge.portal.cloudevents import RequestMalformed, received_records
from bridge.portal.fleet import vm_key
from bridge.portal.metrics import PortalMetrics
from bridge.portal.requests import body_of, error_answer, headers_of
from bridge.portal.store.database import StoreThreads, StoreUnavailable
from bridge.portal.store.ingest import ReceivedRecord, add_records

logger = logging.getLogger(__name__)

#: Some seconds' work: a sink waits ten for an answer.
_MOST_WAITING_RECORDS = 5_000


class RecordWriter:
    """Writes what has gathered in one transaction: while one is committed, the next ones wait and become one.

    A fleet that starts over tells of its events within seconds, and each commit waits for the disk.
    """

    def __init__(self, store: StoreThreads, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._waiting: list[tuple[list[ReceivedRecord], asyncio.Future[None]]] = []
        self._waiting_records = 0
        self._writing: asyncio.Task[None] | None = None

    async def write(self, received: list[ReceivedRecord]) -> None:
        """Return when *received* is stored for good; raise StoreUnavailable when it is not, or too much waits."""
        if self._waiting_records > _MOST_WAITING_RECORDS:
            raise StoreUnavailable(f"More than {_MOST_WAITING_RECORDS} records wait to be stored.")
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((received, stored))
        self._waiting_records += len(received)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await asyncio.shield(stored)  # a client that goes away takes nothing back

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                gathered, self._waiting, self._waiting_records = self._waiting, [], 0
                if not await self._are_stored(gathered) and len(gathered) > 1:
                    for each in gathered:  # so that what cannot be stored keeps out nothing else
                        await self._are_stored([each], is_last_try=True)
        finally:
            self._writing = None

    async def _are_stored(
        self, gathered: list[tuple[list[ReceivedRecord], asyncio.Future[None]]], *, is_last_try: bool = False
    ) -> bool:
        records = [record for received, _ in gathered for record in received]
        failed: Exception | None = None
        try:
            await self._store.write(add_records, records, format_time(self._clock.now()))
        except Exception as error:  # noqa: BLE001  # the waiting requests raise it
            failed = error
        for _, stored in gathered:
            if failed is None and not stored.done():
                stored.set_result(None)
            elif failed is not None and (is_last_try or len(gathered) == 1) and not stored.done():
                stored.set_exception(failed)
        return failed is None


class Ingest:
    """Takes records in."""

    def __init__(
        self,
        *,
        store: StoreThreads,
        authenticator: Authenticator,
        metrics: PortalMetrics,
        clock: Clock,
    ) -> None:
        self._writer = RecordWriter(store, clock=clock)
        self._authenticator = authenticator
        self._metrics = metrics
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        try:
            received = await self._received(request)
            began = time.perf_counter()
            await self._writer.write(received)
        except RequestMalformed as error:
            self._log.problem("malformed", logging.WARNING, f"Records were refused: {error}")
            return error_answer(400, str(error))
        self._metrics.received(len(received))
        self._metrics.ingest_seconds.observe(time.perf_counter() - began)
        return Response(status_code=204)

    async def _received(self, request: Request) -> list[ReceivedRecord]:
        headers = headers_of(request)
        is_signed = "webhook-signature" in headers and "authorization" not in headers
        agent = None if is_signed else self._authenticator.agent(headers)
        body = await body_of(request)
        agent = agent or self._authenticator.agent(headers, body)
        received = received_records(headers, body)
        for each in received:
            if not agent.may_speak_for(vm_key(each.record)):
                raise self._authenticator.refused(
                    AuthenticationFailure.NOT_YOURS, "A record is another VM's than the one that asks.", status=403
                )
        return received
