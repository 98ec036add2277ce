"""``/live``: notifies open pages about changes through server-sent events.

While at least one page is open, the portal checks the database for changes once a second. It sends each page the keys
of changed events, and words such as ``agents`` for other changes, so the page can reload only the changed parts. If
more than 100 keys are waiting for a slow page, the portal sends ``all`` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.rendering import SECURITY_HEADERS
from bridge.portal.requests import KEY, RequestRefused
from bridge.portal.store.database import StoreThreads, StoreUnavailable
from bridge.portal.store.event_details import Marks, marks, open_events_of_vms, subjects_after
from bridge.portal.users import AccessDenied, Person, Users

logger = logging.getLogger(__name__)

AGENTS, ALL = "agents", "all"
_CHECK_SECONDS = 1.0
_KEEP_ALIVE_SECONDS = 10.0
_MOST_PENDING = 100
_MOST_SUBSCRIBERS, _MOST_OF_PERSON = 4_096, 16
_HEADERS = {
    **SECURITY_HEADERS,
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx must not buffer the stream
}


class Subscriber:
    """One open stream."""

    def __init__(self, person: Person) -> None:
        self.person = person
        self.ended: str | None = None
        self._pending: set[str] = set()
        self._woken = asyncio.Event()

    def publish(self, keys: Iterable[str]) -> None:
        """Add *keys* to the next message."""
        self._pending |= set(keys)
        if ALL in self._pending or len(self._pending) > _MOST_PENDING:
            self._pending = {ALL}
        self._woken.set()

    def end(self, reason: str) -> None:
        """End the stream with the event *reason*."""
        self.ended = reason
        self._woken.set()

    async def changes(self, seconds: float) -> set[str]:
        """Return the keys of the next message.

        Return an empty set if nothing changes within *seconds*.
        """
        await _wait(self._woken, seconds)
        self._woken.clear()
        found, self._pending = self._pending, set()
        return found


@dataclass(kw_only=True, eq=False)
class LiveUpdates:
    """The open streams, and the task that finds changes for them."""

    store: StoreThreads
    users: Users
    connected_agents: ConnectedAgents
    clock: Clock
    keep_alive_seconds: float = _KEEP_ALIVE_SECONDS

    def __post_init__(self) -> None:
        self._subscribers: set[Subscriber] = set()
        self._check_requested = asyncio.Event()
        self._is_stopping = False
        self._log = ThrottledLog(logger, clock=self.clock)

    async def follow(self) -> None:
        """Find changes and publish them until the task is canceled."""
        before = None
        while True:
            await _wait(self._check_requested, _CHECK_SECONDS)
            self._check_requested.clear()
            if not self._subscribers:
                before = None
                continue
            try:
                if before is None:
                    self.connected_agents.take_changes()
                    before = await self.store.read(marks)
                    self._publish({ALL})  # earlier changes are unknown
                else:
                    before = await self._find_changes(before)
                self._log.recovered("store", "Open pages receive updates again.")
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"Open pages receive no updates. {error}")
                before = None

    def check_now(self) -> None:
        """Look for changes at once, after a change by this process."""
        self._check_requested.set()

    def end_session(self, session: str | None) -> None:
        """End the streams of *session* after its logout."""
        for subscriber in self._subscribers:
            if session is not None and subscriber.person.session_sha256 == session:
                subscriber.end("ended")

    def stop(self) -> None:
        """End every stream, and refuse new streams."""
        self._is_stopping = True
        for subscriber in self._subscribers:
            subscriber.end("stopped")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one stream."""
        request = Request(scope, receive)
        person = await self.users.person_of(request)
        if self._is_stopping or len(self._subscribers) >= _MOST_SUBSCRIBERS:
            raise RequestRefused(503, "Too many pages are open, or the portal is stopping.")
        if sum(each.person.key == person.key for each in self._subscribers) >= _MOST_OF_PERSON:
            raise RequestRefused(429, "You have too many open pages. Close some of them.")
        subscriber = Subscriber(person)
        self._subscribers.add(subscriber)
        self._check_requested.set()
        try:
            await StreamingResponse(self._messages(subscriber, request), headers=_HEADERS)(scope, receive, send)
        finally:
            self._subscribers.discard(subscriber)

    async def _messages(self, subscriber: Subscriber, request: Request) -> AsyncIterator[str]:
        subscriber.publish({ALL})  # the page might have changed before its stream started
        checked_at = self.clock.monotonic()
        while subscriber.ended is None:
            keys = await subscriber.changes(self.keep_alive_seconds)
            if self.clock.monotonic() - checked_at >= self.keep_alive_seconds:
                checked_at = self.clock.monotonic()
                with contextlib.suppress(StoreUnavailable):  # the next check tries again
                    try:
                        await self.users.person_of(request)
                    except AccessDenied:
                        subscriber.end("ended")
            if subscriber.ended is None:
                yield f"event: changed\ndata: {' '.join(sorted(keys))}\n\n" if keys else ": here\n\n"
        yield f"event: {subscriber.ended}\ndata: {subscriber.ended}\n\n"

    async def _find_changes(self, before: Marks) -> Marks:
        moved, now = self.connected_agents.take_changes(), await self.store.read(marks)
        changed = {key for key, _ in before.open_events.items() ^ now.open_events.items()}
        if now.entry != before.entry:
            subjects = await self.store.read(subjects_after, before.entry)
            is_about_users = not all(map(KEY.fullmatch, subjects))  # a change of users can affect every event
            changed |= subjects
            changed.add(ALL if is_about_users or now.entry - before.entry > _MOST_PENDING else "audit")
        if moved:
            changed |= await self.store.read(open_events_of_vms, sorted(moved)) | {AGENTS}
        self._publish(changed)
        return now

    def _publish(self, keys: set[str]) -> None:
        if keys:
            for subscriber in self._subscribers:
                subscriber.publish(keys)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
