"""Combines the records of all VMs into events (PROTOCOL.md, section 1).

Records can arrive late, more than once, and at different portal processes, so the state of an event does not depend on
the order in which they arrive. For each VM, the portal keeps the newest record, the newest list of active events, and
the newest record of each event.

Records are sorted by `stream_id`, which begins with its creation time, and then by `sequence`.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import msgspec

from bridge.approval.digest import digest
from bridge.clock import format_time, parse_time
from bridge.events.event import ScheduledEvent, VmIdentity, compact_json, normal_name
from bridge.events.record import Evidence, Transition, TransitionRecord

#: PROTOCOL.md, section 5: the longest EventId that a decision can name.
_LONGEST_EVENT_ID = 256
_KEY_CHARACTERS = 32
#: RFC 9562, section 5.7: the first 48 bits of a UUIDv7 are its time in milliseconds.
_TIME_SHIFT, _VERSION_7 = 80, 7

_EVIDENCE_RANK = {Evidence.UNKNOWN: 0, Evidence.INFERRED: 1, Evidence.BOOT_ID: 2, Evidence.OBSERVED: 3}


class State(str, Enum):
    """The state of an event, as reported by VMs."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    OTHER = "other"
    """An open event with a status that this version does not support."""
    COMPLETED = "completed"
    CANCELED = "canceled"
    ENDED = "ended"
    """The event ended in an unknown way."""

    @property
    def is_open(self) -> bool:
        """Return whether the event is open."""
        return self in _OPEN_RANK


#: Started takes precedence over Scheduled, because another VM might not have polled since the start.
_OPEN_RANK = {State.OTHER: 0, State.SCHEDULED: 1, State.STARTED: 2}
_OF_STATUS = {"Scheduled": State.SCHEDULED, "Started": State.STARTED}
_OF_ENDING = {
    Transition.COMPLETED: State.COMPLETED,
    Transition.CANCELED: State.CANCELED,
    Transition.ENDED: State.ENDED,
}

#: The sort key for the records of one VM: the time and ID of the stream, the sequence, and the ID of the record.
Position = tuple[int, str, int, str]
_FIRST: Position = (-1, "", -1, "")


class VmState(msgspec.Struct, frozen=True, kw_only=True):
    """The newest state of a VM and its active events."""

    vm_key: str
    position: Position
    observed_at: str
    vm: VmIdentity
    labels: dict[str, str]
    listed_at: Position | None = None
    """Position of the newest record with a list, or None if no record had a list."""
    active_event_ids: tuple[str, ...] = ()

    def has_ended(self, view: View) -> bool:
        """Return whether a record after *view* lists active events without its event."""
        is_newer = self.listed_at is not None and self.listed_at > view.position
        return is_newer and view.event.event_id not in self.active_event_ids


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The newest record of one event from one VM."""

    event_key: str
    vm_key: str
    position: Position
    record_id: str
    transition: Transition
    evidence: Evidence
    observed_at: str
    first_observed_at: str
    """The earliest `observed_at` of the VM's records of the event."""
    event: ScheduledEvent
    affects_this_vm: bool | None
    vm: VmIdentity
    labels: dict[str, str]

    @property
    def state(self) -> State:
        """Return the state of the event by this record."""
        return _OF_ENDING.get(self.transition) or _OF_STATUS.get(self.event.event_status, State.OTHER)


class VmOfEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The newest report of an event from one VM."""

    vm_key: str
    vm: VmIdentity
    labels: dict[str, str]
    state: State
    evidence: Evidence
    observed_at: str
    record_id: str
    digest: str
    """Digest of the event as this VM reports it. A decision for this VM must carry this digest."""
    affects_this_vm: bool | None
    agrees: bool
    """False if this report differs from the event that the portal shows."""


class EventState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an event by all of its records."""

    key: str
    """32 hexadecimal digits, computed from the EventId."""
    state: State
    is_open: bool
    evidence: Evidence
    event: ScheduledEvent
    digest: str
    record_id: str
    """The record with the current version of the event, which a decision refers to."""
    first_observed_at: str
    observed_at: str
    undecidable_because: str | None
    vms: tuple[VmOfEvent, ...]
    unheard: tuple[str, ...]
    """The names in Resources whose VMs have sent no record of the event."""
    groups: tuple[str, ...]
    """The groups of all of its VMs, for filters: ``resource_group:west``, ``labels.team:payments``."""


