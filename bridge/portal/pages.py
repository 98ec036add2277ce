"""The pages: what is announced and to be decided, one event, all of them in time, the agents, the audit, and the door.

They work without a script: every click is a form or a link. With it, `/live` says what has changed and the page fetches
that part of itself (the parameter `part`), made by the same templates; what somebody says is sent beside the page. Who
may not decide gets no button, and a 403.
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
from bridge.portal.asked import (
    DIGEST,
    KEY,
    Form,
    FormWrong,
    entry_of,
    group_of,
    one,
    part_of,
    place_of,
)
from bridge.portal.audit import Entry
from bridge.portal.connections import Connections
from bridge.portal.desk import MOST_REASON_CHARACTERS, Desk
from bridge.portal.desk import Said as SaidAtDesk
from bridge.portal.door import Door, NotHere, see
from bridge.portal.fleet import EventState, key_of_event_id
from bridge.portal.live import Live
from bridge.portal.people import People, Person, PersonRefused, Role
from bridge.portal.requests import BODY_SECONDS
from bridge.portal.store.database import StoreThreads, StoreUnavailable
from bridge.portal.store.events import EventFilter
from bridge.portal.store.stories import (
    EventStory,
    event_with_digest,
    events_of,
    known_vms,
    newest_entries,
    open_events_of_vms,
    stories,
    stories_of,
)
from bridge.portal.store.verdicts import Taken, VerdictRefused
from bridge.portal.verdicts import Outcome, Word
from bridge.portal.views import AgentView, EventView, Section, agent_view, entry_view, groups_of_vm, view_of
from bridge.portal.words import Surroundings, differences, these, vm_names

logger = logging.getLogger(__name__)

_MOST_OPEN, _MOST_OVER = 200, 50
_OVER_SECONDS = 3_600.0
_PAGE = 50
_MOST_AGENTS = 10_000
_MOST_CHOSEN = 100
_WITHDRAW = "withdraw"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a word on one event."""

    key: str
    title: str
    is_taken: bool
    sentence: str
    changes: tuple[str, ...] = ()
    """What of the event is another than it was shown."""


def routes(
    *,
    people: People,
    desk: Desk,
    store: StoreThreads,
    connections: Connections,
    live: Live,
    clock: Clock,
    kid: str | None,
    session_hours: float,
    body_seconds: float = BODY_SECONDS,
) -> list[Route]:
    """Return the routes of all pages, and of `/live`; *kid*: the key that the portal signs with."""
    door = Door(people=people, live=live, clock=clock, session_hours=session_hours, body_seconds=body_seconds)
    pages = Pages(
        desk=desk,
        store=store,
        connections=connections,
        live=live,
        clock=clock,
        kid=kid,
        door=door,
        others_may_approve=people.others_may_approve,
    )
    return [
        Route("/", door.shown(pages.home), name="page_home"),
        Route("/timeline", door.shown(pages.timeline), name="page_timeline"),
        Route("/events/{key}", door.shown(pages.event), name="page_event"),
        Route("/decide", door.shown(pages.chosen), methods=["GET"], name="page_chosen"),
        Route("/decide", door.changing(pages.decide), methods=["POST"], name="page_decide"),
        Route("/verdicts/{verdict_id}/withdraw", door.changing(pages.withdraw), methods=["POST"], name="page_withdraw"),
        Route("/agents", door.shown(pages.agents), name="page_agents"),
        Route("/audit", door.shown(pages.audit), name="page_audit"),
        Route("/login", door.login_form, methods=["GET"], name="page_login"),
        Route("/login", door.login, methods=["POST"], name="page_sign_in"),
        Route("/logout", door.changing(door.logout), methods=["POST"], name="page_sign_out"),
        Route("/live", live, name="live"),
        Route("/static/{name}", door.renderer.static, name="static"),
    ]


