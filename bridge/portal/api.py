"""The read-only JSON API for events, agents, and audit entries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from bridge.clock import Clock, format_time
from bridge.portal.authentication import Authenticator
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.fleet import State, key_of_event_id
from bridge.portal.form_fields import KEY, cursor_of, group_of
from bridge.portal.requests import RequestRefused, error_answer, headers_of, json_answer, whole_number
from bridge.portal.store.audit import entries
from bridge.portal.store.database import StoreThreads
from bridge.portal.store.events import (
    PAGE,
    EventFilter,
    event_of,
    events_of,
    list_events,
    records_by_id,
    records_of,
)
from bridge.portal.store.open_events import collapsed, list_open
from bridge.portal.store.verdicts import UNKNOWN_EVENT
from bridge.portal.store.vms import ListedVm, VmFilter, list_vms

_LINES = "application/jsonl"
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_MOST = 500
_STATES = ("open", "over", "all")
_OVER = (State.COMPLETED, State.CANCELED, State.ENDED)
_LARGEST = 2**53 - 1
_MOST_VMS = 10_000


class Api:
    """Serves the routes that require the token of `[readers]`."""

    def __init__(
        self, *, store: StoreThreads, authenticator: Authenticator, connected_agents: ConnectedAgents, clock: Clock
    ) -> None:
        self._store = store
        self._clock = clock
        self._connected_agents = connected_agents
        self._authenticator = authenticator

    def routes(self, root: str) -> list[Route]:
        """Return the routes below *root*."""
        return [
            Route(f"{root}/events", self._for_readers(self._events), name="events"),
            Route(f"{root}/events/{{key}}", self._for_readers(self._event), name="event"),
            Route(f"{root}/events/{{key}}/records", self._for_readers(self._records), name="records_of_event"),
            Route(f"{root}/agents", self._for_readers(self._agents), name="agents"),
            Route(f"{root}/audit", self._for_readers(self._audit), name="audit"),
            Route(f"{root}/export.jsonl", self._for_readers(self._export), name="export"),
        ]

    def _for_readers(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Any]:
        async def checked(request: Request) -> Response:
            self._authenticator.check_reader(headers_of(request))
            return await answer(request)

        return checked

    async def _events(self, request: Request) -> Response:
        limit = whole_number(request.query_params, "limit", PAGE, lowest=1, highest=_MOST)
        state, group, cursor, now = _state(request), group_of(request), cursor_of(request), self._now()
        wanted = EventFilter(groups=() if group is None else (group,), states=_OVER if state == "over" else ())
        listing = list_open if state == "open" else list_events
        page = await self._store.read(listing, wanted, now=now, limit=limit, cursor=cursor)
        alone = await self._store.read(collapsed, wanted, now=now) if state == "open" else []
        events = await self._store.read(events_of, page.keys, now=now)
        answer = {"events": [events[key] for key in page.keys if key in events], "total": page.total}
        return json_answer({**answer, "cursor": page.cursor, "collapsed": alone})

    async def _event(self, request: Request) -> Response:
        key = _key(request)
        event = await self._store.read(event_of, key, now=self._now())
        if event is None:
            return error_answer(404, UNKNOWN_EVENT)
        records = await self._store.read(records_of, key)
        return json_answer({"event": event, "records": [msgspec.Raw(each.encode()) for each in records]})

    async def _records(self, request: Request) -> Response:
        """Return the records of an event, one per line.

        With ``vm_id``, return only the newest record of that VM.
        """
        key, vm_id = _key(request), request.query_params.get("vm_id")
        if vm_id is None:
            found = await self._store.read(records_of, key)
        else:
            event = await self._store.read(event_of, key, now=self._now())
            ids = [] if event is None else [vm.record_id for vm in event.vms if vm.vm_key == vm_id.lower()]
            found = await self._store.read(records_by_id, ids)
        if not found:
            return error_answer(404, UNKNOWN_EVENT)
        return Response("".join(f"{each}\n" for each in found), media_type=_LINES, headers=_HEADERS)

    async def _agents(self, _request: Request) -> Response:
        page = await self._store.read(list_vms, VmFilter(), limit=_MOST_VMS)
        known = {each.vm.vm_key: each for each in page.vms}
        seen = self._connected_agents.all()
        keys = [*known, *sorted(seen.keys() - known.keys())]
        agents = [{"vm_key": key, "record": _newest_record(known.get(key)), "agent": seen.get(key)} for key in keys]
        return json_answer({"agents": agents, "total_vms": page.total})

    def _now(self) -> str:
        return format_time(self._clock.now())

    async def _audit(self, request: Request) -> Response:
        after = whole_number(request.query_params, "after", 0, lowest=0, highest=_LARGEST)
        limit = whole_number(request.query_params, "limit", PAGE, lowest=1, highest=_MOST)
        found = await self._store.read(entries, after=after, limit=limit)
        return json_answer({"entries": found, "last": found[-1].entry if found else after})

    async def _export(self, _request: Request) -> Response:
        first = await self._store.read(entries, after=0)

        async def lines() -> AsyncIterator[bytes]:
            page = first
            while page:
                yield b"".join(msgspec.json.encode(entry) + b"\n" for entry in page)
                page = await self._store.read(entries, after=page[-1].entry)

        return StreamingResponse(lines(), media_type=_LINES, headers=_HEADERS)


def _newest_record(listed: ListedVm | None) -> dict[str, object] | None:
    if listed is None:
        return None
    vm = listed.vm
    return {"vm_key": vm.vm_key, "observed_at": vm.observed_at, "vm": vm.vm, "labels": vm.labels}


def _key(request: Request) -> str:
    name: str = request.path_params["key"]
    return name if KEY.fullmatch(name) else key_of_event_id(name)


def _state(request: Request) -> str:
    state = request.query_params.get("state", "open")
    if state not in _STATES:
        raise RequestRefused(400, f"state must be one of {', '.join(_STATES)}.")
    return state
