"""``/live``: tells open pages what has changed, as server-sent events. The page then fetches that part of itself.

A message has the keys of events, or the word ``agents``: nothing that a reader might not see. What has changed is found
in the database, once a second and only while somebody reads, so it does not matter which process of the portal made the
change. A reader that takes nothing costs a set of at most a hundred keys: what is more becomes ``all``. A stream ends
when its session does, and when the portal stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.form_fields import KEY
from bridge.portal.rendering import SECURITY_HEADERS
from bridge.portal.requests import error_answer, headers_of
from bridge.portal.signing import AgentSeen
from bridge.portal.store.database import StoreThreads, StoreUnavailable
from bridge.portal.store.event_details import Marks, marks, subjects_after, vm_keys_of
from bridge.portal.users import AccessDenied, Users

logger = logging.getLogger(__name__)

AGENTS, ALL = "agents", "all"
_LOOK_SECONDS = 1.0
#: How often a silent stream says that it is there, and whether its session still is, is asked.
_ALIVE_SECONDS = 10.0
_MOST_PENDING = 100
_MOST_SUBSCRIBERS = 256


class Subscriber:
    """One open stream."""

    def __init__(self, session: str | None) -> None:
        self.session = session
        self.ended: str | None = None
        self._pending: set[str] = set()
        self._woken = asyncio.Event()

    def publish(self, keys: Iterable[str]) -> None:
        """Have the reader told of *keys*."""
        self._pending |= set(keys)
        if ALL in self._pending or len(self._pending) > _MOST_PENDING:
            self._pending = {ALL}
        self._woken.set()

    def end(self, why: str) -> None:
        """Have the stream end with the event *why*."""
        self.ended = why
        self._woken.set()

    async def changes(self, seconds: float) -> set[str]:
        """Return what there is to tell, after *seconds* at the latest."""
        await _set_within(self._woken, seconds)
        self._woken.clear()
        found, self._pending = self._pending, set()
        return found


class LiveUpdates:
    """The streams that are open, and what they are told."""

    def __init__(
        self,
        *,
        store: StoreThreads,
        users: Users,
        connected_agents: ConnectedAgents,
        clock: Clock,
        alive_seconds: float = _ALIVE_SECONDS,
    ) -> None:
        self._store = store
        self._users = users
        self._connected_agents = connected_agents
        self._clock = clock
        self._alive_seconds = alive_seconds
        self._subscribers: set[Subscriber] = set()
        self._has_subscribers = asyncio.Event()
        self._check_requested = asyncio.Event()
        self._is_stopping = False
        self._log = ThrottledLog(logger, clock=clock)

    @property
    def subscribers(self) -> int:
        """Return how many streams are open."""
        return len(self._subscribers)

    async def follow(self) -> None:
        """Look for changes and tell the readers, until it is cancelled."""
        while True:
            await self._has_subscribers.wait()
            agents = self._connected_agents.all()
            try:
                before = await self._store.read(marks)
                self._publish({ALL})  # what changed before that was compared with nothing
                while self._subscribers:
                    await _set_within(self._check_requested, _LOOK_SECONDS)
                    self._check_requested.clear()
                    before, agents = await self._find_changes(before, agents)
                    self._log.recovered("store", "Open pages are told of changes again.")
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"Open pages are not told of changes. {error}")
                await asyncio.sleep(_LOOK_SECONDS)
                self._publish({ALL})
            if not self._subscribers:
                self._has_subscribers.clear()

    def check_now(self) -> None:
        """Look for changes at once: this process has just made one."""
        self._check_requested.set()

    def end_session(self, session: str | None) -> None:
        """End the streams of *session*: its person has signed out."""
        for subscriber in self._subscribers:
            if session is not None and subscriber.session == session:
                subscriber.end("ended")

    def stop(self) -> None:
        """End every stream, now and from now on."""
        self._is_stopping = True
        for subscriber in self._subscribers:
            subscriber.end("stopped")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one stream."""
        request = Request(scope, receive)
        headers = headers_of(request)
        address = request.client.host if request.client else ""
        refused = None
        try:
            person = await self._users.person(headers, request.cookies, address)
        except AccessDenied as error:
            refused = error_answer(error.status, str(error))
        except StoreUnavailable:
            refused = error_answer(503, "The database cannot be read now.")
        if refused is None and (self._is_stopping or len(self._subscribers) >= _MOST_SUBSCRIBERS):
            refused = error_answer(503, "Too many pages are open, or the portal stops.")
        if refused is not None:
            await refused(scope, receive, send)
            return
        subscriber = Subscriber(person.session_sha256)
        self._subscribers.add(subscriber)
        self._has_subscribers.set()
        streaming = asyncio.ensure_future(self._stream(subscriber, headers, request.cookies, address, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait([streaming, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._subscribers.discard(subscriber)
            subscriber.end("gone")
            for task in (streaming, gone):
                task.cancel()
            await asyncio.gather(streaming, gone, return_exceptions=True)
        if not streaming.cancelled():
            streaming.result()

    async def _stream(
        self, subscriber: Subscriber, headers: Mapping[str, str], cookies: Mapping[str, str], address: str, send: Send
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _headers()})
        subscriber.publish({ALL})  # what changed since the page was made is not known
        asked_at = self._clock.monotonic()
        while subscriber.ended is None:
            keys = await subscriber.changes(self._alive_seconds)
            if self._clock.monotonic() - asked_at >= self._alive_seconds:
                asked_at = self._clock.monotonic()
                await self._check(subscriber, headers, cookies, address)
            if subscriber.ended is None:
                await _say(send, f"event: changed\ndata: {' '.join(sorted(keys))}\n\n" if keys else ": here\n\n")
        last = f"event: {subscriber.ended}\ndata: {subscriber.ended}\n\n".encode()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _check(
        self, subscriber: Subscriber, headers: Mapping[str, str], cookies: Mapping[str, str], address: str
    ) -> None:
        """End *reader* when its session has ended, in whichever process."""
        with contextlib.suppress(StoreUnavailable):  # nobody knows; asked again the next time
            try:
                await self._users.person(headers, cookies, address)
            except AccessDenied:
                subscriber.end("ended")

    async def _find_changes(self, before: Marks, agents: dict[str, AgentSeen]) -> tuple[Marks, dict[str, AgentSeen]]:
        now, agents_now = await self._store.read(marks), self._connected_agents.all()
        changed = {
            key
            for key in before.open_events.keys() | now.open_events.keys()
            if before.open_events.get(key) != now.open_events.get(key)
        }
        if now.entry != before.entry:
            subjects = await self._store.read(subjects_after, before.entry)
            is_about_people = not all(map(KEY.fullmatch, subjects))  # whose approval counts may be another
            changed |= subjects
            changed.add(ALL if is_about_people or now.entry - before.entry > _MOST_PENDING else "audit")
        if agents_now != agents:
            moved = {key for key in agents.keys() | agents_now.keys() if agents.get(key) != agents_now.get(key)}
            of_events = await asyncio.to_thread(vm_keys_of, now.open_events.values())
            changed |= {key for key, vms in zip(now.open_events, of_events, strict=True) if vms & moved} | {AGENTS}
        self._publish(changed)
        return now, agents_now

    def _publish(self, keys: set[str]) -> None:
        if keys:
            for subscriber in self._subscribers:
                subscriber.publish(keys)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for *event*, and set it after *seconds*: `asyncio.wait_for` may lose a cancellation before Python 3.12."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # a body, which a GET should not have


async def _say(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


def _headers() -> list[tuple[bytes, bytes]]:
    own = {
        **SECURITY_HEADERS,
        "Content-Type": "text/event-stream",
        "Cache-Control": "no-store",
        "X-Accel-Buffering": "no",  # nginx would keep the messages together
    }
    return [(name.lower().encode(), value.encode()) for name, value in own.items()]
