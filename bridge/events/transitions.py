"""Classifies differences between documents as transitions, such as completed.

When an event disappears from the document, Azure does not report whether it was completed or canceled. The agent infers
the transition from other facts, and reports the certainty as *evidence*. The first matching row applies:

    before                after               transition             evidence
    --------------------  ------------------  ---------------------  --------------------------------------------------
    other status, absent  Scheduled           scheduled              observed
    other status, absent  Started             started                observed
    other status, absent  Completed/Canceled  completed/canceled     observed
    other status, absent  any other status    updated                observed
    same status           another field       updated                observed
    ever Started          absent              completed              observed; inferred after a gap, or if the event
                                                                     had been absent before and came back
    Scheduled             absent              completed              boot_id: a Reboot or Redeploy of this VM, which
                                                                     booted when the event could have started
    Scheduled             absent              canceled               inferred: the event cannot have started
    any other             absent              ended                  unknown

A boot of this VM completes a Reboot or Redeploy event if the VM booted after NotBefore or up to one minute before it,
or if this agent had approved the event. The minute allows for a difference between Azure's and this VM's clocks. Any
other boot does not count, because a user might have rebooted the VM.

Microsoft's mock server uses a new EventId for each status of an event. An event therefore does not count as canceled if
the first document without it contains another event with the same type, source, and Resources.

`bridge.events.tracker` decides when a transition is recorded.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

import msgspec

from bridge.events.event import (
    SERVICE_OFF_AFTER_SECONDS,
    Document,
    Incarnation,
    ScheduledEvent,
    names_vm,
    normal_name,
)
from bridge.events.record import Evidence, Transition, TransitionRecord, new_record

#: The number of digits is limited, because the time of `int()` grows with the square of this number.
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")

_SCHEDULED, _STARTED = "Scheduled", "Started"
_BOOTING_TYPES = frozenset({"Reboot", "Redeploy"})
#: The clocks of Azure and of this VM can differ.
_BOOT_TOLERANCE = timedelta(seconds=60)
_ENDING_STATUSES = {"Completed": Transition.COMPLETED, "Canceled": Transition.CANCELED}
_BY_STATUS = {_SCHEDULED: Transition.SCHEDULED, _STARTED: Transition.STARTED, **_ENDING_STATUSES}

#: The fields whose change produces a record, in the order of the record.
_COMPARED = tuple(name for name in ScheduledEvent.__struct_fields__ if name != "event_id")


class Step(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Two consecutive good responses, with any gap or boot that occurred between them."""

    before: Document | None
    """The previous response, or the stored document after a start. None if *after* is the first response ever."""
    after: Document
    observed_at: datetime
    has_gap: bool = False
    """The agent restarted or had no good response for a while, so it might have missed documents."""
    seconds_since_good: float = 0.0
    booted_at: datetime | None = None
    """This VM has booted between the two responses, at this time or earlier. None if it has not booted."""
    vm_name: str | None = None
    approved: frozenset[str] = frozenset()
    """Keys of the events that this agent approved. Azure can start these events before NotBefore."""

    @cached_property
    def shows_every_document(self) -> bool:
        """Whether the agent missed no document between the two responses."""
        before = self.before or Document()
        rise = incarnation_step(before, self.after)
        if rise is None:
            return not self.has_gap
        pairs, vanished = match_events(before.events, self.after.events)
        changed = sum(was is None or bool(changed_fields(was, now)) for was, now in pairs)
        return 0 <= rise <= len(vanished) + changed

    @cached_property
    def subjects(self) -> frozenset[Hashable]:
        """Type, source, and Resources of each event in *after*."""
        return frozenset(_subject(event) for event in self.after.events)


def is_over(event: ScheduledEvent) -> bool:
    """Return whether *event* has ended. Its later absence then produces no record."""
    return event.event_status in _ENDING_STATUSES


def is_step_back(was: ScheduledEvent, now: ScheduledEvent) -> bool:
    """Return whether the status of the event went back from Started to Scheduled."""
    return was.event_status == _STARTED and now.event_status == _SCHEDULED


# Pairing of events.


def match_events(
    before: Sequence[ScheduledEvent], after: Sequence[ScheduledEvent]
) -> tuple[list[tuple[ScheduledEvent | None, ScheduledEvent]], list[ScheduledEvent]]:
    """Return a pair (old or None, new) for each event of *after*, and the vanished events.

    Events with the same key form a pair. If a key is not unique, events with equal type and Resources are paired first,
    and the other events are paired by position. An old event has vanished only if *after* contains no event with its
    key.
    """
    old = dict(enumerate(before))
    partners: dict[int, ScheduledEvent] = {}
    for signature in (_shape, _key):
        waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for place, was in old.items():
            waiting[signature(was)].append(place)
        for position, now in enumerate(after):
            places = waiting[signature(now)]
            if places and position not in partners:
                partners[position] = old.pop(places.popleft())
    keys_after = {event.key for event in after}
    vanished = [was for was in old.values() if was.key not in keys_after]
    return [(partners.get(position), now) for position, now in enumerate(after)], vanished


