"""The JSON API to submit and withdraw verdicts.

Each request needs a session cookie, a valid ``Origin``, and the session's CSRF token in ``X-CSRF-Token``.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.portal.deciding import DEFAULT_VALID_SECONDS, VerdictService
from bridge.portal.requests import RequestRefused, body_of, headers_of, json_answer
from bridge.portal.store.verdicts import AcceptedVerdict, VerdictRefused
from bridge.portal.users import Person, Users
from bridge.portal.verdicts import Choice

CSRF_HEADER = "x-csrf-token"
_MOST_VALID_SECONDS = 86_400


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    verdict: Choice
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    reason: str = ""
    confirm: Annotated[tuple[str, ...], Meta(max_length=10_000)] = ()
    """The unconfirmed names in Resources that the person confirms."""
    valid_seconds: Annotated[float, Meta(gt=0, le=_MOST_VALID_SECONDS)] = DEFAULT_VALID_SECONDS


class VerdictsApi:
    """Accepts verdicts over HTTP."""

    def __init__(self, *, users: Users, verdict_service: VerdictService) -> None:
        self._users = users
        self._verdict_service = verdict_service

    def routes(self, root: str) -> list[Route]:
        """Return the routes below *root*."""
        return [
            Route(f"{root}/events/{{key}}/verdicts", self.post, methods=["POST"], name="verdict"),
            Route(f"{root}/verdicts/{{verdict_id}}", self.delete, methods=["DELETE"], name="withdraw"),
        ]

    async def post(self, request: Request) -> Response:
        """``POST /events/{key}/verdicts``: store a verdict (201), or refuse it (409)."""
        person = await self._person_of(request)
        body = await body_of(request)
        try:
            wanted = msgspec.json.decode(body, type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestRefused(400, f"The body is invalid: {error}.") from error
        key = request.path_params["key"]
        [result] = await self._verdict_service.submit(
            person,
            wanted.verdict,
            {key: wanted.digest},
            reason=wanted.reason,
            valid_seconds=wanted.valid_seconds,
            confirmed={key: wanted.confirm},
        )
        if isinstance(result, VerdictRefused):
            raise result
        return json_answer(_shown(result), status=201)

    async def delete(self, request: Request) -> Response:
        """``DELETE /verdicts/{id}``: withdraw a verdict (200), or refuse (409)."""
        person = await self._person_of(request)
        return json_answer(_shown(await self._verdict_service.withdraw(person, request.path_params["verdict_id"])))

    async def _person_of(self, request: Request) -> Person:
        headers = headers_of(request)
        person = await self._users.person_of(request)
        self._users.check_change(headers, person, headers.get(CSRF_HEADER, ""))
        return person


async def verdict_refused(_request: Request, error: VerdictRefused) -> Response:
    """Return the error, and the current event."""
    event = None if error.event is None else msgspec.to_builtins(error.event)
    return json_answer({"error": str(error), "event": event}, status=error.status)


def _shown(taken: AcceptedVerdict) -> dict[str, Any]:
    return {
        "verdict_id": taken.verdict.verdict_id,
        "outcome": taken.ruling.outcome.value,
        "needed": taken.ruling.needed,
        "sent_to": taken.sent_to,
    }