def vm_key(record: TransitionRecord) -> str:
    """Return the key of the VM: the vmId in lower case, or the stream if the vmId is unknown."""
    vm_id = record.vm.vm_id
    return vm_id.lower() if vm_id else f"stream:{record.stream_id.lower()}"


def event_key(event: ScheduledEvent, vm: VmIdentity) -> str:
    """Return the key of *event*.

    The key comes from the EventId, or else from the type, the VMs, and the resource group.
    """
    name: list[object] = [event.event_id]
    if event.event_id is None:
        group = [(vm.subscription_id or "").casefold(), (vm.resource_group or "").casefold()]
        name = [None, event.event_type, sorted({normal_name(each) for each in event.resources or ()}), *group]
    return hashlib.sha256(compact_json(name).encode()).hexdigest()[:_KEY_CHARACTERS]


def key_of_event_id(event_id: str) -> str:
    """Return the key of the event with that EventId."""
    return event_key(ScheduledEvent(event_id=event_id, event_status=""), VmIdentity())


def undecidable_because(event: ScheduledEvent, state: State) -> str | None:
    """Return the reason why no one can decide on *event* (PROTOCOL.md, section 1), or None."""
    if not state.is_open:
        return "the event is over"
    if state is not State.SCHEDULED:
        return "the event has started" if state is State.STARTED else f"the event's status is {event.event_status}"
    if event.is_advisory:
        return "acknowledging a recommendation has no effect"
    if event.event_id is None:
        return "the event has no EventId"
    if not 1 <= len(event.event_id) <= _LONGEST_EVENT_ID or not event.event_id.isprintable():
        return "the EventId is longer than 256 characters or not printable"
    return None


def undecidable(event: EventState) -> str:
    """Return the refusal of a verdict on an event that no one can decide on."""
    return f"No one can decide on this event: {event.undecidable_because}."


class Fleet:
    """A set of VMs and their views of events."""

    def __init__(self) -> None:
        self.vms: dict[str, VmState] = {}
        self.views: dict[tuple[str, str], View] = {}
        self.streams: dict[tuple[str, str], str] = {}
        """The first arrival of each stream, by VM and stream."""

    def add(self, record: TransitionRecord, *, received_at: str) -> None:
        """Add *record*, even if it is late or a duplicate."""
        if record.transition is Transition.TEST:
            return
        key = vm_key(record)
        first_received_at = self.streams.setdefault((key, record.stream_id), received_at)
        milliseconds = _stream_milliseconds(record.stream_id, first_received_at)
        position = (milliseconds, record.stream_id.lower(), record.sequence, record.id)
        self._add_vm(_vm_state_of(record, key, position))
        if record.event is not None and record.transition.is_by_azure:
            self._add_view(_view_of(record, record.event, key, position))

    def events(self) -> dict[str, EventState]:
        """Return every event by its key."""
        views: dict[str, list[View]] = {}
        for view in self.views.values():
            views.setdefault(view.event_key, []).append(view)
        return {key: state_of(each, self.vms) for key, each in views.items()}

    def ended_by_list(self) -> set[tuple[str, str]]:
        """Return the event and VM of each view whose event is missing from the newer list.

        The VM's newest list of active events counts.
        """
        return {key for key, view in self.views.items() if self.vms[view.vm_key].has_ended(view)}

    def _add_vm(self, vm: VmState) -> None:
        known = self.vms.get(vm.vm_key, vm)
        newest = max(known, vm, key=lambda each: each.position)
        listed = max(known, vm, key=lambda each: each.listed_at or _FIRST)
        self.vms[vm.vm_key] = msgspec.structs.replace(
            newest, listed_at=listed.listed_at, active_event_ids=listed.active_event_ids
        )

    def _add_view(self, view: View) -> None:
        known = self.views.get((view.event_key, view.vm_key), view)
        first = min(view.first_observed_at, known.first_observed_at)
        newest = max(known, view, key=lambda each: each.position)
        self.views[view.event_key, view.vm_key] = msgspec.structs.replace(newest, first_observed_at=first)


