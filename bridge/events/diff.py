"""The transition table: two documents in, the changes between them out, as a pure function.

A consumer acts on these changes, so they never claim more than is known. Azure's document shows only what is there: an
event that ended, and one that was canceled, both just disappear. Which of the two it was is inferred here where the
facts allow one reading, and is called ``ended`` with evidence ``unknown`` where they do not.

The first row that fits wins:

    before                after               transition             evidence
    --------------------  ------------------  ---------------------  --------------------------------
    other status, absent  Scheduled           scheduled              observed
    other status, absent  Started             started                observed
    other status, absent  Completed/Canceled  completed/canceled     observed
    other status, absent  any other status    updated                observed
    same status           another field       updated                observed
    Started               absent              completed              observed; inferred after a gap, after a fall of the
                                                                     incarnation, when its absence was doubted, and when
                                                                     it may be renamed, see below
    Scheduled             absent              completed              boot_id: a Reboot or Redeploy of this VM, which
                                                                     booted when the event could have started
    Scheduled             absent              canceled               inferred: it cannot have started, and it cannot be
                                                                     renamed
    any other             absent              ended                  unknown

Vanished events come first, then the document's order: who drains a VM and brings it back must not hear of the end of
one event after the start of the next.

A boot proves something only at or after NotBefore, but for a minute in which clocks may differ, or for an event that
this agent approved; a user's own reboot in the notice time is none of Azure's. It proves nothing about a Freeze, which
boots no VM, nor about Preempt and Terminate, after which there is none.

Some things look like an ending and are none. Events of one document may share a key: while one of them is left, the
event is there, and nothing ended. An event without an EventId is known by its type and Resources: when they change, it
looks as if one event vanished and another appeared, so such a pair proves neither that it was canceled nor, observed,
that it completed. And mock servers, Microsoft's own among them, draw a new EventId at each status: when an event of the
same type, source and Resources appears in the very document in which one vanishes, that one was not canceled.

No clock is read and nothing is stored: time comes in with `DiffContext`.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from bridge.events.event import (
    SERVICE_OFF_AFTER_SECONDS,
    Document,
    Incarnation,
    ScheduledEvent,
    format_not_before,
    names_vm,
    normal_name,
)
from bridge.events.record import Evidence, Transition

#: Longer than any counter; int() itself is quadratic in the digits.
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")

_SCHEDULED, _STARTED = "Scheduled", "Started"
#: After another event a boot explains nothing: a Freeze boots no VM, and after Preempt and Terminate there is none.
_BOOTING_TYPES = frozenset({"Reboot", "Redeploy"})
#: How much earlier than NotBefore a boot may look: this VM's clock is not Azure's.
_BOOT_TOLERANCE = timedelta(seconds=60)
_ENDING_STATUSES = {"Completed": Transition.COMPLETED, "Canceled": Transition.CANCELED}
_BY_STATUS = {_SCHEDULED: Transition.SCHEDULED, _STARTED: Transition.STARTED, **_ENDING_STATUSES}

#: The fields whose change makes a record, in the order of the wire. NotBefore counts by its time, see _value.
_COMPARED = (
    "event_type",
    "event_status",
    "resource_type",
    "resources",
    "not_before",
    "not_before_raw",
    "description",
    "event_source",
    "duration_seconds",
    "extra",
)


class DiffContext(msgspec.Struct, frozen=True, kw_only=True):
    """What is known besides the two documents."""

    now: datetime
    has_gap: bool = False
    """The agent did not watch all the time since the document before: it may have missed documents."""
    booted: bool = False
    """This VM has booted since the last good answer."""
    booted_at: datetime | None = None
    """When it did, at the latest; None: nothing is known but that it was before *now*."""
    shown_since_boot: Collection[str] = frozenset()
    """The keys of the events that an answer showed after that boot: it did not end them."""
    seconds_since_good: float = 0.0
    """The age of the last good answer before this one."""
    vm_name: str | None = None
    approved: frozenset[str] = frozenset()
    """The keys of the events that this agent approved: they may start before NotBefore."""
    doubted: Collection[str] = frozenset()
    """The keys of the events whose absence was not believed at first."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table that came true; a record without its place in a stream."""

    transition: Transition
    evidence: Evidence
    event: ScheduledEvent
    previous: dict[str, Any] | None = None
    changed: tuple[str, ...] = ()


