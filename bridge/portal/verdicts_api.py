"""Verdicts as JSON: one verdict, several at once, and a withdrawal. For pages, and for programs with a session.

A request needs the session's cookie, the portal's own Origin, and the session's CSRF token in ``X-CSRF-Token``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal.deciding import DEFAULT_VALID_SECONDS, MOST_VALID_SECONDS, VerdictRequest, VerdictService
from bridge.portal.fleet import EventState
from bridge.portal.requests import BodyRefused, body_of, error_answer, headers_of, json_answer
from bridge.portal.store.database import StoreUnavailable
from bridge.portal.store.verdicts import AcceptedVerdict, VerdictRefused
from bridge.portal.users import AccessDenied, Person, Users
from bridge.portal.verdicts import Choice

logger = logging.getLogger(__name__)

CSRF_HEADER = "x-csrf-token"
_MOST_AT_ONCE = 100
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

        async def work(person: Person) -> Response:
            one = msgspec.json.decode(await body_of(request), type=_One)
            verdict_request = one.of(request.path_params["key"], one.digest)
            return json_answer(_shown(await self._verdict_service.submit(person, verdict_request)), status=201)

        return await self._answer(request, work)

    async def post_many(self, request: Request) -> Response:
        """``POST /verdicts``: one choice and reason for several events; 200 with a result for each event."""

        async def work(person: Person) -> Response:
            many = msgspec.json.decode(await body_of(request), type=_Many)
            results: list[dict[str, Any]] = []
            for place, each in enumerate(many.events):
                try:
                    taken = await self._verdict_service.submit(person, many.of(each.key, each.digest))
                    results.append({"key": each.key, **_shown(taken)})
                except (VerdictRefused, AccessDenied) as error:
                    results.append({"key": each.key, "refused": str(error)})
                except StoreUnavailable as error:  # those before it are decided, and must be told
                    if not results:
                        raise
                    why = self._not_stored(error)
                    results += [{"key": other.key, "refused": why} for other in many.events[place:]]
                    break
            return json_answer({"results": results})

        return await self._answer(request, work)

    async def delete(self, request: Request) -> Response:
        """``DELETE /verdicts/{id}``: 200 after a withdrawal, or 409 if it is too late."""

        async def work(person: Person) -> Response:
            return json_answer(_shown(await self._verdict_service.withdraw(person, request.path_params["verdict_id"])))

        return await self._answer(request, work)

    async def _answer(self, request: Request, work: Callable[[Person], Awaitable[Response]]) -> Response:
        headers = headers_of(request)
        try:
            person = await self._users.person_of(request)
            self._users.check_change(headers, person, headers.get(CSRF_HEADER, ""))
            return await work(person)
        except AccessDenied as error:
            return error_answer(error.status, str(error), ends=True)
        except VerdictRefused as error:
            return json_answer({"error": str(error), "event": _event(error.event)}, status=error.status)
        except BodyRefused as error:
            return error_answer(error.status, str(error), ends=True)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return error_answer(400, f"The body is not as it must be: {error}.")
        except StoreUnavailable as error:
            return error_answer(503, self._not_stored(error))

    def _not_stored(self, error: StoreUnavailable) -> str:
        self._log.problem("store", logging.ERROR, f"A verdict cannot be stored: {error}")
        return "It cannot be stored now."


def _shown(taken: AcceptedVerdict) -> dict[str, Any]:
    return {
        "verdict_id": taken.verdict.verdict_id,
        "outcome": taken.ruling.outcome.value,
        "needed": taken.ruling.needed,
        "sent_to": taken.sent_to,
    }


def _event(event: EventState | None) -> dict[str, Any] | None:
    return None if event is None else msgspec.to_builtins(event)