def state_of(views: Sequence[View], vms: Mapping[str, VmState]) -> EventState:
    """Return the state of an event.

    *views* contains the view of each VM that has reported the event.

    The event is over if all of its VMs have reported that it has ended, or if a VM observed that it ended after the
    latest report that it was open. Otherwise, the event is open and has the most advanced state reported by any VM.
    """
    reports = [_report_of(view, vms.get(view.vm_key)) for view in views]
    reports.sort(key=lambda report: (normal_name(report.vm.name or ""), report.vm_key))
    still_open = [report for report in reports if report.state.is_open]
    seen_to_end = [each for each in reports if not each.state.is_open and each.evidence is Evidence.OBSERVED]
    if not still_open:
        chosen = max(reports, key=lambda report: (_EVIDENCE_RANK[report.evidence], *_order(report)))
    elif seen_to_end and max(map(_order, seen_to_end)) > max(map(_order, still_open)):
        chosen = max(seen_to_end, key=_order)
    else:
        chosen = max(still_open, key=lambda report: (_OPEN_RANK[report.state], *_order(report)))
    event = next(view.event for view in views if view.vm_key == chosen.vm_key)
    return EventState(
        key=views[0].event_key,
        state=chosen.state,
        is_open=chosen.state.is_open,
        evidence=chosen.evidence,
        event=event,
        digest=chosen.digest,
        record_id=chosen.record_id,
        first_observed_at=min(view.first_observed_at for view in views),
        observed_at=chosen.observed_at,
        undecidable_because=undecidable_because(event, chosen.state),
        vms=tuple(msgspec.structs.replace(each, agrees=_agree(each, chosen)) for each in reports),
        unheard=_unheard(event, reports),
        groups=tuple(sorted({group for report in reports for group in groups_of(report)})),
    )


def _report_of(view: View, vm: VmState | None) -> VmOfEvent:
    """Return the report of one VM.

    The state is ENDED if the VM's newest list does not contain the event.
    """
    state, evidence = view.state, view.evidence
    if state.is_open and vm is not None and vm.has_ended(view):
        state, evidence = State.ENDED, Evidence.UNKNOWN
    return VmOfEvent(
        vm_key=view.vm_key,
        vm=view.vm,
        labels=view.labels,
        state=state,
        evidence=evidence,
        observed_at=view.observed_at,
        record_id=view.record_id,
        digest=digest(view.event),
        affects_this_vm=view.affects_this_vm,
        agrees=True,
    )


def _order(report: VmOfEvent) -> tuple[str, str]:
    return report.observed_at, report.record_id


def _agree(report: VmOfEvent, chosen: VmOfEvent) -> bool:
    return report.state is chosen.state and (not chosen.state.is_open or report.digest == chosen.digest)


def _unheard(event: ScheduledEvent, reports: Iterable[VmOfEvent]) -> tuple[str, ...]:
    heard = {normal_name(report.vm.name) for report in reports if report.vm.name}
    names = dict.fromkeys(event.resources or ())
    return tuple(name for name in names if normal_name(name) not in heard)


def groups_of(vm: VmState | VmOfEvent) -> tuple[str, ...]:
    """Return the groups of *vm* that a scope or a filter can name."""
    group = [f"resource_group:{vm.vm.resource_group.casefold()}"] if vm.vm.resource_group else []
    return (*group, *(f"labels.{name}:{value}" for name, value in sorted(vm.labels.items())))


def _stream_milliseconds(stream_id: str, first_received_at: str) -> int:
    """Return the time of a stream: of its UUIDv7, or of its first arrival if earlier.

    If the VM's clock was ahead, the time in the UUIDv7 is in the future. Without the arrival time as an upper limit, an
    old stream could then take precedence over newer streams.
    """
    received = int(parse_time(first_received_at).timestamp() * 1000)
    try:
        stream = uuid.UUID(stream_id)
    except ValueError:
        return received
    return min(stream.int >> _TIME_SHIFT, received) if stream.version == _VERSION_7 else received


def _vm_state_of(record: TransitionRecord, key: str, position: Position) -> VmState:
    has_list = record.active_event_ids is not None
    return VmState(
        vm_key=key,
        position=position,
        observed_at=format_time(parse_time(record.observed_at)),
        vm=record.vm,
        labels=record.labels,
        listed_at=position if has_list else None,
        active_event_ids=tuple(sorted(set(record.active_event_ids or ()))),
    )


def _view_of(record: TransitionRecord, event: ScheduledEvent, key: str, position: Position) -> View:
    observed_at = format_time(parse_time(record.observed_at))
    return View(
        event_key=event_key(event, record.vm),
        vm_key=key,
        position=position,
        record_id=record.id,
        transition=record.transition,
        evidence=record.evidence,
        observed_at=observed_at,
        first_observed_at=observed_at,
        event=event,
        affects_this_vm=record.affects_this_vm,
        vm=record.vm,
        labels=record.labels,
    )
