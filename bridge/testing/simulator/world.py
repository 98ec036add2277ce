"""Stores the events, the incarnation, and the approvals of a simulated Azure.

This module does not use threads or the network. Each read first applies all changes that are due, so no timer is
needed, and tests can use a manual clock. Changes at the same instant increase the incarnation only once.

Event statuses follow Microsoft's page "Scheduled Events for Linux VMs". An event keeps its EventId until it leaves the
document. A canceled event still has the status Scheduled when it leaves the document, and a hardware failure begins
with the status Started.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import msgspec

from bridge.clock import REAL_CLOCK, Clock
from bridge.config.settings import API_VERSIONS
from bridge.testing.simulator.clock import ManualClock
from bridge.testing.simulator.errors import SimulatorError, UnknownEvent, WrongRequest, WrongState
from bridge.testing.simulator.events import Event, EventSpec, new_event_id, shown_event
from bridge.testing.simulator.faults import Fault, FaultQueue

_REMEMBERED = 10_000


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of the simulated Azure."""

    at_seconds: float
    what: str
    """scheduled, started, updated, completed, canceled, approved, or a sentence about another change."""
    incarnation: int
    event: Event | None = None


@dataclass(frozen=True, kw_only=True)
class ApprovalReceived:
    """One EventId in the body of a POST request with StartRequests."""

    at: datetime
    vm: str
    event_id: str
    result: str
    """approved, already_approved, already_started, or unknown_event, which rejects the whole request."""


