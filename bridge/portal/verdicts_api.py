"""The JSON API to submit and withdraw verdicts.

Each request needs a session cookie, a valid ``Origin``, and the session's CSRF token in ``X-CSRF-Token``.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.portal.deciding import DEFAULT_VALID_SECONDS
from bridge.portal.requests import headers_of, json_answer, json_of
from bridge.portal.site import Site
from bridge.portal.store.verdicts import AcceptedVerdict, VerdictRefused
from bridge.portal.users import Person
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


def routes(site: Site, root: str) -> list[Route]:
    """Return the routes below *root*."""
    return [
        Route(f"{root}/events/{{key}}/verdicts", partial(_post, site), methods=["POST"], name="verdict"),
        Route(f"{root}/verdicts/{{verdict_id}}", partial(_delete, site), methods=["DELETE"], name="withdraw"),
    ]


async def verdict_refused(_request: Request, error: VerdictRefused) -> Response:
    """Return the reason and the current event."""
    event = None if error.event is None else msgspec.to_builtins(error.event)
    return json_answer({"error": str(error), "event": event}, status=error.status)


async def _post(site: Site, request: Request) -> Response:
    """``POST /events/{key}/verdicts``: store a verdict (201), or refuse it (409)."""
    person = await _person_of(site, request)
    wanted, key = await json_of(request, _Body), request.path_params["key"]
    [result] = await site.verdict_service.submit(
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


async def _delete(site: Site, request: Request) -> Response:
    """``DELETE /verdicts/{id}``: withdraw a verdict (200), or refuse (409)."""
    person = await _person_of(site, request)
    return _stored(await site.verdict_service.withdraw(person, request.path_params["verdict_id"]), status=200)


async def _person_of(site: Site, request: Request) -> Person:
    headers = headers_of(request)
    person = await site.users.person_of(request)
    site.users.check_change(headers, person, headers.get(CSRF_HEADER, ""))
    return person


def _stored(taken: AcceptedVerdict, *, status: int) -> Response:
    shown = {"outcome": taken.ruling.outcome.value, "needed": taken.ruling.needed, "sent_to": taken.sent_to}
    return json_answer({"verdict_id": taken.verdict.verdict_id, **shown}, status=status)
