"""Serves login and error pages, and requires login for other pages.

`bridge.portal.app` converts the exceptions of all routes to responses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bridge.clock import Clock
from bridge.portal.addresses import address_of
from bridge.portal.oidc import LoginRefused
from bridge.portal.oidc_sessions import OidcSessions
from bridge.portal.rendering import SECURITY_HEADERS, Renderer
from bridge.portal.requests import Form, RequestRefused, form_of, one, own_page
from bridge.portal.server_sent_events import LiveUpdates
from bridge.portal.store.database import StoreUnavailable
from bridge.portal.user_names import LOCAL, issuer_of
from bridge.portal.users import COOKIE, AccessDenied, Person, Users, new_session_id

_SEE_OTHER = 303
_LOGIN_COOKIE = "__Host-scheduled-events-login"
_LOGIN_SECONDS = 600
Answer = Callable[[Request, Person], Awaitable[Response]]


class LoginPages:
    """Serves the login pages and protects all other pages."""

    def __init__(self, *, users: Users, live: LiveUpdates, clock: Clock) -> None:
        self._users = users
        self._live = live
        self._clock = clock
        self.renderer = Renderer()

    def requires_login(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that calls *answer* if the person is logged in."""

        async def page(request: Request) -> Response:
            person = request.state.person = await self._users.person_of(request)
            return await answer(request, person)

        return page

    def accepts_form(self, answer: Callable[[Request, Person, Form], Awaitable[Response]]) -> Any:
        """Return a handler that checks the session and the form, and then calls *answer*."""

        async def page(request: Request, person: Person) -> Response:
            form = await form_of(request)
            self._users.check_change(request.headers, person, one(form, "csrf"))
            return await answer(request, person, form)

        return self.requires_login(page)

    async def login_form(self, request: Request) -> Response:
        """``GET /login``: show the login form."""
        return self._login_page(request, own_page(request.query_params.get("next", "")))

    async def login(self, request: Request) -> Response:
        """``POST /login``: start a session with a new ID."""
        form = await form_of(request)
        try:
            self._users.check_origin(request.headers)
            session_id = await self._users.sign_in(
                one(form, "name"),
                one(form, "password"),
                address=address_of(request),
                old_session_id=request.cookies.get(COOKIE, ""),
            )
        except AccessDenied as error:
            return self._login_page(request, own_page(one(form, "next")), why=str(error), status=error.status)
        answer = redirect(own_page(one(form, "next")))
        _set_cookie(answer, session_id, int(self._users.session.total_seconds()))
        return answer

    async def oidc_start(self, request: Request) -> Response:
        """``GET /login/oidc``: redirect to the identity provider."""
        wanted, secret = own_page(request.query_params.get("next", "")), new_session_id()
        try:
            answer = redirect(await self._oidc.authorization_url(secret))
        except LoginRefused as error:
            return self._login_page(request, "/", why=str(error), status=403)
        _set_cookie(answer, f"{secret}.{wanted}", _LOGIN_SECONDS, name=_LOGIN_COOKIE)
        return answer

    async def oidc_finish(self, request: Request) -> Response:
        """``GET /login/callback``: finish the login and start a session with a new ID."""
        secret, _, wanted = request.cookies.get(_LOGIN_COOKIE, "").partition(".")
        session_id = new_session_id()
        try:
            user, columns = await self._oidc.finish(
                secret,
                state=request.query_params.get("state", ""),
                code=request.query_params.get("code", ""),
                session_id=session_id,
            )
            old = request.cookies.get(COOKIE, "")
            await self._users.begin_session(user, old_session_id=old, session_id=session_id, **columns)
        except (LoginRefused, AccessDenied) as error:
            answer = self._login_page(request, "/", why=str(error), status=403)
        else:
            answer = redirect(own_page(wanted))
            _set_cookie(answer, session_id, int(self._users.session.total_seconds()))
        _set_cookie(answer, "", 0, name=_LOGIN_COOKIE)
        return answer

    @property
    def _oidc(self) -> OidcSessions:
        if self._users.oidc is None:
            raise RequestRefused(404, "OpenID Connect is not configured.")
        return self._users.oidc

    async def logout(self, request: Request, person: Person, _form: Form) -> Response:
        """``POST /logout``: end the session and its `/live` streams."""
        await self._users.sign_out(person)
        self._live.end_session(person.session_sha256)
        answer = redirect("/login")
        if self._users.oidc is not None and issuer_of(person.key) != LOCAL:
            with contextlib.suppress(LoginRefused):
                url = await self._users.oidc.logout_url()
                answer = self._login_page(request, "/", provider_logout=url)
        _set_cookie(answer, "", 0)
        return answer

    def refused(self, request: Request, error: RequestRefused) -> Response:
        """Return the page for a refused request, or redirect an unknown person to the login."""
        is_unknown = error.status == 401  # noqa: PLR2004
        if is_unknown and request.method in {"GET", "HEAD"} and "part" not in request.query_params:
            return redirect(f"/login?next={quote(own_page(request.url.path), safe='')}")
        return self.problem(request, error.status, str(error))

    async def not_found(self, request: Request) -> Response:
        """Return the page for an unknown address."""
        with contextlib.suppress(AccessDenied, StoreUnavailable):
            request.state.person = await self._users.person_of(request)
        return self.problem(request, 404, "This address does not exist.")

    def page(
        self, request: Request, person: Person | None, template: str, *, status: int = 200, **more: Any
    ) -> Response:
        """Render *template* with *more* and the values that all pages have."""
        values = {
            "person": person,
            "csrf": "" if person is None else self._users.csrf_token(person),
            "path": request.url.path,
            "now": self._clock.now(),
            "is_part": "part" in request.query_params,
            **more,
        }
        return self.renderer.page(template, values, status=status)

    def _login_page(
        self, request: Request, wanted: str, *, why: str = "", status: int = 200, provider_logout: str | None = None
    ) -> Response:
        values = {
            "next": wanted,
            "why": why,
            "provider_logout": provider_logout,
            "has_oidc": self._users.oidc is not None,
            "has_passwords": self._users.allows_passwords(address_of(request)),
        }
        return self.page(request, None, "login.html", status=status, **values)

    def problem(self, request: Request, status: int, why: str) -> Response:
        """Return the page for an error."""
        person = getattr(request.state, "person", None)
        answer = self.page(request, person, "problem.html", status=status, why=why)
        if request.method == "POST":
            answer.headers["Connection"] = "close"  # the portal does not read the rest of the body
        return answer


def redirect(address: str) -> Response:
    """Return a redirect to *address*."""
    return RedirectResponse(address, _SEE_OTHER, headers={**SECURITY_HEADERS, "Cache-Control": "no-store"})


def _set_cookie(answer: Response, value: str, seconds: int, *, name: str = COOKIE) -> None:
    answer.set_cookie(name, value, max_age=seconds, path="/", secure=True, httponly=True, samesite="lax")
