"""The fold of records into events and the VMs' views of them: pure, and the same whatever the order of the records.

Records come late, twice, from many VMs, and to several processes of the portal. So what is kept is a lattice: of each
stream its last record, and of each stream and event its last record of that event, by sequence. Keeping the greater
of two is commutative, associative and idempotent. What an event *is* follows from what is kept, by `state_of`, which
has no memory and no clock.

PROTOCOL.md, sections 1 and 1.1, says which records count: of a VM's several streams the newer is the one whose last
record has the later `observed_at`, and an event that a VM told of only in an older stream is over for it.
"""

from __future__ import annotations

import hashlib
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

_OF_AN_EVENT = frozenset(
    {
        Transition.SCHEDULED,
        Transition.UPDATED,
        Transition.STARTED,
        Transition.COMPLETED,
        Transition.CANCELED,
        Transition.ENDED,
    }
)
_EVIDENCE_RANK = {Evidence.UNKNOWN: 0, Evidence.INFERRED: 1, Evidence.BOOT_ID: 2, Evidence.OBSERVED: 3}


class State(str, Enum):
    """What an event is, for a VM or for all of them."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    OTHER = "other"
    """A status that this version does not know; the event is there."""
    COMPLETED = "completed"
    CANCELED = "canceled"
    ENDED = "ended"
    """It is over, and nobody knows how."""

    @property
    def is_open(self) -> bool:
        """Return whether the event is there."""
        return self in _OPEN_RANK


#: Started beats Scheduled: a VM that has not looked since knows less.
_OPEN_RANK = {State.OTHER: 0, State.SCHEDULED: 1, State.STARTED: 2}
_OF_STATUS = {"Scheduled": State.SCHEDULED, "Started": State.STARTED}
_OF_ENDING = {
    Transition.COMPLETED: State.COMPLETED,
    Transition.CANCELED: State.CANCELED,
    Transition.ENDED: State.ENDED,
}


class StreamEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The last record of one stream of one VM, as far as it says who the VM is."""

    vm_key: str
    stream_id: str
    sequence: int
    record_id: str
    observed_at: str
    vm: VmIdentity
    labels: dict[str, str]

    @property
    def order(self) -> tuple[int, str]:
        """Return what is greater for a later record of the same stream."""
        return self.sequence, self.record_id

    @property
    def age_order(self) -> tuple[str, str]:
        """Return what is greater for the newer of two streams of a VM."""
        return self.observed_at, self.stream_id


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The last record of one event in one stream of one VM."""

    event_key: str
    vm_key: str
    stream_id: str
    sequence: int
    record_id: str
    transition: Transition
    evidence: Evidence
    observed_at: str
    first_observed_at: str
    """When this stream first told of the event, by the records that came."""
    event: ScheduledEvent
    affects_this_vm: bool | None
    vm: VmIdentity
    labels: dict[str, str]

    @property
    def order(self) -> tuple[int, str]:
        """Return what is greater for a later record of the same stream."""
        return self.sequence, self.record_id

    @property
    def state(self) -> State:
        """Return what the event is by this record."""
        return _OF_ENDING.get(self.transition) or _OF_STATUS.get(self.event.event_status, State.OTHER)


class VmOfEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What one VM last said of an event."""

    vm_key: str
    vm: VmIdentity
    labels: dict[str, str]
    state: State
    evidence: Evidence
    observed_at: str
    record_id: str
    digest: str
    """Of the event as this VM has it: what a decision for this VM must carry."""
    affects_this_vm: bool | None
    agrees: bool
    """False: it says something else than the portal shows of the event."""


class EventState(msgspec.Struct, frozen=True, kw_only=True):
    """What an event is, by all records of it that came."""

    key: str
    """32 hexadecimal digits, from the EventId."""
    state: State
    is_open: bool
    evidence: Evidence
    event: ScheduledEvent
    """As the record `record_id` has it."""
    digest: str
    record_id: str
    """The record that counts: a decision speaks of the event as it stands there."""
    first_observed_at: str
    observed_at: str
    undecidable_because: str | None
    """Why nobody can decide on it from outside; None: somebody can."""
    vms: tuple[VmOfEvent, ...]
    unheard: tuple[str, ...]
    """The names in Resources from whose VMs no record of the event came."""
    groups: tuple[str, ...]
    """What it can be filtered by: ``resource_group:west``, ``labels.team:payments``, of all its VMs."""


