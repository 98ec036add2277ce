"""Two documents in, the changes between them out: the transition table, as a pure function.

A consumer acts on what this module says, so it never says more than it knows. Azure's document shows only what is
there: an event that ended, and one that was canceled, both just disappear. Which of the two it was is inferred here
where the facts allow one reading, and is called ``ended`` with evidence ``unknown`` where they do not.

The first row that fits wins:

    before                after               transition             evidence
    --------------------  ------------------  ---------------------  --------------------------------
    other status, absent  Scheduled           scheduled              observed
    other status, absent  Started             started                observed
    other status, absent  Completed/Canceled  completed/canceled     observed
    other status, absent  any other status    updated                observed
    same status           another field       updated                observed
    Started               absent              completed              observed; inferred after a gap or a fall
    Scheduled             absent              completed              boot_id: this VM booted, and it is not a Freeze
    Scheduled             absent              canceled               inferred: too early for it to have happened
    any other             absent              ended                  unknown

No clock is read and nothing is stored: time comes in with `Circumstances`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from bridge.record import (
    Document,
    Evidence,
    Incarnation,
    ScheduledEvent,
    Transition,
    format_not_before,
    names_vm,
)

#: Scheduled Events is turned off for a VM that has not asked for so long (Microsoft: Scheduled Events for Linux VMs).
SERVICE_OFF_AFTER_SECONDS = 24 * 3600.0

_MOST_DIGITS = 18

_SCHEDULED, _STARTED = "Scheduled", "Started"
_SPOKEN_ENDINGS = {"Completed": Transition.COMPLETED, "Canceled": Transition.CANCELED}
_BY_STATUS = {_SCHEDULED: Transition.SCHEDULED, _STARTED: Transition.STARTED, **_SPOKEN_ENDINGS}

#: The fields whose change makes a record, in the order of the wire. NotBefore counts by what it says, see _value.
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


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What is known besides the two documents."""

    now: datetime
    gap: bool = False
    """The agent did not watch all the time since the document before: it may have missed documents."""
    booted: bool = False
    """This VM has booted since the last good answer."""
    seconds_since_good: float = 0.0
    """The age of the last good answer before this one."""
    vm_name: str | None = None
    approved: frozenset[str] = frozenset()
    """The keys of the events that this agent approved: they may start before NotBefore."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table that came true; a record without its place in a stream."""

    transition: Transition
    evidence: Evidence
    event: ScheduledEvent
    previous: dict[str, Any] | None = None
    changed: tuple[str, ...] = ()


def diff(before: Document | None, after: Document, circumstances: Circumstances) -> list[Change]:
    """Return the changes from *before* (null: nothing was ever seen) to *after*.

    They come in the order of *after*, then the vanished events in the order of *before*. Two documents with the same
    content, Resources taken as a set, give none.
    """
    old = before or Document()
    pairs, vanished = pair(old.events, after.events)
    changes = [change for was, now in pairs if (change := _present(was, now)) is not None]
    ending = _Ending(circumstances, old.incarnation, after.incarnation)
    changes.extend(ending.of(event) for event in vanished if not is_over(event))
    return changes


def same_content(one: Document, other: Document) -> bool:
    """Return whether both documents tell the same events, whatever their incarnation and order."""
    pairs, vanished = pair(one.events, other.events)
    return not vanished and all(was is not None and not changed_fields(was, now) for was, now in pairs)


def is_over(event: ScheduledEvent) -> bool:
    """Return whether the document itself said how *event* ended: its later absence is no news."""
    return event.event_status in _SPOKEN_ENDINGS


def pair(
    before: Sequence[ScheduledEvent], after: Sequence[ScheduledEvent]
) -> tuple[list[tuple[ScheduledEvent | None, ScheduledEvent]], list[ScheduledEvent]]:
    """Return (old or null, new) for each event of *after*, and the events of *before* that are gone.

    An event is known by its key. Events of one document that share a key are paired by type and sorted Resources,
    then by position.
    """
    waiting: defaultdict[str, list[ScheduledEvent]] = defaultdict(list)
    for event in before:
        waiting[event.key].append(event)
    partners: dict[int, ScheduledEvent] = {}
    for test in (_same_shape, _any_shape):
        for position, event in enumerate(after):
            if position not in partners and (partner := _take(waiting[event.key], event, test)):
                partners[position] = partner
    left = {id(event) for events in waiting.values() for event in events}
    pairs = [(partners.get(position), event) for position, event in enumerate(after)]
    return pairs, [event for event in before if id(event) in left]


