"""Serves login and error pages, and requires login for other pages."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal.form_fields import Form, form_of, one, own_page, part_of
from bridge.portal.rendering import SECURITY_HEADERS, Renderer
from bridge.portal.requests import RequestRefused, headers_of
from bridge.portal.server_sent_events import LiveUpdates
from bridge.portal.store.database import StoreUnavailable
from bridge.portal.users import COOKIE, AccessDenied, Person, Users

logger = logging.getLogger(__name__)

_SEE_OTHER = 303
Answer = Callable[[Request, Person], Awaitable[Response]]


class LoginPages:
    """Serves the login pages and protects all other pages."""

    def __init__(self, *, users: Users, live: LiveUpdates, clock: Clock) -> None:
        self._users = users
        self._live = live
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)
        self.renderer = Renderer()

    def requires_login(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """Return a page that calls *answer* for a user, and redirects others to the login."""

        async def page(request: Request) -> Response:
            return await self._guarded(request, lambda person: answer(request, person))

        return page

    def accepts_form(self, answer: Callable[[Request, Person, Form], Awaitable[Response]]) -> Any:
        """Return a page that calls *answer* with the checked form of a logged-in person."""

        async def page(request: Request) -> Response:
            async def work(person: Person) -> Response:
                form = await form_of(request)
                self._users.check_change(headers_of(request), person, one(form, "csrf"))
                return await answer(request, person, form)

            return await self._guarded(request, work)

        return page

    async def login_form(self, request: Request) -> Response:
        """``GET /login``: the form."""
        return self._login_page(request, own_page(request.query_params.get("next", "")))

    async def login(self, request: Request) -> Response:
        """``POST /login``: start a session with a new ID."""
        headers = headers_of(request)
        try:
            form = await form_of(request)
            self._users.check_origin(headers)
            session_id = await self._users.sign_in(
                one(form, "name"),
                one(form, "password"),
                address=self._users.address_of(request),
                old_session_id=request.cookies.get(COOKIE, ""),
            )
        except AccessDenied as error:
            return self._login_page(request, own_page(one(form, "next")), why=str(error), status=error.status)
        except RequestRefused as error:
            return self._login_page(request, "/", why=str(error), status=error.status)
        except StoreUnavailable as error:
            return self._unavailable(request, error)
        answer = redirect(own_page(one(form, "next")))
        _set_cookie(answer, session_id, int(self._users.session.total_seconds()))
        return answer

    async def logout(self, _request: Request, person: Person, _form: Form) -> Response:
        """``POST /logout``: end the session and its streams."""
        await self._users.sign_out(person)
        self._live.end_session(person.session_sha256)
        answer = redirect("/login")
        _set_cookie(answer, "", 0)
        return answer

    async def _guarded(self, request: Request, work: Callable[[Person], Awaitable[Response]]) -> Response:
        person = None
        try:
            person = await self._users.person_of(request)
            return await work(person)
        except AccessDenied as error:
            is_unknown = error.status == 401  # noqa: PLR2004
            if is_unknown and request.method in {"GET", "HEAD"} and part_of(request) is None:
                return redirect(f"/login?next={quote(own_page(request.url.path), safe='')}")
            return self._problem(request, person, error.status, str(error))
        except RequestRefused as error:
            return self._problem(request, person, error.status, str(error))
        except StoreUnavailable as error:
            return self._unavailable(request, error, person)

    def page(
        self, request: Request, person: Person | None, template: str, *, status: int = 200, **more: Any
    ) -> Response:
        """Render *template* with *more* and the values that all pages have."""
        values = {
            "person": person,
            "path": request.url.path,
            "now": self._clock.now(),
            "is_part": part_of(request) is not None,
            "follows": "",
            **more,
        }
        return self.renderer.page(template, values, status=status)

    def _login_page(self, request: Request, wanted: str, *, why: str = "", status: int = 200) -> Response:
        return self.page(request, None, "login.html", status=status, next=wanted, why=why)

    def _problem(self, request: Request, person: Person | None, status: int, why: str) -> Response:
        answer = self.page(request, person, "problem.html", status=status, why=why)
        if request.method == "POST":
            answer.headers["Connection"] = "close"  # the portal does not read the rest of the body
        return answer

    def _unavailable(self, request: Request, error: StoreUnavailable, person: Person | None = None) -> Response:
        self._log.problem("store", logging.ERROR, f"A page cannot be shown: {error}")
        answer = self._problem(request, person, 503, "The database is not available. Try again in a moment.")
        answer.headers["Retry-After"] = "2"
        return answer


def redirect(address: str) -> Response:
    """Return a redirect to *address*."""
    return RedirectResponse(address, _SEE_OTHER, headers={**SECURITY_HEADERS, "Cache-Control": "no-store"})


def _set_cookie(answer: Response, value: str, seconds: int) -> None:
    answer.set_cookie(COOKIE, value, max_age=seconds, path="/", secure=True, httponly=True, samesite="lax")
