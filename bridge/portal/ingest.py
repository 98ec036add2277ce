"""``POST /api/v1/records``: accepts records from agents as CloudEvents.

A 204 response means that all records have been stored. A record that arrives more than once is stored only once.

The agent parks the records after a 400 or 413 response, and sends them again after a 401, 403, 429, or 503 response.
The portal therefore responds with 400 only to malformed records, and with 429 to a VM that sends too many records.
"""

from __future__ import annotations

import asyncio
import logging
import time
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from bridge.clock import format_time
from bridge.logs import ThrottledLog
from bridge.portal.authentication import Authenticator
from bridge.portal.cloudevents import received_records
from bridge.portal.requests import RequestRefused, body_of, error_answer
from bridge.portal.settings import LimitSettings
from bridge.portal.site import Site
from bridge.portal.store.database import StoreUnavailable
from bridge.portal.store.ingest import ReceivedRecord, add_records
from bridge.portal.vm_limits import VmLimits
from bridge.portal.vm_state import vm_key

logger = logging.getLogger(__name__)

#: The portal can store this number of records within the ten seconds that a sink waits for a response.
_MOST_WAITING_RECORDS = 5_000


class Ingest:
    """Accepts records over HTTP. Stores the records of all waiting requests together.

    All agents in a fleet might send records at about the same time, and each commit must wait for the disk. To keep up,
    the portal batches all records that arrive during a commit into the next commit.
    """

    def __init__(self, site: Site, authenticator: Authenticator, limits: LimitSettings) -> None:
        self._store = site.store
        self._authenticator = authenticator
        self._metrics = site.metrics
        self._limits = limits
        self._clock = site.clock
        self.vm_limits = VmLimits(limits.records_per_minute, clock=site.clock)
        self._log = ThrottledLog(logger, clock=site.clock)
        self._waiting: list[tuple[list[ReceivedRecord], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        received = await self._received(request)
        wait_seconds = self.vm_limits.take([vm_key(each.record) for each in received])
        if wait_seconds:
            self._metrics.records_refused.labels("rate").inc(len(received))
            return error_answer(429, "This VM sends too many records.", retry_after_seconds=wait_seconds)
        began = time.perf_counter()
        await self._write(received)
        self._metrics.records.inc(len(received))
        self._metrics.ingest_seconds.observe(time.perf_counter() - began)
        return Response(status_code=204)

    async def _received(self, request: Request) -> list[ReceivedRecord]:
        headers, own_vm = request.headers, None
        if self._authenticator.accepts_signature(headers):
            body = await body_of(request)
            self._authenticator.check_signature(headers, body)
        else:
            own_vm = self._authenticator.own_vm(headers)
            body = await body_of(request)
        try:
            received = received_records(headers, body, most_bytes=self._limits.record_bytes)
        except RequestRefused as refused:
            reason = "malformed" if refused.status == HTTPStatus.BAD_REQUEST else "too_large"
            self._log.problem(reason, logging.WARNING, f"Records were refused: {refused}")
            self.vm_limits.note_refusal(own_vm or "", reason)
            self._metrics.records_refused.labels(reason).inc()
            raise
        for each in received:
            self._authenticator.check_vm(own_vm, vm_key(each.record))
        return received

    async def _write(self, received: list[ReceivedRecord]) -> None:
        """Store *received*, or raise StoreUnavailable."""
        if sum(len(records) for records, _ in self._waiting) > _MOST_WAITING_RECORDS:
            raise StoreUnavailable(f"More than {_MOST_WAITING_RECORDS} records are waiting to be stored.")
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((received, stored))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await asyncio.shield(stored)  # the records are stored even if the client disconnects

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                error = await self._store_records([record for records, _ in batch for record in records])
                for records, stored in batch:
                    # After a failure, store each request alone, because one request must not block the others.
                    own = error if error is None or len(batch) == 1 else await self._store_records(records)
                    if own is None:
                        stored.set_result(None)
                    else:
                        stored.set_exception(own)
        finally:
            self._writing = None

    async def _store_records(self, records: list[ReceivedRecord]) -> Exception | None:
        try:
            await self._store.write(add_records, records, format_time(self._clock.now()), self._limits)
        except Exception as error:  # noqa: BLE001  # the waiting request raises it
            return error
        return None