def diff(before: Document | None, after: Document, ctx: DiffContext) -> list[Change]:
    """Return the changes from *before* (None: nothing was ever seen) to *after*.

    The vanished events come first, in the order of *before*, then the others in the order of *after*. Two documents
    with the same content, Resources taken as a set, give none.
    """
    old = before or Document()
    pairs, vanished = match_events(old.events, after.events)
    new = [now for was, now in pairs if was is None] if vanished else []
    step = _Step(
        incarnation=incarnation_step(old.incarnation, after.incarnation),
        are_integers=isinstance(old.incarnation, int) and isinstance(after.incarnation, int),
        has_new_event_without_id=any(event.event_id is None for event in new),
        new_subjects=frozenset(_subject(event) for event in new),
    )
    changes = [classify_ending(event, ctx, step) for event in vanished if not is_over(event)]
    changes.extend(change for was, now in pairs if (change := _classify_shown(was, now)) is not None)
    return changes


def is_over(event: ScheduledEvent) -> bool:
    """Return whether the document itself showed how *event* ended: its later absence makes no record."""
    return event.event_status in _ENDING_STATUSES


# Which event is which.


def match_events(
    before: Sequence[ScheduledEvent], after: Sequence[ScheduledEvent]
) -> tuple[list[tuple[ScheduledEvent | None, ScheduledEvent]], list[ScheduledEvent]]:
    """Return (old or None, new) for each event of *after*, and the events of *before* that vanished.

    An event is known by its key. Events of one document that share a key are paired by content, then by type, Resources
    and status, then by type and Resources, then by position; Resources count as a set. One of *before* that is left
    over while its key is still in *after* has not vanished: the event is there, so it is in neither answer.

    The time is linear in the number of events, also when all share one key.
    """
    old = {position: (event.key, event) for position, event in enumerate(before)}
    new = {position: (event.key, event) for position, event in enumerate(after)}
    keys_after = {key for key, _ in new.values()}
    partners: dict[int, ScheduledEvent] = {}
    for signature in (_content, _shape_and_status, _shape, _position_only):
        for was, now in _same_signature(old, new, signature):
            partners[now] = old.pop(was)[1]
            del new[now]
    pairs = [(partners.get(position), event) for position, event in enumerate(after)]
    return pairs, [event for key, event in old.values() if key not in keys_after]


_Keyed = dict[int, tuple[str, ScheduledEvent]]
"""From the position of an event in its document to its key and itself."""


def _same_signature(old: _Keyed, new: _Keyed, signature: Callable[[ScheduledEvent], Hashable]) -> list[tuple[int, int]]:
    """Return the positions of those that have both key and *signature* in common, the first with the first."""
    waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for position, (key, event) in old.items():
        waiting[key, signature(event)].append(position)
    found = []
    for position, (key, event) in new.items() if waiting else ():
        if candidates := waiting.get((key, signature(event))):
            found.append((candidates.popleft(), position))
    return found


def _content(event: ScheduledEvent) -> Hashable:
    """Return what is equal for two events exactly when `changed_fields` finds nothing."""
    return tuple(_hashable(_value(event, name)) for name in _COMPARED)


def _shape_and_status(event: ScheduledEvent) -> Hashable:
    return _shape(event), event.event_status


def _shape(event: ScheduledEvent) -> Hashable:
    return event.event_type, frozenset(event.resources or ())


def _position_only(_event: ScheduledEvent) -> Hashable:
    return None


def _hashable(value: Any) -> Hashable:
    """Return the JSON *value* as one that can be hashed, equal where the values were."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(field)) for name, field in value.items())
    if isinstance(value, list):
        return tuple(_hashable(item) for item in value)
    return value  # type: ignore[no-any-return]


# An event that the document shows.


def changed_fields(was: ScheduledEvent, now: ScheduledEvent) -> tuple[str, ...]:
    """Return the names of the fields whose meaning differs."""
    return tuple(name for name in _COMPARED if _value(was, name) != _value(now, name))


def _value(event: ScheduledEvent, name: str) -> Any:
    if name == "resources":
        return None if event.resources is None else frozenset(event.resources)
    if name == "not_before_raw":
        # The text counts only where it could not be read: another spelling of the same time is no change.
        return (event.not_before_raw or "").strip() if event.not_before is None else ""
    return getattr(event, name)


def _classify_shown(was: ScheduledEvent | None, now: ScheduledEvent) -> Change | None:
    changed = () if was is None else changed_fields(was, now)
    if was is not None and not changed:
        return None
    if was is None or was.event_status != now.event_status:
        transition = _BY_STATUS.get(now.event_status, Transition.UPDATED)
    else:
        transition = Transition.UPDATED
    previous = None if was is None else _previous(was, changed)
    return Change(transition=transition, evidence=Evidence.OBSERVED, event=now, previous=previous, changed=changed)


def _previous(was: ScheduledEvent, changed: Iterable[str] = ()) -> dict[str, Any]:
    plain = msgspec.to_builtins(was)
    plain["not_before"] = format_not_before(was.not_before)
    return {name: plain[name] for name in dict.fromkeys(("event_status", "not_before", *changed))}


# An event that vanished.


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the step from one document to the next, as a whole, means for an event that vanished in it."""

    incarnation: int | None
    """How far the incarnation moved; None when the two cannot be compared."""
    are_integers: bool
    """Both incarnations came as integers, as Azure documents them."""
    has_new_event_without_id: bool
    new_subjects: frozenset[Hashable]
    """What the new events are about, see `_subject`."""


