"""The pages: events to decide, one event, the timeline, the agents, the audit, and decisions on several events.

The pages work without a script: every action is a form or a link. With the script, `/live` reports changes, and the
page fetches its changed part (parameter `part`) from the same templates. People who may not decide see no buttons, and
their requests get a 403.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.clock import Clock
from bridge.portal import timeline
from bridge.portal.audit import Entry
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.deciding import MOST_REASON_CHARACTERS, VerdictRequest, VerdictService
from bridge.portal.fleet import EventState, key_of_event_id
from bridge.portal.form_fields import (
    DIGEST,
    KEY,
    Form,
    entry_of,
    group_of,
    one,
    part_of,
    place_of,
)
from bridge.portal.login import LoginPages, redirect
from bridge.portal.requests import RequestRefused
from bridge.portal.sentences import PageContext, differences, these, vm_names
from bridge.portal.server_sent_events import LiveUpdates
from bridge.portal.store.database import StoreThreads, StoreUnavailable
from bridge.portal.store.event_details import (
    EventDetails,
    event_details_of,
    event_with_digest,
    events_of,
    known_vms,
    list_event_details,
    newest_entries,
    open_events_of_vms,
)
from bridge.portal.store.events import EventFilter
from bridge.portal.store.verdicts import AcceptedVerdict, VerdictRefused
from bridge.portal.users import AccessDenied, Person, Role, Users
from bridge.portal.verdicts import Choice, Outcome
from bridge.portal.views import AgentView, EventView, Section, agent_view, entry_view, groups_of_vm, view_of

logger = logging.getLogger(__name__)

_MOST_OPEN, _MOST_OVER = 200, 50
_OVER_SECONDS = 3_600.0
_PAGE = 50
_MOST_AGENTS = 10_000
_MOST_CHOSEN = 100
_WITHDRAW = "withdraw"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verdict on one event."""

    key: str
    title: str
    is_taken: bool
    sentence: str
    changes: tuple[str, ...] = ()
    """The changes of the event since the page was loaded."""


