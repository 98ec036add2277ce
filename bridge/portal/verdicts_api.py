"""Verdicts as JSON: one verdict, several at once, and a withdrawal. For pages, and for programs with a session.

A request needs the session's cookie, the portal's own Origin, and the session's CSRF token in ``X-CSRF-Token``.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal.deciding import DEFAULT_VALID_SECONDS, MOST_VALID_SECONDS, VerdictRequest, VerdictService
from bridge.portal.requests import RequestRefused, body_of, headers_of, json_answer
from bridge.portal.store.database import StoreUnavailable
from bridge.portal.store.verdicts import AcceptedVerdict, VerdictRefused
from bridge.portal.users import AccessDenied, Person, Users
from bridge.portal.verdicts import Choice

logger = logging.getLogger(__name__)

CSRF_HEADER = "x-csrf-token"
_MOST_AT_ONCE = 100
_NOT_STORED = "It cannot be stored now."
_T = TypeVar("_T")
_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Seconds = Annotated[float, Meta(gt=0, le=MOST_VALID_SECONDS)]


class _Saying(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    verdict: Choice
    reason: str = ""
    valid_seconds: _Seconds = DEFAULT_VALID_SECONDS

    def of(self, key: str, digest: str) -> VerdictRequest:
        """Return the verdict on the event *key* with *digest*."""
        return VerdictRequest(
            event_key=key, choice=self.verdict, digest=digest, reason=self.reason, valid_seconds=self.valid_seconds
        )


class _One(_Saying, frozen=True, forbid_unknown_fields=True, kw_only=True):
    digest: _Digest


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    digest: _Digest


class _Many(_Saying, frozen=True, forbid_unknown_fields=True, kw_only=True):
    events: Annotated[list[_Named], Meta(min_length=1, max_length=_MOST_AT_ONCE)]


class VerdictsApi:
    """Accepts verdicts over HTTP."""

    def __init__(self, *, users: Users, verdict_service: VerdictService, clock: Clock) -> None:
        self._users = users
        self._verdict_service = verdict_service
        self._log = ThrottledLog(logger, clock=clock)

    def routes(self, root: str) -> list[Route]:
        """Return the routes below *root*."""
        return [
            Route(f"{root}/events/{{key}}/verdicts", self.post, methods=["POST"], name="verdict"),
            Route(f"{root}/verdicts", self.post_many, methods=["POST"], name="verdicts"),
            Route(f"{root}/verdicts/{{verdict_id}}", self.delete, methods=["DELETE"], name="withdraw"),
        ]

    async def post(self, request: Request) -> Response:
        """``POST /events/{key}/verdicts``: 201 with the outcome, or 409 with the current event."""
        person = await self._person_of(request)
        one = await _decoded(request, _One)
        try:
            taken = await self._verdict_service.submit(person, one.of(request.path_params["key"], one.digest))
        except VerdictRefused as error:
            return _refused(error)
        return json_answer(_shown(taken), status=201)

    async def post_many(self, request: Request) -> Response:
        """``POST /verdicts``: one choice and reason for several events; 200 with a result for each event."""
        person = await self._person_of(request)
        many = await _decoded(request, _Many)
        results: list[dict[str, Any]] = []
        for place, each in enumerate(many.events):
            try:
                taken = await self._verdict_service.submit(person, many.of(each.key, each.digest))
                results.append({"key": each.key, **_shown(taken)})
            except (VerdictRefused, AccessDenied) as error:
                results.append({"key": each.key, "refused": str(error)})
            except StoreUnavailable as error:  # the verdicts before it are stored, and their results must be reported
                if not results:
                    raise
                self._log.problem("store", logging.ERROR, f"A verdict cannot be stored: {error}")
                results += [{"key": other.key, "refused": _NOT_STORED} for other in many.events[place:]]
                break
        return json_answer({"results": results})

    async def delete(self, request: Request) -> Response:
        """``DELETE /verdicts/{id}``: 200 after a withdrawal, or 409 if it is too late."""
        person = await self._person_of(request)
        try:
            taken = await self._verdict_service.withdraw(person, request.path_params["verdict_id"])
        except VerdictRefused as error:
            return _refused(error)
        return json_answer(_shown(taken))

    async def _person_of(self, request: Request) -> Person:
        headers = headers_of(request)
        person = await self._users.person_of(request)
        self._users.check_change(headers, person, headers.get(CSRF_HEADER, ""))
        return person


async def _decoded(request: Request, kind: type[_T]) -> _T:
    body = await body_of(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(400, f"The body is invalid: {error}.") from error


def _refused(error: VerdictRefused) -> Response:
    event = None if error.event is None else msgspec.to_builtins(error.event)
    return json_answer({"error": str(error), "event": event}, status=error.status)


def _shown(taken: AcceptedVerdict) -> dict[str, Any]:
    return {
        "verdict_id": taken.verdict.verdict_id,
        "outcome": taken.ruling.outcome.value,
        "needed": taken.ruling.needed,
        "sent_to": taken.sent_to,
    }