def classify_ending(event: ScheduledEvent, ctx: DiffContext, step: _Step) -> Change:
    """Return how *event*, which vanished, ended."""
    if event.event_status == _STARTED:
        fell = step.incarnation is not None and step.incarnation < 0
        is_sure = not (ctx.has_gap or fell or event.key in ctx.doubted or _may_be_renamed(event, step))
        transition, evidence = Transition.COMPLETED, Evidence.OBSERVED if is_sure else Evidence.INFERRED
    elif event.event_status == _SCHEDULED and _booted_for(event, ctx):
        transition, evidence = Transition.COMPLETED, Evidence.BOOT_ID
    elif event.event_status == _SCHEDULED and _cannot_have_started(event, ctx, step):
        transition, evidence = Transition.CANCELED, Evidence.INFERRED
    else:
        transition, evidence = Transition.ENDED, Evidence.UNKNOWN
    return Change(transition=transition, evidence=evidence, event=event, previous=_previous(event))


def _may_be_renamed(event: ScheduledEvent, step: _Step) -> bool:
    """Return whether *event* may be one of the new ones, with another type or other Resources."""
    return event.event_id is None and step.has_new_event_without_id


def _subject(event: ScheduledEvent) -> Hashable:
    """Return what *event* is about: equal for the events that a mock server makes of one, a new EventId each."""
    return event.event_type, event.event_source, frozenset(normal_name(name) for name in event.resources or ())


def _booted_for(event: ScheduledEvent, ctx: DiffContext) -> bool:
    """Return whether this VM booted, as *event* says, once that could have started."""
    if not ctx.booted or event.key in ctx.shown_since_boot:
        return False
    if event.event_type not in _BOOTING_TYPES or names_vm(event, ctx.vm_name) is not True:
        return False
    if event.key in ctx.approved:
        return True
    booted_at = ctx.now if ctx.booted_at is None else ctx.booted_at
    # Not NotBefore - tolerance: that of the year 1 has nothing before it.
    return event.not_before is not None and event.not_before - booted_at <= _BOOT_TOLERANCE


def _cannot_have_started(event: ScheduledEvent, ctx: DiffContext, step: _Step) -> bool:
    return (
        not ctx.booted
        and event.key not in ctx.doubted
        and not _may_be_renamed(event, step)
        and _subject(event) not in step.new_subjects
        and event.not_before is not None
        and ctx.now < event.not_before
        and event.key not in ctx.approved
        and ctx.seconds_since_good < SERVICE_OFF_AFTER_SECONDS
        and _no_document_missed(ctx, step)
    )


def _no_document_missed(ctx: DiffContext, step: _Step) -> bool:
    """Return whether there was no document between the two, in which the event may have started."""
    if step.incarnation is not None and step.incarnation != 1:
        return False
    return step.are_integers or not ctx.has_gap


def incarnation_step(before: Incarnation, after: Incarnation) -> int | None:
    """Return how far the incarnation moved; None when the two cannot be compared.

    Recorded documents have it as an int and as text; only two integers compare, also when one came as text: at most 40
    digits, with or without a sign.
    """
    was, now = _as_integer(before), _as_integer(after)
    return None if was is None or now is None else now - was


def _as_integer(incarnation: Incarnation) -> int | None:
    if isinstance(incarnation, str):
        return int(incarnation) if _INTEGER.fullmatch(incarnation) else None
    return incarnation