class Pages:
    """Answers browsers."""

    def __init__(
        self,
        *,
        desk: Desk,
        store: StoreThreads,
        connections: Connections,
        live: Live,
        clock: Clock,
        kid: str | None,
        door: Door,
        others_may_approve: bool,
    ) -> None:
        self._desk = desk
        self._store = store
        self._connections = connections
        self._live = live
        self._clock = clock
        self._kid = kid
        self._door = door
        self._others_may_approve = others_may_approve

    async def home(self, request: Request, person: Person) -> Response:
        """``GET /``: what is announced, what is under way, and what was over within the last hour."""
        group = group_of(request)
        part = part_of(request)
        views = await self._views(person, group, part)
        lists = [(section, [view for view in views if view.section is section]) for section in Section]
        groups = sorted({name for view in views for name in view.groups})
        if group is not None and group not in groups:
            groups.insert(0, group)
        return self._door.page(request, person, "home.html", lists=lists, group=group, groups=groups)

    async def event(self, request: Request, person: Person) -> Response:
        """``GET /events/{key}``: one event, by its key or its EventId."""
        story = await self._story(request.path_params["key"], person)
        return self._door.page(request, person, "event.html", view=self._view(story, person), follows=story.event.key)

    async def timeline(self, request: Request, person: Person) -> Response:
        """``GET /timeline``: every event, those that were told of last first."""
        group = group_of(request)
        wanted = EventFilter(group=group, before=place_of(request))
        found = await self._store.read(stories, wanted, limit=_PAGE + 1)
        seen = [story for story in found[:_PAGE] if person.may_see(story.event)]
        last = found[_PAGE - 1].event if len(found) > _PAGE else None
        chart = timeline.chart([story.event for story in seen], now=self._clock.now())
        views = [self._view(story, person) for story in seen]
        older = None if last is None else f"{last.first_observed_at}~{last.key}"
        return self._door.page(request, person, "timeline.html", chart=chart, views=views, older=older, group=group)

    async def agents(self, request: Request, person: Person) -> Response:
        """``GET /agents``: every VM that sent a record or asks for decisions, and whether it would follow one."""
        known = {vm.vm_key: vm for vm in await self._store.read(known_vms, limit=_MOST_AGENTS)}
        counts = await self._store.read(open_events_of_vms)
        seen = self._connections.all()
        keys = [*known, *(key for key in seen if key not in known)]
        found: list[AgentView] = []
        for key in keys:
            vm = known.get(key)
            if person.scope and (vm is None or not groups_of_vm(vm) & set(person.scope)):
                continue
            found.append(agent_view(key, vm, seen.get(key), kid=self._kid, open_events=counts.get(key, 0)))
        return self._door.page(request, person, "agents.html", agents=found, kid=self._kid)

    async def audit(self, request: Request, person: Person) -> Response:
        """``GET /audit``: what was done, newest first."""
        entries = await self._store.read(newest_entries, before=entry_of(request), limit=_PAGE)
        events = await self._store.read(events_of, [entry.subject for entry in entries if KEY.fullmatch(entry.subject)])
        rows = [entry_view(entry, events.get(entry.subject)) for entry in entries if _may_read(entry, person, events)]
        older = entries[-1].entry if entries and entries[-1].entry > 1 else None
        return self._door.page(request, person, "audit.html", rows=rows, older=older)

    async def chosen(self, request: Request, person: Person) -> Response:
        """``GET /decide``: the events that were chosen, what a click does to each, one reason and one click."""
        if person.role is not Role.APPROVER:
            raise PersonRefused(403, "You may look, and not decide.")
        keys = list(dict.fromkeys(request.query_params.getlist("event")))[:_MOST_CHOSEN]
        if not all(KEY.fullmatch(key) for key in keys):
            raise FormWrong("An event is named by 32 hexadecimal digits.")
        found = await self._store.read(stories_of, keys)
        views = [self._view(story, person) for story in found if person.may_see(story.event)]
        return self._door.page(
            request,
            person,
            "chosen.html",
            approvable=[view for view in views if view.approve],
            holdable=[view for view in views if view.hold],
            others=[view for view in views if not view.approve and not view.hold],
        )

    async def decide(self, request: Request, person: Person, form: Form) -> Response:
        """``POST /decide``: one word and one reason for one event or many; a result each, 403 for the only one."""
        word = one(form, "verdict")
        named = [each.partition(":") for each in form.get("event", ())]
        if word not in {each.value for each in Word} or not 1 <= len(named) <= _MOST_CHOSEN:
            raise FormWrong(f"A form says approve or hold, and names one to {_MOST_CHOSEN} events.")
        if not all(KEY.fullmatch(key) and DIGEST.fullmatch(digest) for key, _, digest in named):
            raise FormWrong("An event is named by its key and its digest.")
        if person.role is not Role.APPROVER:
            raise PersonRefused(403, "You may look, and not decide.")
        reason = one(form, "reason")[:MOST_REASON_CHARACTERS]
        results = []
        for key, _, digest in named:
            said = SaidAtDesk(event_key=key, word=Word(word), digest=digest, reason=reason)
            results.append(await self._say(person, said, is_only=len(named) == 1))
        self._live.look()
        if len(results) == 1 and results[0].is_taken:
            return see(f"/events/{results[0].key}" if one(form, "back") == "event" else f"/#event-{results[0].key}")
        status = 200 if any(each.is_taken for each in results) else 409
        return self._door.page(request, person, "results.html", status=status, results=results, word=word)

    async def withdraw(self, request: Request, person: Person, form: Form) -> Response:
        """``POST /verdicts/{id}/withdraw``: take back what was said."""
        try:
            taken = await self._desk.withdraw(person, request.path_params["verdict_id"])
        except VerdictRefused as refused:
            key = "" if refused.event is None else refused.event.key
            title = "The event" if refused.event is None else self._title(refused.event)
            result = Result(key=key, title=title, is_taken=False, sentence=str(refused))
            return self._door.page(request, person, "results.html", status=409, results=[result], word="withdraw")
        self._live.look()
        key = taken.verdict.event_key
        return see(f"/events/{key}" if one(form, "back") == "event" else f"/#event-{key}")

    async def _say(self, person: Person, said: SaidAtDesk, *, is_only: bool) -> Result:
        try:
            taken = await self._desk.say(person, said)
            found = await self._store.read(events_of, [said.event_key])
        except StoreUnavailable:
            return _refused(said, "The database cannot be asked now: nobody knows whether it was taken.")
        except PersonRefused as refused:
            if is_only:
                raise
            return _refused(said, str(refused))
        except VerdictRefused as refused:
            return await self._changed(said, refused)
        return Result(
            key=said.event_key, title=self._title(found[said.event_key]), is_taken=True, sentence=_taken(taken)
        )

    async def _changed(self, said: SaidAtDesk, refused: VerdictRefused) -> Result:
        """Return what is said of a refused word, with what of the event is another than it was shown."""
        event = refused.event
        if event is None:
            return _refused(said, str(refused))
        changes: tuple[str, ...] = ()
        if said.digest != event.digest:
            shown = await self._store.read(event_with_digest, said.event_key, said.digest)
            was = None if shown is None else shown.event
            nothing = ("No record that came from a VM shows it as the form did.",)
            changes = nothing if was is None else differences(was, event.event)
        return Result(
            key=said.event_key, title=self._title(event), is_taken=False, sentence=str(refused), changes=changes
        )

    @staticmethod
    def _title(event: EventState) -> str:
        return f"{event.event.event_type or 'Event'} of {these(vm_names(event))}"

    async def _views(self, person: Person, group: str | None, part: frozenset[str] | None) -> list[EventView]:
        """Return the rows of the first page; of a part of it only those that changed."""
        if part:
            found = await self._store.read(stories_of, sorted(part)[:_MOST_OPEN])
            found = [story for story in found if group is None or group in story.event.groups]
        else:
            found = await self._store.read(stories, EventFilter(is_open=True, group=group), limit=_MOST_OPEN)
            found += await self._store.read(stories, EventFilter(is_open=False, group=group), limit=_MOST_OVER)
        oldest = self._clock.timestamp() - _OVER_SECONDS
        views = [
            self._view(story, person)
            for story in found
            if person.may_see(story.event)
            and (story.event.is_open or timeline.seconds_of(story.event.observed_at) >= oldest)
        ]
        return sorted(views, key=lambda view: view.order)

    def _view(self, story: EventStory, person: Person) -> EventView:
        agents = self._connections.of({vm.vm_key for vm in story.event.vms} | {each.vm_key for each in story.decisions})
        around = Surroundings(
            now=self._clock.now(),
            person=person,
            agents=agents,
            kid=self._kid,
            required=self._desk.required,
            approvers=None if self._others_may_approve else story.approvers,
        )
        return view_of(story, around)

    async def _story(self, name: str, person: Person) -> EventStory:
        key = name if KEY.fullmatch(name) else key_of_event_id(name)
        found = await self._store.read(stories_of, [key])
        if not found or not person.may_see(found[0].event):
            raise NotHere("No record told of such an event.")
        return found[0]


def _refused(said: SaidAtDesk, why: str) -> Result:
    return Result(key=said.event_key, title="The event", is_taken=False, sentence=why)


def _taken(taken: Taken) -> str:
    """Return what follows from a word that was taken."""
    told = f"{len(taken.told)} agent{'' if len(taken.told) == 1 else 's'}"
    if taken.ruling.outcome is Outcome.HELD:
        return f"Held: {told} told."
    if taken.ruling.outcome is Outcome.WAITING:
        return f"Noted; {taken.ruling.needed} more must approve it."
    return f"Approved: {told} told." if taken.told else "Noted."


def _may_read(entry: Entry, person: Person, events: Mapping[str, EventState]) -> bool:
    """Return whether *person* may read *entry*: with a scope only what is about its events, and what it did itself."""
    event = events.get(entry.subject)
    return not person.scope or entry.actor == person.name or (event is not None and person.may_see(event))
