"""Serves the pages for people: events, timeline, agents, and audit.

The pages work without JavaScript, because every action is a form or a link. With JavaScript, `/live` notifies the page
of changes, and the page reloads only the part that changed (parameter `part`).

If a person is not allowed to decide, the page does not show any buttons, and the portal rejects verdicts with 403.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.clock import Clock, format_time
from bridge.events.event import EVENT_TYPES
from bridge.portal.audit_page import AuditPage
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.deciding import VerdictService
from bridge.portal.event_list import ListQuery, read_list, read_selection
from bridge.portal.fleet import EventState, key_of_event_id
from bridge.portal.fleet_page import FleetPage, count_agents
from bridge.portal.form_fields import DIGEST, KEY, Form, cursor_of, one
from bridge.portal.history import history
from bridge.portal.login import LoginPages, redirect
from bridge.portal.requests import RequestRefused, whole_number
from bridge.portal.sentences import STATE_WORDS, differences, how_many, lifting, these, vm_names
from bridge.portal.server_sent_events import LiveUpdates
from bridge.portal.store.database import StoreThreads
from bridge.portal.store.event_details import EventDetails, event_details_of, event_with_digest, record_of
from bridge.portal.store.events import records_of
from bridge.portal.store.verdicts import UNKNOWN_EVENT, AcceptedVerdict, VerdictRefused
from bridge.portal.timeline_page import TimelinePage
from bridge.portal.users import AccessDenied, Person, Users
from bridge.portal.verdicts import Choice, Outcome
from bridge.portal.views import EventView

_PAGE = 50
_VMS_PAGE, _RECORDS_PAGE = 100, 20
_MOST_CHOSEN = 100
_MOST_APPROVED = 20
_MOST_HELD = 1_000
#: For pages only. Streams and the agents' API are never compressed.
_GZIP = (Middleware(GZipMiddleware, compresslevel=6),)


class Pages:
    """Serves the pages. *kid* names the portal's signing key, if any."""

    def __init__(
        self,
        *,
        users: Users,
        verdict_service: VerdictService,
        store: StoreThreads,
        connected_agents: ConnectedAgents,
        live: LiveUpdates,
        clock: Clock,
        kid: str | None,
    ) -> None:
        self._users = users
        self._verdict_service = verdict_service
        self._store = store
        self._connected_agents = connected_agents
        self._live = live
        self._clock = clock
        self._kid = kid
        self._login_pages = LoginPages(users=users, live=live, clock=clock)
        self._fleet = FleetPage(
            login_pages=self._login_pages, store=store, connected_agents=connected_agents, clock=clock, kid=kid
        )
        self.not_found = self._login_pages.not_found
        self._audit = AuditPage(login_pages=self._login_pages, store=store)
        self._timeline = TimelinePage(login_pages=self._login_pages, store=store, clock=clock)

    def routes(self) -> list[Route]:
        """Return the routes of all pages and of `/live`."""
        login = self._login_pages
        shown = (
            ("home", "/", self.home),
            ("timeline", "/timeline", self._timeline.show),
            ("event", "/events/{key}", self.event),
            ("chosen", "/decide", self.chosen),
            ("agents", "/agents", self._fleet.show),
            ("audit", "/audit", self._audit.show),
            ("audit_export", "/audit/export.{form}", self._audit.export),
        )
        forms = (
            ("decide", "/decide", self.decide),
            ("withdraw", "/verdicts/{verdict_id}/withdraw", self.withdraw),
            ("bind", "/agents/{vm_key}/bind", self._fleet.bind),
            ("sign_out", "/logout", login.logout),
        )
        return [
            *(
                Route(path, login.requires_login(page), methods=["GET"], name=f"page_{name}", middleware=_GZIP)
                for name, path, page in shown
            ),
            *(
                Route(path, login.accepts_form(form), methods=["POST"], name=f"page_{name}")
                for name, path, form in forms
            ),
            Route("/login/oidc", login.oidc_start, methods=["GET"], name="page_oidc_start"),
            Route("/login/callback", login.oidc_finish, methods=["GET"], name="page_oidc_finish"),
            Route("/login", login.login_form, methods=["GET"], name="page_login"),
            Route("/login", login.login, methods=["POST"], name="page_sign_in"),
            Route("/live", self._live, name="live"),
            Route("/static/{name}", login.renderer.static, name="static", middleware=_GZIP),
        ]

    async def home(self, request: Request, person: Person) -> Response:
        """``GET /``: list announced, started, and recently ended events."""
        query, required = ListQuery.of(request), self._verdict_service.required
        found = await self._store.read(
            read_list, query, person, now=self._clock.now(), required=required, cursor=cursor_of(request)
        )
        agents = await count_agents(self._store, self._connected_agents, person, self._kid)
        return self._login_pages.page(
            request,
            person,
            "home.html",
            found=found,
            query=query,
            types=EVENT_TYPES,
            required=required,
            agents=agents,
        )

    async def event(self, request: Request, person: Person) -> Response:
        """``GET /events/{key}``: show the event with this key or EventId."""
        details = await self._details_of(request.path_params["key"], person)
        first_vm, first_record = (
            whole_number(request.query_params, name, 0, lowest=0, highest=2**31) for name in ("vms", "records")
        )
        bodies = await self._store.read(records_of, details.event.key)
        view = self._view(details, person)
        return self._login_pages.page(
            request,
            person,
            "event.html",
            view=view,
            history=history(details, map(record_of, bodies), view.decided, view.progress),
            agents=self._connected_agents.of(vm.vm_key for vm in details.event.vms),
            kid=self._kid,
            first_vm=first_vm,
            vms=details.event.vms[first_vm : first_vm + _VMS_PAGE],
            first_record=first_record,
            records=bodies[::-1][first_record : first_record + _RECORDS_PAGE],
            records_total=len(bodies),
            follows=details.event.key,
            states=STATE_WORDS,
            how_many=how_many,
        )

    async def chosen(self, request: Request, person: Person) -> Response:
        """``GET /decide``: let the person review the selected events and confirm the verdict."""
        if person.why_not_approver is not None:
            raise AccessDenied(403, person.why_not_approver)
        keys = list(dict.fromkeys(request.query_params.getlist("event")))[:_MOST_CHOSEN]
        verdict = request.query_params.get("verdict", Choice.HOLD.value)
        if verdict not in {each.value for each in Choice} or not all(KEY.fullmatch(key) for key in keys):
            raise RequestRefused(400, "The URL must contain a verdict and the keys of events.")
        waves = [] if verdict == Choice.APPROVE.value else request.query_params.getlist("wave")
        if waves:
            page = await self._store.read(read_selection, waves, keys, person, now=self._now(), limit=_MOST_HELD)
            return self._login_pages.page(request, person, "wave.html", page=page)
        found = await self._store.read(event_details_of, keys, now=self._now())
        views = [self._view(details, person) for details in found if person.may_see(details.event)]
        possible = [view for view in views if getattr(view.buttons, verdict)]
        others = [view for view in views if view not in possible]
        waves = request.query_params.getlist("wave")
        return self._login_pages.page(
            request, person, "chosen.html", verdict=verdict, views=possible, others=others, waves=waves
        )

    async def decide(self, request: Request, person: Person, form: Form) -> Response:
        """``POST /decide``: approve or hold one or more events.

        The form has these fields:

        - `verdict`: ``approve`` or ``hold``
        - `event`: KEY:DIGEST of each event, separated by spaces or in repeated fields. The page supplies the digest.
        - `confirm`: KEY:NAME for each name that no agent confirms, but that the person confirms
        - `reason`: a text that applies to all events
        """
        choice = one(form, "verdict")
        digests = {key: digest for field in form.get("event", ()) for key, _, digest in map(_parts, field.split())}
        are_keys = all(KEY.fullmatch(key) and DIGEST.fullmatch(digest) for key, digest in digests.items())
        most = _MOST_HELD if choice == Choice.HOLD.value else _MOST_APPROVED
        if choice not in {each.value for each in Choice} or not 1 <= len(digests) <= most or not are_keys:
            raise RequestRefused(
                400, f"The form must approve 1 to {_MOST_APPROVED} events, or hold 1 to {_MOST_HELD} events."
            )
        confirmed: dict[str, list[str]] = {}
        for key, _, name in map(_parts, form.get("confirm", ())):
            confirmed.setdefault(key, []).append(name)
        results = await self._verdict_service.submit(
            person, Choice(choice), digests, reason=one(form, "reason"), confirmed=confirmed
        )
        self._live.check_now()
        if len(results) == 1 and isinstance(results[0], AcceptedVerdict):
            return _back_to(form, results[0].event.key)
        return await self._results(request, person, results, digests)

    async def withdraw(self, request: Request, person: Person, form: Form) -> Response:
        """``POST /verdicts/{id}/withdraw``: withdraw a verdict."""
        taken = await self._verdict_service.withdraw(person, request.path_params["verdict_id"])
        self._live.check_now()
        if taken.ruling.needed:
            return await self._results(request, person, [taken], {})
        return _back_to(form, taken.event.key)

    async def _results(
        self,
        request: Request,
        person: Person,
        results: Sequence[AcceptedVerdict | VerdictRefused],
        digests: Mapping[str, str],
    ) -> Response:
        """Return the page with the effect of each verdict, or the reason of its refusal."""
        refusals = [each for each in results if isinstance(each, VerdictRefused)]
        shown = [
            (each.event, False, str(each), await self._changes(each.event, digests))
            if isinstance(each, VerdictRefused)
            else (each.event, True, _effect(each), ())
            for each in results
        ]
        status = max(each.status for each in refusals) if len(refusals) == len(results) else 200
        values = {"results": shown, "these": these, "vm_names": vm_names}
        return self._login_pages.page(request, person, "results.html", status=status, **values)

    async def _changes(self, event: EventState | None, digests: Mapping[str, str]) -> Sequence[str]:
        """Return the changes of *event* since the person loaded the page."""
        if event is None or event.digest == digests[event.key]:
            return ()
        loaded = await self._store.read(event_with_digest, event.key, digests[event.key])
        if loaded is None or loaded.event is None:
            return ("No record reports the event as the page showed it.",)
        return differences(loaded.event, event.event)

    def _now(self) -> str:
        return format_time(self._clock.now())

    def _view(self, details: EventDetails, person: Person) -> EventView:
        agents = self._connected_agents.of(
            {vm.vm_key for vm in details.event.vms} | {each.vm_key for each in details.decisions}
        )
        return EventView(
            details=details,
            now=self._clock.now(),
            person=person,
            agents=agents,
            kid=self._kid,
            required=self._verdict_service.required,
            approvers=None if self._users.others_may_approve else details.approvers,
        )

    async def _details_of(self, name: str, person: Person) -> EventDetails:
        key = name if KEY.fullmatch(name) else key_of_event_id(name)
        found = await self._store.read(event_details_of, [key], now=self._now())
        if not found or not person.may_see(found[0].event):
            raise RequestRefused(404, UNKNOWN_EVENT)
        return found[0]


def _back_to(form: Form, key: str) -> Response:
    return redirect(f"/events/{key}" if one(form, "back") == "event" else f"/#event-{key}")


def _effect(taken: AcceptedVerdict) -> str:
    ruling, agents = taken.ruling, how_many(len(taken.sent_to), "agent")
    if ruling.outcome is Outcome.HELD and ruling.needed:
        return f"Stored. The event stays held until {lifting(ruling.needed)}."
    if ruling.outcome is Outcome.HELD:
        return f"Held. The hold was sent to {agents}."
    if ruling.outcome is Outcome.WAITING:
        return f"Stored. The event needs {how_many(ruling.needed, 'more approval')}."
    return f"Approved. The approval was sent to {agents}." if taken.sent_to else "Stored."


def _parts(text: str) -> tuple[str, str, str]:
    return text.partition(":")