class World:
    """The events and approvals of all VMs in one simulator. Threads can share a World."""

    def __init__(
        self,
        vm_names: Sequence[str] = ("vm",),
        *,
        clock: Clock | ManualClock = REAL_CLOCK,
        speed: float = 1.0,
    ) -> None:
        if not (speed > 0 and math.isfinite(speed)):
            raise WrongRequest(f"speed = {speed!r} must be above 0. With 60, one minute takes one second.")
        self.vm_names = tuple(vm_names)
        self.clock = clock
        self.speed = speed
        self.faults = FaultQueue()
        self._approvals: deque[ApprovalReceived] = deque(maxlen=_REMEMBERED)
        self._lock = threading.RLock()
        self._events: dict[str, Event] = {}
        self._actions: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._incarnation = 1
        self._listeners: list[Callable[[Change], None]] = []
        self._instant: float | None = None
        self._is_counted = False
        self.begin()

    def begin(self) -> None:
        """Start the scenario time at 0."""
        with self._lock:
            self._origin_seconds = self.clock.monotonic()
            self._origin = self.clock.now()

    def seconds(self) -> float:
        """Return the scenario time in seconds."""
        return (self.clock.monotonic() - self._origin_seconds) * self.speed

    def wall_clock(self, at_seconds: float) -> datetime:
        """Return the wall-clock time of the scenario time *at_seconds*."""
        return self._origin + timedelta(seconds=at_seconds / self.speed)

    def schedule(self, at_seconds: float, action: Callable[[], object]) -> None:
        """Run *action* at the scenario time *at_seconds*.

        If *action* fails, send a message to the listeners.
        """
        with self._lock:
            heapq.heappush(self._actions, (at_seconds, next(self._order), action))

    def advance(self) -> None:
        """Apply all changes that are due. Each read calls this function first."""
        with self._lock:
            if self._instant is not None:
                return
            now = self.seconds()
            while (at := self._next_seconds()) <= now:
                with self._change(at):
                    self._run_due(at)

    def add_event(self, spec: EventSpec) -> str:
        """Add an event and return its EventId.

        If the status is Started, the event starts immediately.
        """
        with self._change() as at:
            event_id = spec.event_id or new_event_id()
            if self._find(event_id) is not None:
                raise WrongState(f"The EventId {event_id} is already in the document. Omit event_id to get a new one.")
            not_before = at + spec.notice
            event = Event(
                spec=spec,
                event_id=event_id,
                resources=self.vm_names if spec.resources is None else spec.resources,
                status="Scheduled",
                not_before_seconds=not_before,
                starts_seconds=not_before if spec.on_not_before == "start" else math.inf,
            )
            self._events[event_id] = event
            if spec.status == "Started":
                event.status = "Started"
                self._start(event, at)
            else:
                self._note("scheduled", event)
            return event_id

    def start(self, event_id: str) -> None:
        """Start a Scheduled event now."""
        with self._change() as at:
            self._start(self._in_status(event_id, "Scheduled"), at)

    def complete(self, event_id: str) -> None:
        """Remove a Started event from the document, because it has ended."""
        with self._change():
            self._remove(self._in_status(event_id, "Started"), "completed")

    def cancel(self, event_id: str) -> None:
        """Remove a Scheduled event from the document, because Azure canceled it."""
        with self._change():
            self._remove(self._in_status(event_id, "Scheduled"), "canceled")

    def update(self, event_id: str, **changes: Any) -> None:
        """Change fields of an event.

        New values of notice_seconds and impact_seconds count from now.
        """
        with self._change() as at:
            event = self._known(event_id)
            event.spec = msgspec.structs.replace(event.spec, **changes)
            if changes.get("resources") is not None:
                event.resources = tuple(changes["resources"])
            if "notice_seconds" in changes and event.status == "Scheduled":
                event.not_before_seconds = at + event.spec.notice
                if event.spec.on_not_before == "start":
                    event.starts_seconds = event.not_before_seconds
            if "impact_seconds" in changes and event.status == "Started":
                event.ends_seconds = at + event.spec.impact_seconds
            self._note("updated", event)

    def approve(self, event_ids: Sequence[str], *, vm: str) -> None:
        """Approve the events in one request from *vm*.

        If one EventId is unknown, reject the whole request.
        """
        with self._change() as at:
            unknown = [event_id for event_id in event_ids if self._find(event_id) is None]
            for event_id in event_ids:
                result = "unknown_event" if unknown else self._approve(self._known(event_id), at)
                received = ApprovalReceived(at=self.clock.now(), vm=vm, event_id=event_id, result=result)
                self._approvals.append(received)
            if unknown:
                raise UnknownEvent(f"The document has no event with the EventId {', '.join(unknown)}.")

    @property
    def approvals(self) -> tuple[ApprovalReceived, ...]:
        """Return the latest approvals, oldest first, including rejected approvals."""
        with self._lock:
            return tuple(self._approvals)

    @property
    def incarnation(self) -> int:
        """Return the current DocumentIncarnation."""
        with self._lock:
            self.advance()
            return self._incarnation

    def events(self) -> tuple[Event, ...]:
        """Return copies of the events in the document."""
        with self._lock:
            self.advance()
            return tuple(replace(event) for event in self._events.values())

    def document(self, api_version: str = API_VERSIONS[-1]) -> bytes:
        """Return the events document in the format of *api_version*."""
        with self._lock:
            self.advance()
            shown = (shown_event(event, api_version, self._not_before(event)) for event in self._events.values())
            events = [event for event in shown if event is not None]
            return json.dumps({"DocumentIncarnation": self._incarnation, "Events": events}).encode()

    def reset_incarnation(self, to: int = 1) -> None:
        """Set the incarnation to *to*.

        Azure resets the incarnation to 1 after a day without requests.
        """
        with self._change():
            self._incarnation = to
            self._is_counted = True
            self._note(f"the incarnation restarts at {to}")

    def set_fault(self, fault: Fault) -> None:
        """Add *fault* to the queue."""
        self.faults.add(fault)
        with self._lock:
            self._tell(f"fault: {fault.kind} on {fault.target}")

    def clear_faults(self, target: str = "all") -> None:
        """Remove the faults of *target*."""
        self.faults.clear(target)
        with self._lock:
            self._tell(f"faults cleared: {target}")

    @property
    def is_finished(self) -> bool:
        """Return whether the document is empty and no scenario step is left."""
        with self._lock:
            self.advance()
            return not self._actions and not self._events

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call *listener* with every change in order.

        *listener* must be fast, because it runs under the lock.
        """
        self._listeners.append(listener)

    @contextmanager
    def _change(self, at: float | None = None) -> Iterator[float]:
        with self._lock:
            if self._instant is not None:
                yield self._instant
                return
            if at is None:
                self.advance()
                at = self.seconds()
            self._instant, self._is_counted = at, False
            try:
                yield at
            finally:
                self._instant = None

    def _next_seconds(self) -> float:
        times = [
            event.starts_seconds if event.status == "Scheduled" else event.ends_seconds
            for event in self._events.values()
        ]
        if self._actions:
            times.append(self._actions[0][0])
        return min(times, default=math.inf)

    def _run_due(self, at: float) -> None:
        for event in tuple(self._events.values()):
            if event.status == "Scheduled" and event.starts_seconds <= at:
                self._start(event, at)
            elif event.status == "Started" and event.ends_seconds <= at:
                self._remove(event, "completed")
        while self._actions and self._actions[0][0] <= at:
            _, _, action = heapq.heappop(self._actions)
            try:
                action()
            except SimulatorError as exc:
                self._tell(f"a step of the scenario was skipped: {exc}")

    def _start(self, event: Event, at: float) -> None:
        event.status = "Started"
        event.ends_seconds = at + event.spec.impact_seconds
        self._note("started", event)

    def _remove(self, event: Event, what: str) -> None:
        del self._events[event.event_id]
        self._note(what, event)

    def _approve(self, event: Event, at: float) -> str:
        if event.status == "Started":
            return "already_started"
        if event.is_approved:
            return "already_approved"
        event.is_approved = True
        if event.spec.on_approval == "start":
            event.starts_seconds = min(event.starts_seconds, at + event.spec.approval_delay_seconds)
        elif event.spec.on_approval == "never":
            event.starts_seconds = math.inf
        self._tell("approved", event)
        return "approved"

    def _find(self, event_id: str) -> Event | None:
        # An EventId is a UUID, so ignore the case of its letters.
        wanted = event_id.upper()
        return next((event for event in self._events.values() if event.event_id.upper() == wanted), None)

    def _known(self, event_id: str) -> Event:
        event = self._find(event_id)
        if event is None:
            there = ", ".join(self._events) or "none"
            raise UnknownEvent(f"The document has no event with the EventId {event_id}. Its EventIds: {there}.")
        return event

    def _in_status(self, event_id: str, status: str) -> Event:
        event = self._known(event_id)
        if event.status != status:
            raise WrongState(f"Event {event_id} has the status {event.status}. This action needs the status {status}.")
        return event

    def _not_before(self, event: Event) -> datetime:
        return self.wall_clock(event.not_before_seconds)

    def _note(self, what: str, event: Event | None = None) -> None:
        if not self._is_counted:
            self._incarnation += 1
            self._is_counted = True
        self._tell(what, event)

    def _tell(self, what: str, event: Event | None = None) -> None:
        at = self.seconds() if self._instant is None else self._instant
        copy = None if event is None else replace(event)
        change = Change(at_seconds=at, what=what, incarnation=self._incarnation, event=copy)
        for listener in self._listeners:
            listener(change)