def _take(candidates: list[ScheduledEvent], event: ScheduledEvent, test: Any) -> ScheduledEvent | None:
    for position, candidate in enumerate(candidates):
        if test(candidate, event):
            return candidates.pop(position)
    return None


def _same_shape(one: ScheduledEvent, other: ScheduledEvent) -> bool:
    return one.event_type == other.event_type and set(one.resources or ()) == set(other.resources or ())


def _any_shape(_one: ScheduledEvent, _other: ScheduledEvent) -> bool:
    return True


def changed_fields(was: ScheduledEvent, now: ScheduledEvent) -> tuple[str, ...]:
    """Return the names of the fields that say something else now."""
    return tuple(name for name in _COMPARED if _value(was, name) != _value(now, name))


def _value(event: ScheduledEvent, name: str) -> Any:
    if name == "resources":
        return None if event.resources is None else frozenset(event.resources)
    if name == "not_before_raw":
        # The text counts only where it could not be read: another spelling of the same time is no change.
        return (event.not_before_raw or "").strip() if event.not_before is None else ""
    return getattr(event, name)


def _present(was: ScheduledEvent | None, now: ScheduledEvent) -> Change | None:
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


class _Ending:
    """How events that vanished in one step ended."""

    def __init__(self, circumstances: Circumstances, before: Incarnation, after: Incarnation) -> None:
        self._is = circumstances
        self._step = incarnation_step(before, after)
        self._are_integers = isinstance(before, int) and isinstance(after, int)

    def of(self, event: ScheduledEvent) -> Change:
        if event.event_status == _STARTED:
            fell = self._step is not None and self._step < 0
            sure = not self._is.gap and not fell
            transition, evidence = (Transition.COMPLETED, Evidence.OBSERVED if sure else Evidence.INFERRED)
        elif event.event_status == _SCHEDULED and self._booted_for(event):
            transition, evidence = (Transition.COMPLETED, Evidence.BOOT_ID)
        elif event.event_status == _SCHEDULED and self._cannot_have_happened(event):
            transition, evidence = (Transition.CANCELED, Evidence.INFERRED)
        else:
            transition, evidence = (Transition.ENDED, Evidence.UNKNOWN)
        return Change(transition=transition, evidence=evidence, event=event, previous=_previous(event))

    def _booted_for(self, event: ScheduledEvent) -> bool:
        # A freeze never boots a VM, so a boot explains nothing about it.
        return self._is.booted and event.event_type != "Freeze" and names_vm(event, self._is.vm_name) is True

    def _cannot_have_happened(self, event: ScheduledEvent) -> bool:
        return (
            not self._is.booted
            and event.not_before is not None
            and self._is.now < event.not_before
            and event.key not in self._is.approved
            and self._is.seconds_since_good < SERVICE_OFF_AFTER_SECONDS
            and self._nothing_between()
        )

    def _nothing_between(self) -> bool:
        """Return whether no document was missed, in which the event may have started."""
        if self._step is not None and self._step != 1:
            return False
        return self._are_integers or not self._is.gap


def incarnation_step(before: Incarnation, after: Incarnation) -> int | None:
    """Return how far the incarnation moved; null when the two cannot be compared.

    Recorded documents have it as an int and as text; only two integers compare, also when one came as digits.
    """
    was, now = _as_integer(before), _as_integer(after)
    return None if was is None or now is None else now - was


def _as_integer(incarnation: Incarnation) -> int | None:
    if isinstance(incarnation, str):
        is_number = incarnation.isascii() and incarnation.isdecimal() and len(incarnation) <= _MOST_DIGITS
        return int(incarnation) if is_number else None
    return incarnation