class Pages:
    """Serves the pages; *kid* names the portal's key."""

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

    def routes(self) -> list[Route]:
        """Return the routes of all pages and of `/live`."""
        login = self._login_pages
        shown = (
            ("home", "/", self.home),
            ("timeline", "/timeline", self.timeline),
            ("event", "/events/{key}", self.event),
            ("chosen", "/decide", self.chosen),
            ("agents", "/agents", self.agents),
            ("audit", "/audit", self.audit),
        )
        forms = (
            ("decide", "/decide", self.decide),
            ("withdraw", "/verdicts/{verdict_id}/withdraw", self.withdraw),
            ("sign_out", "/logout", login.logout),
        )
        return [
            *(
                Route(path, login.requires_login(page), methods=["GET"], name=f"page_{name}")
                for name, path, page in shown
            ),
            *(
                Route(path, login.accepts_form(form), methods=["POST"], name=f"page_{name}")
                for name, path, form in forms
            ),
            Route("/login", login.login_form, methods=["GET"], name="page_login"),
            Route("/login", login.login, methods=["POST"], name="page_sign_in"),
            Route("/live", self._live, name="live"),
            Route("/static/{name}", login.renderer.static, name="static"),
        ]

    async def home(self, request: Request, person: Person) -> Response:
        """``GET /``: events that are announced, started, or ended within the last hour."""
        group = group_of(request)
        part = part_of(request)
        views = await self._views(person, group, part)
        lists = [(section, [view for view in views if view.section is section]) for section in Section]
        groups = sorted({name for view in views for name in view.groups})
        if group is not None and group not in groups:
            groups.insert(0, group)
        return self._login_pages.page(request, person, "home.html", lists=lists, group=group, groups=groups)

    async def event(self, request: Request, person: Person) -> Response:
        """``GET /events/{key}``: one event, by its key or its EventId."""
        details = await self._details_of(request.path_params["key"], person)
        return self._login_pages.page(
            request, person, "event.html", view=self._view(details, person), follows=details.event.key
        )

    async def timeline(self, request: Request, person: Person) -> Response:
        """``GET /timeline``: all events, newest first."""
        group = group_of(request)
        wanted = EventFilter(group=group, before=place_of(request))
        found = await self._store.read(list_event_details, wanted, limit=_PAGE + 1)
        seen = [details for details in found[:_PAGE] if person.may_see(details.event)]
        last = found[_PAGE - 1].event if len(found) > _PAGE else None
        chart = timeline.chart([details.event for details in seen], now=self._clock.now())
        views = [self._view(details, person) for details in seen]
        older = None if last is None else f"{last.first_observed_at}~{last.key}"
        return self._login_pages.page(
            request, person, "timeline.html", chart=chart, views=views, older=older, group=group
        )

    async def agents(self, request: Request, person: Person) -> Response:
        """``GET /agents``: every VM that has sent a record or polls, and whether its agent would act on an approval."""
        known = {vm.vm_key: vm for vm in await self._store.read(known_vms, limit=_MOST_AGENTS)}
        counts = await self._store.read(open_events_of_vms)
        seen = self._connected_agents.all()
        keys = [*known, *(key for key in seen if key not in known)]
        found: list[AgentView] = []
        for key in keys:
            vm = known.get(key)
            if person.scope and (vm is None or not groups_of_vm(vm) & set(person.scope)):
                continue
            found.append(agent_view(key, vm, seen.get(key), kid=self._kid, open_events=counts.get(key, 0)))
        return self._login_pages.page(request, person, "agents.html", agents=found, kid=self._kid)

    async def audit(self, request: Request, person: Person) -> Response:
        """``GET /audit``: the audit, newest entry first."""
        entries = await self._store.read(newest_entries, before=entry_of(request), limit=_PAGE)
        events = await self._store.read(events_of, [entry.subject for entry in entries if KEY.fullmatch(entry.subject)])
        rows = [entry_view(entry, events.get(entry.subject)) for entry in entries if _may_read(entry, person, events)]
        older = entries[-1].entry if entries and entries[-1].entry > 1 else None
        return self._login_pages.page(request, person, "audit.html", rows=rows, older=older)

    async def chosen(self, request: Request, person: Person) -> Response:
        """``GET /decide``: the selected events, the effect on each, and one form for all."""
        if person.role is not Role.APPROVER:
            raise AccessDenied(403, "You may look, and not decide.")
        keys = list(dict.fromkeys(request.query_params.getlist("event")))[:_MOST_CHOSEN]
        if not all(KEY.fullmatch(key) for key in keys):
            raise RequestRefused(400, "An event is named by 32 hexadecimal digits.")
        found = await self._store.read(event_details_of, keys)
        views = [self._view(details, person) for details in found if person.may_see(details.event)]
        return self._login_pages.page(
            request,
            person,
            "chosen.html",
            approvable=[view for view in views if view.approve],
            holdable=[view for view in views if view.hold],
            others=[view for view in views if not view.approve and not view.hold],
        )

    async def decide(self, request: Request, person: Person, form: Form) -> Response:
        """``POST /decide``: one choice and reason for one or more events; a result for each event."""
        choice = one(form, "verdict")
        named = [each.partition(":") for each in form.get("event", ())]
        if choice not in {each.value for each in Choice} or not 1 <= len(named) <= _MOST_CHOSEN:
            raise RequestRefused(400, f"A form says approve or hold, and names one to {_MOST_CHOSEN} events.")
        if not all(KEY.fullmatch(key) and DIGEST.fullmatch(digest) for key, _, digest in named):
            raise RequestRefused(400, "An event is named by its key and its digest.")
        if person.role is not Role.APPROVER:
            raise AccessDenied(403, "You may look, and not decide.")
        reason = one(form, "reason")[:MOST_REASON_CHARACTERS]
        results = []
        for key, _, digest in named:
            verdict_request = VerdictRequest(event_key=key, choice=Choice(choice), digest=digest, reason=reason)
            results.append(await self._submit(person, verdict_request, is_only=len(named) == 1))
        self._live.check_now()
        if len(results) == 1 and results[0].is_taken:
            return redirect(
                f"/events/{results[0].key}" if one(form, "back") == "event" else f"/#event-{results[0].key}"
            )
        status = 200 if any(each.is_taken for each in results) else 409
        return self._login_pages.page(request, person, "results.html", status=status, results=results, choice=choice)

    async def withdraw(self, request: Request, person: Person, form: Form) -> Response:
        """``POST /verdicts/{id}/withdraw``: withdraw a verdict."""
        try:
            taken = await self._verdict_service.withdraw(person, request.path_params["verdict_id"])
        except VerdictRefused as refused:
            key = "" if refused.event is None else refused.event.key
            title = "The event" if refused.event is None else self._title(refused.event)
            result = Result(key=key, title=title, is_taken=False, sentence=str(refused))
            return self._login_pages.page(
                request, person, "results.html", status=409, results=[result], choice="withdraw"
            )
        self._live.check_now()
        key = taken.verdict.event_key
        return redirect(f"/events/{key}" if one(form, "back") == "event" else f"/#event-{key}")

    async def _submit(self, person: Person, verdict_request: VerdictRequest, *, is_only: bool) -> Result:
        try:
            taken = await self._verdict_service.submit(person, verdict_request)
            found = await self._store.read(events_of, [verdict_request.event_key])
        except StoreUnavailable:
            return _refused(verdict_request, "The database cannot be asked now: nobody knows whether it was taken.")
        except AccessDenied as refused:
            if is_only:
                raise
            return _refused(verdict_request, str(refused))
        except VerdictRefused as refused:
            return await self._changed(verdict_request, refused)
        return Result(
            key=verdict_request.event_key,
            title=self._title(found[verdict_request.event_key]),
            is_taken=True,
            sentence=_taken(taken),
        )

    async def _changed(self, verdict_request: VerdictRequest, refused: VerdictRefused) -> Result:
        """Return the result of a refused verdict, with the changes of the event since the page was loaded."""
        event = refused.event
        if event is None:
            return _refused(verdict_request, str(refused))
        changes: tuple[str, ...] = ()
        if verdict_request.digest != event.digest:
            shown = await self._store.read(event_with_digest, verdict_request.event_key, verdict_request.digest)
            was = None if shown is None else shown.event
            nothing = ("No record that came from a VM shows it as the form did.",)
            changes = nothing if was is None else differences(was, event.event)
        return Result(
            key=verdict_request.event_key,
            title=self._title(event),
            is_taken=False,
            sentence=str(refused),
            changes=changes,
        )

    @staticmethod
    def _title(event: EventState) -> str:
        return f"{event.event.event_type or 'Event'} of {these(vm_names(event))}"

    async def _views(self, person: Person, group: str | None, part: frozenset[str] | None) -> list[EventView]:
        """Return the rows of the first page; for a part of the page, only the changed rows."""
        if part:
            found = await self._store.read(event_details_of, sorted(part)[:_MOST_OPEN])
            found = [details for details in found if group is None or group in details.event.groups]
        else:
            found = await self._store.read(list_event_details, EventFilter(is_open=True, group=group), limit=_MOST_OPEN)
            found += await self._store.read(
                list_event_details, EventFilter(is_open=False, group=group), limit=_MOST_OVER
            )
        oldest = self._clock.timestamp() - _OVER_SECONDS
        views = [
            self._view(details, person)
            for details in found
            if person.may_see(details.event)
            and (details.event.is_open or timeline.seconds_of(details.event.observed_at) >= oldest)
        ]
        return sorted(views, key=lambda view: view.order)

    def _view(self, details: EventDetails, person: Person) -> EventView:
        agents = self._connected_agents.of(
            {vm.vm_key for vm in details.event.vms} | {each.vm_key for each in details.decisions}
        )
        context = PageContext(
            now=self._clock.now(),
            person=person,
            agents=agents,
            kid=self._kid,
            required=self._verdict_service.required,
            approvers=None if self._users.others_may_approve else details.approvers,
        )
        return view_of(details, context)

    async def _details_of(self, name: str, person: Person) -> EventDetails:
        key = name if KEY.fullmatch(name) else key_of_event_id(name)
        found = await self._store.read(event_details_of, [key])
        if not found or not person.may_see(found[0].event):
            raise RequestRefused(404, "No record told of such an event.")
        return found[0]


def _refused(verdict_request: VerdictRequest, why: str) -> Result:
    return Result(key=verdict_request.event_key, title="The event", is_taken=False, sentence=why)


def _taken(taken: AcceptedVerdict) -> str:
    """Return the effect of an accepted verdict."""
    told = f"{len(taken.sent_to)} agent{'' if len(taken.sent_to) == 1 else 's'}"
    if taken.ruling.outcome is Outcome.HELD:
        return f"Held: {told} told."
    if taken.ruling.outcome is Outcome.WAITING:
        return f"Noted; {taken.ruling.needed} more must approve it."
    return f"Approved: {told} told." if taken.sent_to else "Noted."


def _may_read(entry: Entry, person: Person, events: Mapping[str, EventState]) -> bool:
    """Return whether *person* may read *entry*. A scope allows entries about its events and of the person itself."""
    event = events.get(entry.subject)
    return not person.scope or entry.actor == person.name or (event is not None and person.may_see(event))
