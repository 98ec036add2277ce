"""Serves the pages for people: events, timeline, agents, and audit.

The pages work without JavaScript, because every action is a form or a link. With JavaScript, `/live` notifies the page
of changes, and the page reloads only the part that changed (parameter `part`).

If a person is not allowed to decide, the page does not show any buttons, and the portal rejects verdicts with 403.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.events.event import EVENT_TYPES
from bridge.portal import audit_page, deciding, fleet_page, timeline_page
from bridge.portal.event_list import ListQuery, read_list, read_selection
from bridge.portal.fleet import EventState
from bridge.portal.fleet_page import count_agents
from bridge.portal.login import redirect
from bridge.portal.requests import DIGEST, KEY, Form, RequestRefused, cursor_of, key_of, one, whole_number
from bridge.portal.sentences import differences
from bridge.portal.site import Site
from bridge.portal.store.event_details import event_details_of, event_with_digest
from bridge.portal.store.events import records_of
from bridge.portal.store.verdicts import UNKNOWN_EVENT, AcceptedVerdict, VerdictRefused
from bridge.portal.store.vms import vm_names
from bridge.portal.users import AccessDenied, Person
from bridge.portal.verdicts import MOST_APPROVED, Choice
from bridge.portal.views import EventView, history, shown_vms
from bridge.portal.vm_state import record_of

_MOST_CHOSEN = 100
_MOST_HELD = 1_000
#: For pages only. Streams and the agents' API are never compressed.
_GZIP = (Middleware(GZipMiddleware, compresslevel=6),)


def routes(site: Site) -> list[Route]:
    """Return the routes of all pages and of `/live`."""
    login = site.login

    def page(name: str, path: str, show: Callable[..., Awaitable[Response]]) -> Route:
        handler = login.requires_login(partial(show, site))
        return Route(path, handler, methods=["GET"], name=f"page_{name}", middleware=_GZIP)

    def form(name: str, path: str, accept: Callable[..., Awaitable[Response]]) -> Route:
        return Route(path, login.accepts_form(partial(accept, site)), methods=["POST"], name=f"page_{name}")

    return [
        page("home", "/", home),
        page("timeline", "/timeline", timeline_page.show),
        page("event", "/events/{key}", event),
        page("chosen", "/decide", chosen),
        page("agents", "/agents", fleet_page.show),
        page("audit", "/audit", audit_page.show),
        page("audit_export", "/audit/export.{form}", audit_page.export),
        form("decide", "/decide", decide),
        form("withdraw", "/verdicts/{verdict_id}/withdraw", withdraw),
        form("bind", "/agents/{vm_key}/bind", fleet_page.bind),
        Route("/logout", login.accepts_form(login.logout), methods=["POST"], name="page_sign_out"),
        Route("/login/oidc", login.oidc_start, methods=["GET"], name="page_oidc_start"),
        Route("/login/callback", login.oidc_finish, methods=["GET"], name="page_oidc_finish"),
        Route("/login", login.login_form, methods=["GET"], name="page_login"),
        Route("/login", login.login, methods=["POST"], name="page_sign_in"),
        Route("/live", site.live, name="live"),
        Route("/static/{name}", login.renderer.static, name="static", middleware=_GZIP),
    ]


async def home(site: Site, request: Request, person: Person) -> Response:
    """``GET /``: list announced, started, and recently ended events."""
    query = ListQuery.of(request)
    found = await site.store.read(read_list, query, person, now=site.clock.now(), cursor=cursor_of(request))
    agents = await count_agents(site, person, found["affected"])
    return site.login.page(
        request, person, "home.html", found=found, query=query, types=EVENT_TYPES, required=site.required, agents=agents
    )


async def event(site: Site, request: Request, person: Person) -> Response:
    """``GET /events/{key}``: show the event with this key or EventId."""
    found = await site.store.read(event_details_of, [key_of(request.path_params["key"])], now=site.now())
    if not found or not person.may_see(found[0].event):
        raise RequestRefused(404, UNKNOWN_EVENT)
    view = EventView(site=site, person=person, now=site.clock.now(), details=found[0])
    first_vm, first_record = (
        whole_number(request.query_params, name, 0, lowest=0, highest=2**31) for name in ("vms", "records")
    )
    bodies = await site.store.read(records_of, view.event.key)
    names = await site.store.read(vm_names, shown_vms(view))
    return site.login.page(
        request,
        person,
        "event.html",
        view=view,
        history=history(view, map(record_of, bodies), names),
        first_vm=first_vm,
        first_record=first_record,
        bodies=bodies[::-1],
    )


async def chosen(site: Site, request: Request, person: Person) -> Response:
    """``GET /decide``: show the selected events for review and confirmation."""
    if person.why_not_approver is not None:
        raise AccessDenied(403, person.why_not_approver)
    keys = list(dict.fromkeys(request.query_params.getlist("event")))[:_MOST_CHOSEN]
    verdict = request.query_params.get("verdict", Choice.HOLD.value)
    if verdict not in {each.value for each in Choice} or not all(KEY.fullmatch(key) for key in keys):
        raise RequestRefused(400, "The URL must contain a verdict and the keys of events.")
    waves = request.query_params.getlist("wave")
    if waves and verdict == Choice.HOLD.value:
        selected = await site.store.read(read_selection, waves, keys, person, now=site.now(), limit=_MOST_HELD)
        return site.login.page(request, person, "wave.html", **selected)
    found = await site.store.read(event_details_of, keys, now=site.now())
    visible, now = [each for each in found if person.may_see(each.event)], site.clock.now()
    views = [EventView(site=site, person=person, now=now, details=each) for each in visible]
    return site.login.page(request, person, "chosen.html", verdict=verdict, chosen=views, waves=waves)


async def decide(site: Site, request: Request, person: Person, form: Form) -> Response:
    """``POST /decide``: approve or hold one or more events.

    The form has these fields:

    - `verdict`: ``approve`` or ``hold``
    - `event`: KEY:DIGEST of each event, separated by spaces or in repeated fields. The page supplies the digest.
    - `confirm`: KEY:NAME for each name that no agent confirms, but that the person confirms
    - `reason`: a text that applies to all events
    """
    choice = one(form, "verdict")
    events = (each.partition(":") for each in " ".join(form.get("event", ())).split())
    digests = {key: digest for key, _, digest in events}
    are_keys = all(KEY.fullmatch(key) and DIGEST.fullmatch(digest) for key, digest in digests.items())
    most = _MOST_HELD if choice == Choice.HOLD.value else MOST_APPROVED
    if choice not in {each.value for each in Choice} or not 1 <= len(digests) <= most or not are_keys:
        raise RequestRefused(400, f"Select 1 to {MOST_APPROVED} events to approve, or 1 to {_MOST_HELD} to hold.")
    confirmed: dict[str, list[str]] = {}
    for field in form.get("confirm", ()):
        key, _, name = field.partition(":")
        confirmed.setdefault(key, []).append(name)
    results = await deciding.submit(
        site, person, Choice(choice), digests, reason=one(form, "reason"), confirmed=confirmed
    )
    site.live.check_now()
    if len(results) == 1 and isinstance(results[0], AcceptedVerdict):
        return _back_to(form, results[0].event.key)
    return await _results(site, request, person, results, digests)


async def withdraw(site: Site, request: Request, person: Person, form: Form) -> Response:
    """``POST /verdicts/{id}/withdraw``: withdraw a verdict."""
    taken = await deciding.withdraw(site, person, request.path_params["verdict_id"])
    site.live.check_now()
    return _back_to(form, taken.event.key)


async def _results(
    site: Site,
    request: Request,
    person: Person,
    results: Sequence[AcceptedVerdict | VerdictRefused],
    digests: Mapping[str, str],
) -> Response:
    """Return the page with the effect of each verdict, or the reason of its refusal."""
    shown = [(each, await _changes(site, each.event, digests)) for each in results]
    refusals = [each.status for each in results if isinstance(each, VerdictRefused)]
    status = max(refusals) if len(refusals) == len(results) else 200
    return site.login.page(request, person, "results.html", status=status, results=shown)


async def _changes(site: Site, event: EventState | None, digests: Mapping[str, str]) -> Sequence[str]:
    """Return the changes of *event* since the person loaded the page."""
    if event is None or event.digest == digests[event.key]:
        return ()
    loaded = await site.store.read(event_with_digest, event.key, digests[event.key])
    if loaded is None or loaded.event is None:
        return ("No record reports the event as the page showed it.",)
    return differences(loaded.event, event.event)


def _back_to(form: Form, key: str) -> Response:
    return redirect(f"/events/{key}" if one(form, "back") == "event" else f"/#event-{key}")
