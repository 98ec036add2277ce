"""``POST /api/v1/records``: accepts records from agents as CloudEvents 1.0.

A 204 response means that all records have been stored. If a record arrives more than once, only one copy is kept.
Records are stored unchanged, because a newer agent might send fields that this version does not know.

The agent parks the records after a 400 or 413 response, and sends them again after a 401, 403, 429, or 503 response.
The portal therefore responds with 400 only to malformed records, and with 429 to a VM that sends too many records.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from http import HTTPStatus
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from bridge.clock import Clock, format_time
from bridge.events.event import VmIdentity
from bridge.events.record import Approval, Impact, TransitionRecord
from bridge.logs import ThrottledLog
from bridge.portal.authentication import Authenticator
from bridge.portal.requests import RequestRefused, body_of, size_of
from bridge.portal.settings import LimitSettings
from bridge.portal.site import Site
from bridge.portal.store.database import StoreUnavailable
from bridge.portal.store.ingest import ReceivedRecord, add_records
from bridge.portal.vm_state import PlainEvent, PlainRecord, vm_key
from bridge.text import EXCERPT_CHARACTERS, one_line

logger = logging.getLogger(__name__)

#: The portal can store this number of records within the ten seconds that a sink waits for a response.
_MOST_WAITING_RECORDS = 5_000
#: A transaction contains at most this number of records of one VM. Otherwise, one VM could delay all others.
_MOST_AT_ONCE = 200
#: A record counts once more for each part of this size, because a large record delays the records of other VMs.
_LARGE_BYTES = 16 * 1024
#: A record also counts once more for each part of this number of changed events. A new label changes all open events.
_MANY_EVENTS = 10

_Waiting: TypeAlias = tuple[list[ReceivedRecord], "asyncio.Future[None]"]


class Ingest:
    """Accepts records over HTTP, and stores the records of all waiting requests together.

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
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        received = await self._received(request)
        began = time.perf_counter()
        for start in range(0, len(received), _MOST_AT_ONCE):
            await self._write(received[start : start + _MOST_AT_ONCE])
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
            if own_vm is not None:  # before the portal reads the body, because it costs memory and time
                self._take({own_vm: 1 + size_of(request) // _LARGE_BYTES})
            body = await body_of(request)
        received = self._parsed(headers, body, own_vm)
        counts = Counter[str]()
        for each in received:
            self._authenticator.check_vm(own_vm, vm_key(each.record))
            counts[vm_key(each.record)] += 1 + each.size // _LARGE_BYTES
        if own_vm is None:
            self._take(counts)
        else:
            self.vm_limits.count({own_vm: len(received) - 1})
        return received

    def _take(self, counts: Mapping[str, int]) -> None:
        """Count the records of each VM. Raise RequestRefused if a VM has sent too many."""
        wait_seconds = self.vm_limits.seconds_to_wait(counts)
        if wait_seconds:
            self._metrics.records_refused.labels("rate").inc()
            raise RequestRefused(429, "This VM sends too many records.", retry_after_seconds=wait_seconds)
        self.vm_limits.count(counts)

    def _parsed(self, headers: Mapping[str, str], body: bytes, own_vm: str | None) -> list[ReceivedRecord]:
        try:
            return received_records(headers, body, most_bytes=self._limits.record_bytes)
        except RequestRefused as refused:
            reason = "malformed" if refused.status == HTTPStatus.BAD_REQUEST else "too_large"
            self._log.problem(reason, logging.WARNING, f"Records were refused: {refused}", kind=reason)
            self.vm_limits.note_refusal(own_vm or "", reason)
            self._metrics.records_refused.labels(reason).inc()
            raise

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
                batch = self._next_batch()
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

    def _next_batch(self) -> list[_Waiting]:
        """Remove the waiting requests and return them, but only one of each VM."""
        batch: list[_Waiting] = []
        later: list[_Waiting] = []
        seen = set[str]()
        for each in self._waiting:
            vm_keys = {vm_key(received.record) for received in each[0]}
            (batch if seen.isdisjoint(vm_keys) else later).append(each)
            seen |= vm_keys
        self._waiting = later
        return batch

    async def _store_records(self, records: list[ReceivedRecord]) -> Exception | None:
        try:
            changed = await self._store.write(add_records, records, format_time(self._clock.now()), self._limits)
            self.vm_limits.count({key: number // _MANY_EVENTS for key, number in changed.items()})
        except Exception as error:  # noqa: BLE001  # the waiting request raises it
            return error
        return None


_MINUTE_SECONDS = 60.0
_MOST_VMS = 50_000


class VmLimits:
    """The recent records of each VM at this process."""

    def __init__(self, records_per_minute: int, *, clock: Clock) -> None:
        self._each_seconds = _MINUTE_SECONDS / records_per_minute
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()
        self._refused: Counter[tuple[str, str]] = Counter()

    def seconds_to_wait(self, vm_keys: Iterable[str]) -> float:
        """Return the seconds until all of *vm_keys* can send again, or 0."""
        now = self._clock.monotonic()
        waits = {key: self._free_at.get(key, 0.0) - now - _MINUTE_SECONDS + self._each_seconds for key in vm_keys}
        for key, wait in waits.items():
            if wait > 0:
                self.note_refusal(key, "rate")
        return max([0.0, *waits.values()])

    def count(self, counts: Mapping[str, int]) -> None:
        """Count the records in *counts* by VM."""
        now = self._clock.monotonic()
        for key, number in counts.items():
            self._free_at[key] = max(now, self._free_at.get(key, now)) + number * self._each_seconds
            self._free_at.move_to_end(key)
        while len(self._free_at) > _MOST_VMS:
            self._free_at.popitem(last=False)

    def note_refusal(self, vm_key: str, reason: str) -> None:
        """Count a refused request of *vm_key*, for the audit."""
        if (vm_key, reason) in self._refused or len(self._refused) < _MOST_VMS:
            self._refused[vm_key, reason] += 1

    def take_refusals(self) -> dict[tuple[str, str], int]:
        """Return and reset the number of refused requests by VM and reason."""
        found, self._refused = dict(self._refused), Counter()
        return found


_STRUCTURED, _BATCH, _JSON = "application/cloudevents+json", "application/cloudevents-batch+json", "application/json"
_DEEPEST = 64
_STRINGS = re.compile(rb'"[^"]*"')
_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
#: The size of all IDs, names, and other short values of an event and its VM. In records of Azure, it is about 1 KB.
_LONGEST_IDENTITY = 4_096
#: Ten years. Every real event is far shorter.
_LONGEST_SECONDS = 10 * 366 * 86_400
#: The timeline cannot show a time near the limits of the calendar.
_YEARS = range(2000, 2200)

_Id = Annotated[str, Meta(pattern=r"^[ -~]{1,64}\Z")]
_Name = Annotated[str, Meta(pattern=r"^[ -~]{1,256}\Z")]
_Time = Annotated[datetime, Meta(tz=True)]
#: 300 years. The clock of a VM can be wrong by decades.
_Seconds = Annotated[float, Meta(ge=-1e10, le=1e10)]


class _Envelope(msgspec.Struct, frozen=True):
    specversion: Annotated[str, Meta(pattern=r"^1\.0\Z")]
    id: str
    source: str
    type: Annotated[str, Meta(pattern=r"^io\.scheduled-events-bridge\.transition\.")]
    data: msgspec.Raw


class _Event(PlainEvent, frozen=True, kw_only=True, dict=True):
    not_before: _Time | None = None
    duration_seconds: Annotated[int, Meta(ge=-1, le=_LONGEST_SECONDS)] | None = None


class _Vm(VmIdentity, frozen=True, kw_only=True):
    vm_id: _Name | None = None


class _Approval(Approval, frozen=True, kw_only=True):
    jws_sha256: Annotated[tuple[_Name, ...], Meta(max_length=1_000)] = ()
    http_status: Annotated[int, Meta(ge=0, le=999)] | None = None


class _Impact(Impact, frozen=True, kw_only=True):
    longest_seconds: _Seconds | None = None
    resolution_seconds: _Seconds | None = None
    downtime_seconds: _Seconds | None = None
    downtime_uncertainty_seconds: _Seconds | None = None


class _Record(PlainRecord, frozen=True, kw_only=True):
    """A record whose values fit into the database."""

    id: _Id
    stream_id: _Name
    sequence: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    event: _Event | None
    vm: _Vm
    approval: _Approval | None = None
    impact: _Impact | None = None


_one = msgspec.json.Decoder(_Envelope).decode
_several = msgspec.json.Decoder(list[_Envelope]).decode
_record = msgspec.json.Decoder(_Record).decode


def received_records(headers: Mapping[str, str], body: bytes, *, most_bytes: int) -> list[ReceivedRecord]:
    """Return the records of a request. *headers* have lowercase names.

    Raise RequestRefused with status 413 if a record has more than *most_bytes*, or 400 if the request is invalid.
    """
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if content_type == _STRUCTURED:
            envelopes = [_one(body)]
        elif content_type == _BATCH:
            envelopes = _several(body)
        elif content_type == _JSON and "ce-specversion" in headers:
            attributes = {name[3:]: value for name, value in headers.items() if name.startswith("ce-")}
            envelopes = [msgspec.convert({**attributes, "data": msgspec.Raw(body)}, _Envelope)]
        else:
            types = f"{_STRUCTURED}, {_BATCH}, or {_JSON} with the headers of a CloudEvent"
            raise RequestRefused(400, f"The Content-Type must be {types}.")
        if any(len(memoryview(envelope.data)) > most_bytes for envelope in envelopes):
            raise RequestRefused(413, f"A record has more than {most_bytes} bytes.")
        received = [_record_of(envelope) for envelope in envelopes]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        shape = f" ({one_line(str(error), EXCERPT_CHARACTERS)})" if isinstance(error, msgspec.ValidationError) else ""
        raise RequestRefused(400, f"The body is not a CloudEvent with a transition record{shape}.") from error
    if not received:
        raise RequestRefused(400, "The batch is empty.")
    return received


def _record_of(envelope: _Envelope) -> ReceivedRecord:
    body = bytes(envelope.data)
    record = _record(body)
    if record.id != envelope.id:
        raise RequestRefused(400, "The id of the CloudEvent differs from the id of the record.")
    _check_depth(body)
    for raw, kinds in ((record.previous, b"{n"), (b"{" if record.event is None else record.event.extra, b"{")):
        if bytes(raw)[:1] not in kinds:
            raise RequestRefused(400, "previous and extra must be objects.")
    _check_identity(record)
    observed_at, event = format_time(msgspec.convert(record.observed_at, _Time)), record.event
    if event is not None:
        not_before = None if event.not_before is None else event.not_before.astimezone(timezone.utc)
        if not_before is not None and not_before.year not in _YEARS:
            raise RequestRefused(400, "The not_before of an event must be from 2000 to 2199.")
        event = msgspec.structs.replace(event, not_before=not_before, extra={})
    known = msgspec.structs.replace(record, observed_at=observed_at, event=event, previous=None)
    return ReceivedRecord(known, body.decode())


def _check_depth(body: bytes) -> None:
    """Raise RequestRefused if the valid JSON *body* is nested too deeply for a reader."""
    if body.count(b"[") + body.count(b"{") <= _DEEPEST:
        return
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = _STRINGS.sub(b"", without_escapes).translate(_AS_LISTS, _NO_BRACKETS)
    for _ in range(_DEEPEST):
        brackets = brackets.replace(b"[]", b"")  # removes the innermost level
    if brackets:
        raise RequestRefused(400, f"A record is nested more than {_DEEPEST} levels deep.")


def _check_identity(record: TransitionRecord) -> None:
    """Raise RequestRefused if the values with several copies in the database are long."""
    event = record.event and msgspec.structs.replace(record.event, resources=(), description=None, extra={})
    vm = msgspec.structs.replace(record.vm, tags={})
    if len(msgspec.json.encode((event, vm))) > _LONGEST_IDENTITY:
        raise RequestRefused(400, f"The names and IDs of a record have more than {_LONGEST_IDENTITY} bytes.")