def vm_key(record: TransitionRecord) -> str:
    """Return what names the VM of *record*: the vmId in lower case; without one, the stream, which is one VM's."""
    vm_id = record.vm.vm_id
    return vm_id.lower() if vm_id else f"stream:{record.stream_id.lower()}"


def event_key(event: ScheduledEvent, vm: VmIdentity) -> str:
    """Return the key of *event* for addresses: of its EventId; without one, of its type, its VMs and their group."""
    name: list[object] = [event.event_id]
    if event.event_id is None:
        group = [(vm.subscription_id or "").casefold(), (vm.resource_group or "").casefold()]
        name = [None, event.event_type, sorted({normal_name(each) for each in event.resources or ()}), *group]
    return hashlib.sha256(compact_json(name).encode()).hexdigest()[:_KEY_CHARACTERS]


def key_of_event_id(event_id: str) -> str:
    """Return the key of the event with that EventId."""
    return event_key(ScheduledEvent(event_id=event_id, event_status=""), VmIdentity())


def undecidable_because(event: ScheduledEvent, state: State) -> str | None:
    """Return why no decision from outside can be about *event* (PROTOCOL.md, section 1); None when one can."""
    if not state.is_open:
        return "it is over"
    if state is not State.SCHEDULED:
        return "it has started" if state is State.STARTED else f"its status is {event.event_status}"
    if event.event_id is None:
        return "it has no EventId"
    if not 1 <= len(event.event_id) <= _LONGEST_EVENT_ID or not event.event_id.isprintable():
        return "its EventId is longer than 256 characters, or cannot be printed"
    return None


class Fleet:
    """The lattice of some records: of each stream its end, of each stream and event its view."""

    def __init__(self, ends: Iterable[StreamEnd] = (), views: Iterable[View] = ()) -> None:
        self.ends = {(end.vm_key, end.stream_id): end for end in ends}
        self.views = {(view.event_key, view.vm_key, view.stream_id): view for view in views}

    def add(self, record: TransitionRecord) -> None:
        """Take *record* in; it may have come before, and later ones too. One of transition `test` says nothing."""
        if record.transition is Transition.TEST:
            return
        end = _end_of(record)
        self._keep_end(end)
        if record.event is not None and record.transition in _OF_AN_EVENT:
            self._keep_view(_view_of(record, record.event, end))

    def merge(self, other: Fleet) -> None:
        """Take in what *other* has."""
        for end in other.ends.values():
            self._keep_end(end)
        for view in other.views.values():
            self._keep_view(view)

    def newest_streams(self) -> dict[str, str]:
        """Return the newest stream of each VM."""
        newest: dict[str, StreamEnd] = {}
        for end in self.ends.values():
            best = newest.get(end.vm_key)
            if best is None or end.age_order > best.age_order:
                newest[end.vm_key] = end
        return {key: end.stream_id for key, end in newest.items()}

    def events(self) -> dict[str, EventState]:
        """Return every event by its key."""
        newest = self.newest_streams()
        views: dict[str, list[View]] = {}
        for view in self.views.values():
            views.setdefault(view.event_key, []).append(view)
        return {key: state_of(each, newest) for key, each in views.items()}

    def vms(self) -> dict[str, StreamEnd]:
        """Return the last word of each VM's newest stream."""
        return {key: self.ends[key, stream] for key, stream in self.newest_streams().items()}

    def _keep_end(self, end: StreamEnd) -> None:
        key = (end.vm_key, end.stream_id)
        known = self.ends.get(key)
        if known is None or end.order > known.order:
            self.ends[key] = end

    def _keep_view(self, view: View) -> None:
        key = (view.event_key, view.vm_key, view.stream_id)
        known = self.views.get(key)
        if known is not None:
            first = min(view.first_observed_at, known.first_observed_at)
            later = max(view, known, key=lambda each: each.order)
            view = later if later.first_observed_at == first else _with_first(later, first)
        self.views[key] = view