def _shape(event: ScheduledEvent) -> Hashable:
    return event.key, event.event_type, frozenset(event.resources or ())


def _key(event: ScheduledEvent) -> Hashable:
    return event.key


# Events that the document shows.


def classify_shown(was: ScheduledEvent | None, now: ScheduledEvent, step: Step) -> TransitionRecord | None:
    """Return the record of the change from *was* to *now*, or None if the content is equal.

    If *was* is None, the event is new.
    """
    changed = () if was is None else changed_fields(was, now)
    if was is not None and not changed:
        return None
    if was is None or was.event_status != now.event_status:
        transition = _BY_STATUS.get(now.event_status, Transition.UPDATED)
    else:
        transition = Transition.UPDATED
    previous = None if was is None else _previous(was, changed)
    return _record(transition, Evidence.OBSERVED, now, step, previous=previous, changed=changed)


def changed_fields(was: ScheduledEvent, now: ScheduledEvent) -> tuple[str, ...]:
    """Return the names of the fields whose meaning differs."""
    return tuple(name for name in _COMPARED if _value(was, name) != _value(now, name))


def _value(event: ScheduledEvent, name: str) -> Any:
    if name == "resources":
        return None if event.resources is None else frozenset(event.resources)
    if name == "not_before_raw":
        # A different spelling of the same time is not a change, so compare the text only if it cannot be parsed.
        return (event.not_before_raw or "").strip() if event.not_before is None else ""
    return getattr(event, name)


def _previous(was: ScheduledEvent, changed: Iterable[str] = ()) -> dict[str, Any]:
    plain = msgspec.to_builtins(was)
    return {name: plain[name] for name in dict.fromkeys(("event_status", "not_before", *changed))}


def _record(
    transition: Transition, evidence: Evidence, event: ScheduledEvent, step: Step, **fields: Any
) -> TransitionRecord:
    return new_record(
        transition,
        step.observed_at,
        evidence=evidence,
        event=event,
        incarnation=step.after.incarnation,
        previous_incarnation=None if step.before is None else step.before.incarnation,
        **fields,
    )


# Events that vanished.


def classify_ending(event: ScheduledEvent, step: Step, *, was_started: bool, came_back: bool) -> TransitionRecord:
    """Return the record of the ending of *event*, which vanished in *step*.

    *was_started* is true if the event ever had the status Started. *came_back* is true if the event was absent and then
    reappeared.
    """
    if was_started or event.event_status == _STARTED:
        is_sure = not (step.has_gap or came_back)
        transition, evidence = Transition.COMPLETED, Evidence.OBSERVED if is_sure else Evidence.INFERRED
    elif event.event_status == _SCHEDULED and _booted_for(event, step):
        transition, evidence = Transition.COMPLETED, Evidence.BOOT_ID
    elif event.event_status == _SCHEDULED and _cannot_have_started(event, step):
        transition, evidence = Transition.CANCELED, Evidence.INFERRED
    else:
        transition, evidence = Transition.ENDED, Evidence.UNKNOWN
    return _record(transition, evidence, event, step, previous=_previous(event))


def _booted_for(event: ScheduledEvent, step: Step) -> bool:
    if step.booted_at is None or event.event_type not in _BOOTING_TYPES or names_vm(event, step.vm_name) is not True:
        return False
    if event.key in step.approved:
        return True
    # NotBefore - tolerance would overflow for a NotBefore in the year 1.
    return event.not_before is not None and event.not_before - step.booted_at <= _BOOT_TOLERANCE


def _cannot_have_started(event: ScheduledEvent, step: Step) -> bool:
    return (
        step.booted_at is None
        and event.not_before is not None
        and step.observed_at < event.not_before
        and event.key not in step.approved
        and step.seconds_since_good < SERVICE_OFF_AFTER_SECONDS
        and _subject(event) not in step.subjects
        and step.shows_every_document
    )


def _subject(event: ScheduledEvent) -> Hashable:
    return event.event_type, event.event_source, frozenset(normal_name(name) for name in event.resources or ())


def incarnation_step(before: Document, after: Document) -> int | None:
    """Return the rise of the incarnation, or None if the two incarnations cannot be compared.

    IMDS sends an incarnation as an integer or as text. Text of up to 40 digits is converted to an integer. Incarnations
    of different api-versions cannot be compared.
    """
    was, now = _as_integer(before.incarnation), _as_integer(after.incarnation)
    return None if was is None or now is None or before.api_version != after.api_version else now - was


def _as_integer(incarnation: Incarnation) -> int | None:
    if isinstance(incarnation, str):
        return int(incarnation) if _INTEGER.fullmatch(incarnation) else None
    return incarnation
