"""The JSON API for events, agents, audit entries, verdicts, and decisions.

Programs read events with a token from `[readers]`. Submitting or withdrawing a verdict requires a session cookie, a
valid ``Origin`` header, and the session's CSRF token in the ``X-CSRF-Token`` header.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.approval.decision_token import Claims, RefusedDecision, verify_for_any_vm
from bridge.config.trusted_keys import TrustedKey
from bridge.logs import ThrottledLog
from bridge.portal import deciding
from bridge.portal.audit_export import FORMATS, streamed
from bridge.portal.authentication import Authenticator
from bridge.portal.connected_agents import AgentSeen, Connection
from bridge.portal.deciding import DEFAULT_VALID_SECONDS
from bridge.portal.fleet import State
from bridge.portal.pending_decisions import MAX_DECISIONS
from bridge.portal.requests import (
    choice_of,
    cursor_of,
    error_answer,
    group_of,
    json_answer,
    json_of,
    key_of,
    whole_number,
)
from bridge.portal.site import Site
from bridge.portal.store.audit import AuditFilter, entries
from bridge.portal.store.decisions import add_decisions
from bridge.portal.store.events import PAGE, EventFilter, event_of, events_of, list_events, newest_record, records_of
from bridge.portal.store.open_events import collapsed, list_lines
from bridge.portal.store.verdicts import UNKNOWN_EVENT, AcceptedVerdict, VerdictRefused
from bridge.portal.store.vms import VmFilter, find_vms, read_vms
from bridge.portal.users import Person
from bridge.portal.verdicts import Choice
from bridge.portal.vm_state import VmState
from bridge.text import without_nul

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_MOST = 500
_LARGEST = 2**53 - 1
_MOST_VMS = 10_000
_OVER = tuple(state for state in State if not state.is_open)
_CSRF_HEADER = "x-csrf-token"
_MOST_VALID_SECONDS = 86_400
_VERIFIED_AT_ONCE = 20


class _Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    verdict: Choice
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    reason: str = ""
    confirm: Annotated[tuple[str, ...], Meta(max_length=10_000)] = ()
    """The unconfirmed names in Resources that the person confirms."""
    valid_seconds: Annotated[float, Meta(gt=0, le=_MOST_VALID_SECONDS)] = DEFAULT_VALID_SECONDS


class _Submitted(msgspec.Struct, frozen=True):
    decisions: Annotated[list[str], Meta(min_length=1, max_length=MAX_DECISIONS)]


def routes(site: Site, authenticator: Authenticator, root: str) -> list[Route]:
    """Return the routes below *root*."""

    def for_readers(answer: Callable[[Site, Request], Awaitable[Response]]) -> Callable[[Request], Any]:
        async def checked(request: Request) -> Response:
            authenticator.check_reader(request.headers)
            return await answer(site, request)

        return checked

    return [
        Route(f"{root}/events", for_readers(_events), name="events"),
        Route(f"{root}/events/{{key}}", for_readers(_event), name="event"),
        Route(f"{root}/events/{{key}}/records", for_readers(_records), name="records_of_event"),
        Route(f"{root}/agents", for_readers(_agents), name="agents"),
        Route(f"{root}/audit", for_readers(_audit), name="audit"),
        Route(f"{root}/export.jsonl", for_readers(_export), name="export"),
        Route(f"{root}/events/{{key}}/verdicts", partial(_post_verdict, site), methods=["POST"], name="verdict"),
        Route(f"{root}/verdicts/{{verdict_id}}", partial(_withdraw, site), methods=["DELETE"], name="withdraw"),
    ]


async def _events(site: Site, request: Request) -> Response:
    limit = whole_number(request.query_params, "limit", PAGE, lowest=1, highest=_MOST)
    state = choice_of(request, "state", ("open", "over", "all"), "open")
    group, cursor, now = group_of(request), cursor_of(request), site.now()
    wanted = EventFilter(groups=(group,) if group else (), states=_OVER if state == "over" else ())
    listing = partial(list_lines, has_waves=False, approved_first=False) if state == "open" else list_events
    page = await site.store.read(listing, wanted, now=now, limit=limit, cursor=cursor)
    alone = await site.store.read(collapsed, wanted, now=now) if state == "open" else []
    keys = [each.event.key for each in page.lines]
    events = await site.store.read(events_of, keys, now=now)
    answer = {"events": [events[key] for key in keys if key in events], "total": page.total}
    return json_answer({**answer, "cursor": page.cursor, "collapsed": alone})


async def _event(site: Site, request: Request) -> Response:
    key = key_of(request.path_params["key"])
    event = await site.store.read(event_of, key, now=site.now())
    if event is None:
        return error_answer(404, UNKNOWN_EVENT)
    records = await site.store.read(records_of, key)
    return json_answer({"event": event, "records": [msgspec.Raw(each.encode()) for each in records]})


async def _records(site: Site, request: Request) -> Response:
    """Return the records of an event, one per line.

    With ``vm_id``, return only the newest record of that VM.
    """
    key, vm_id = key_of(request.path_params["key"]), request.query_params.get("vm_id")
    if vm_id is None:
        found = await site.store.read(records_of, key)
    else:
        found = await site.store.read(newest_record, key, without_nul(vm_id.lower()))
    if not found:
        return error_answer(404, UNKNOWN_EVENT)
    return Response("".join(f"{each}\n" for each in found), media_type=FORMATS["jsonl"], headers=_HEADERS)


async def _agents(site: Site, _request: Request) -> Response:
    every = [key for _, key in await site.store.read(find_vms, VmFilter())]
    known = await site.store.read(read_vms, every[:_MOST_VMS])
    seen = site.connected_agents.all()
    keys = [*known, *sorted(seen.keys() - known.keys())]
    agents = [{"vm_key": key, "record": _newest_record(known.get(key)), "agent": _agent(seen.get(key))} for key in keys]
    return json_answer({"agents": agents, "total_vms": len(every)})


async def _audit(site: Site, request: Request) -> Response:
    after = whole_number(request.query_params, "after", 0, lowest=0, highest=_LARGEST)
    limit = whole_number(request.query_params, "limit", PAGE, lowest=1, highest=_MOST)
    found = await site.store.read(entries, after=after, limit=limit)
    return json_answer({"entries": found, "last": found[-1].entry if found else after})


async def _export(site: Site, _request: Request) -> Response:
    return await streamed(site.store, AuditFilter(), "jsonl", _HEADERS)


def _newest_record(vm: VmState | None) -> dict[str, object] | None:
    if vm is None:
        return None
    return {"vm_key": vm.vm_key, "observed_at": vm.observed_at, "vm": vm.vm, "labels": vm.labels}


def _agent(seen: AgentSeen | None) -> dict[str, object] | None:
    if seen is None:
        return None
    return {
        **msgspec.structs.asdict(seen.report),
        "is_connected": seen.connection is Connection.CONNECTED,
        "is_reconnecting": seen.connection is Connection.RECONNECTING,
        "is_attested": seen.is_attested,
        "received_index": seen.received_index,
    }


async def _post_verdict(site: Site, request: Request) -> Response:
    """``POST /events/{key}/verdicts``: store a verdict (201), or refuse it (409)."""
    person = await _person_of(site, request)
    wanted, key = await json_of(request, _Verdict), key_of(request.path_params["key"])
    [result] = await deciding.submit(
        site,
        person,
        wanted.verdict,
        {key: wanted.digest},
        reason=wanted.reason,
        valid_seconds=wanted.valid_seconds,
        confirmed={key: wanted.confirm},
    )
    if isinstance(result, VerdictRefused):
        raise result
    return _stored(result, status=201)


async def _withdraw(site: Site, request: Request) -> Response:
    """``DELETE /verdicts/{id}``: withdraw a verdict (200), or refuse (409)."""
    person = await _person_of(site, request)
    return _stored(await deciding.withdraw(site, person, request.path_params["verdict_id"]), status=200)


async def _person_of(site: Site, request: Request) -> Person:
    person = await site.users.person_of(request)
    site.users.check_change(request.headers, person, request.headers.get(_CSRF_HEADER, ""))
    return person


def _stored(taken: AcceptedVerdict, *, status: int) -> Response:
    shown = {"outcome": taken.ruling.outcome.value, "needed": taken.ruling.needed, "sent_to": taken.sent_to}
    return json_answer({"verdict_id": taken.verdict.verdict_id, **shown}, status=status)


async def post_decisions(site: Site, keys: Sequence[TrustedKey], log: ThrottledLog, request: Request) -> Response:
    """``POST /decisions``: forward decisions that were signed outside the portal.

    The response lists the index of each accepted decision and the reason for each refusal. Its status is 400 if all
    decisions are refused. The portal verifies the decisions with the public keys in its settings, so that the sender
    sees errors immediately. Each agent verifies its decisions again with the keys on its VM.
    """
    if not keys:
        return error_answer(403, "This portal has no [[keys]].")
    tokens = (await json_of(request, _Submitted)).decisions
    good: dict[str, Claims] = {}
    results: dict[str, dict[str, object]] = {}
    for number, token in enumerate(tokens):
        if number % _VERIFIED_AT_ONCE == 0:
            await asyncio.sleep(0)  # a large request must not delay polls
        try:
            good[token] = verify_for_any_vm(token, keys=keys, now=site.clock.now())
        except RefusedDecision as error:
            reason = error.reason.value
            results[token] = {"refused": reason, "message": str(error)}
            site.metrics.decisions_refused.labels(reason).inc()
            log.problem(error.reason, logging.WARNING, f"A decision was refused: {error}", reason=reason)
    numbers = await site.store.write(add_decisions, good, at=site.now()) if good else {}
    await site.pending_decisions.catch_up()
    for token, claims in good.items():
        sha256 = hashlib.sha256(token.encode()).hexdigest()
        results[token] = {"index": numbers[sha256], "vm_id": claims.audience.lower(), "jws_sha256": sha256}
    return json_answer({"decisions": [results[token] for token in tokens]}, status=200 if good else 400)