def state_of(views: Sequence[View], newest_streams: Mapping[str, str]) -> EventState:
    """Return what the event of *views*, at least one and all of one event, is.

    While a VM has the event it is open, and the latest word of the furthest state counts. It is over when every VM
    that heard of it says so; or when one has seen it end, later than the last word of each that still has it.
    """
    reports = _reports_of_vms(views, newest_streams)
    still_open = [report for report in reports if report.state.is_open]
    seen_to_end = [report for report in reports if report.is_proof_of_end]
    if not still_open:
        chosen = max(reports, key=lambda report: (_EVIDENCE_RANK[report.evidence], *report.order))
    elif seen_to_end and max(report.order for report in seen_to_end) > max(report.order for report in still_open):
        chosen = max(seen_to_end, key=lambda report: report.order)
    else:
        chosen = max(still_open, key=lambda report: (_OPEN_RANK[report.state], *report.order))
    event = chosen.view.event
    return EventState(
        key=chosen.view.event_key,
        state=chosen.state,
        is_open=chosen.state.is_open,
        evidence=chosen.evidence,
        event=event,
        digest=chosen.digest,
        record_id=chosen.view.record_id,
        first_observed_at=min(view.first_observed_at for view in views),
        observed_at=chosen.view.observed_at,
        undecidable_because=undecidable_because(event, chosen.state),
        vms=tuple(report.compared_with(chosen) for report in reports),
        unheard=_unheard(event, reports),
        groups=_groups(reports),
    )


class _VmReport:
    """What one VM last said of the event; an older stream's event is over for it, and nobody knows how."""

    def __init__(self, view: View, *, is_left_behind: bool) -> None:
        self.view = view
        self.state, self.evidence = view.state, view.evidence
        if is_left_behind and self.state.is_open:
            self.state, self.evidence = State.ENDED, Evidence.UNKNOWN
        self.digest = digest(view.event)
        self.order = (view.observed_at, view.record_id)

    @property
    def is_proof_of_end(self) -> bool:
        return not self.state.is_open and self.evidence is Evidence.OBSERVED

    def compared_with(self, chosen: _VmReport) -> VmOfEvent:
        agrees = self.state is chosen.state and (not chosen.state.is_open or self.digest == chosen.digest)
        return VmOfEvent(
            vm_key=self.view.vm_key,
            vm=self.view.vm,
            labels=self.view.labels,
            state=self.state,
            evidence=self.evidence,
            observed_at=self.view.observed_at,
            record_id=self.view.record_id,
            digest=self.digest,
            affects_this_vm=self.view.affects_this_vm,
            agrees=agrees,
        )


def _reports_of_vms(views: Sequence[View], newest_streams: Mapping[str, str]) -> list[_VmReport]:
    """Return the word of each VM, by the VM's name."""
    by_vm: dict[str, list[View]] = {}
    for view in views:
        by_vm.setdefault(view.vm_key, []).append(view)
    reports = []
    for key, of_vm in by_vm.items():
        current = [view for view in of_vm if view.stream_id == newest_streams.get(key)]
        last = max(current or of_vm, key=lambda view: (view.observed_at, view.stream_id))
        reports.append(_VmReport(last, is_left_behind=not current))
    return sorted(reports, key=lambda report: (normal_name(report.view.vm.name or ""), report.view.vm_key))


def _unheard(event: ScheduledEvent, reports: Iterable[_VmReport]) -> tuple[str, ...]:
    heard = {normal_name(report.view.vm.name) for report in reports if report.view.vm.name}
    names = dict.fromkeys(event.resources or ())
    return tuple(name for name in names if normal_name(name) not in heard)


def _groups(reports: Iterable[_VmReport]) -> tuple[str, ...]:
    found = set()
    for report in reports:
        if report.view.vm.resource_group:
            found.add(f"resource_group:{report.view.vm.resource_group.casefold()}")
        found |= {f"labels.{name}:{value}" for name, value in report.view.labels.items()}
    return tuple(sorted(found))


def _end_of(record: TransitionRecord) -> StreamEnd:
    return StreamEnd(
        vm_key=vm_key(record),
        stream_id=record.stream_id,
        sequence=record.sequence,
        record_id=record.id,
        observed_at=format_time(parse_time(record.observed_at)),
        vm=record.vm,
        labels=record.labels,
    )


def _view_of(record: TransitionRecord, event: ScheduledEvent, end: StreamEnd) -> View:
    return View(
        event_key=event_key(event, record.vm),
        vm_key=end.vm_key,
        stream_id=end.stream_id,
        sequence=end.sequence,
        record_id=end.record_id,
        transition=record.transition,
        evidence=record.evidence,
        observed_at=end.observed_at,
        first_observed_at=end.observed_at,
        event=event,
        affects_this_vm=record.affects_this_vm,
        vm=record.vm,
        labels=record.labels,
    )


def _with_first(view: View, first_observed_at: str) -> View:
    return msgspec.structs.replace(view, first_observed_at=first_observed_at)
