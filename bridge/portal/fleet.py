"""Combines the reports of several VMs into the event that the portal shows.

A view is one VM's newest record about an event. Records can arrive in any order. The newest record is the one with the
highest `sequence` in the VM's newest stream (`stream_id` contains the time at which a stream was created).

VMs can report different versions of an event. A VM votes for the version that it reports, if it owns a name in the
Resources of this version. The portal shows the version with the most votes. The members of the event are the VMs that
own a name in the Resources of the shown version. If reports differ, the page shows the number of differing reports.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache

import msgspec

from bridge.approval.digest import digest
from bridge.events.event import ScheduledEvent, VmIdentity, compact_json, normal_name
from bridge.events.record import Evidence, TransitionRecord
from bridge.portal.vm_state import Position, VmState, place_of, vm_key
from bridge.text import without_nul

#: PROTOCOL.md, section 5: the longest EventId that a decision can name.
_LONGEST_EVENT_ID = 256
_KEY_CHARACTERS = 32
_SHOWN_NAMES = 2
_MOST_SUMMARY_CHARACTERS = 200
THIN = "-thin"
"""The end of the variant of an event without details. The VM that reports it has reached a limit."""

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
        return self in _OPEN


#: An event is Scheduled while any member reports it as Scheduled, because a member that reports its start can be wrong.
_OPEN = (State.SCHEDULED, State.STARTED, State.OTHER)
_OF_STATUS = {"Scheduled": State.SCHEDULED, "Started": State.STARTED}


class Version(msgspec.Struct, frozen=True):
    """The content of an event, without its state, as a VM reports it."""

    digest: str
    variant: str
    """A hash of the digest and the description."""
    names: frozenset[str]
    """The normalized names in Resources."""


class Category(msgspec.Struct, frozen=True, kw_only=True):
    """The fields by which the portal groups the reports of an event to count them."""

    variant: str
    digest: str
    state: State
    evidence: Evidence
    """The evidence of the end, or UNKNOWN for an open event."""
    is_named: bool
    is_member: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a VM's report that the API shows."""

    vm_key: str
    record_id: str
    state: State
    evidence: Evidence
    observed_at: str
    digest: str
    """Digest of the event as this VM reports it. A decision for this VM must contain this digest."""
    affects_this_vm: bool | None
    measured: str | None = None
    """The measured impact in words, or None."""
    is_member: bool = False
    """Whether the version that the portal shows contains the name of the VM in Resources."""


class View(Report, frozen=True, kw_only=True):
    """The newest record of one event from one VM.

    `state` comes from this record. If a newer list of active events omits the event, `is_listed_as_ended` is true.
    """

    event_key: str
    event_id: str | None
    position: Position
    first_observed_at: str
    """The earliest `observed_at` of the VM's records of the event."""
    variant: str
    owned_name: str | None = None
    """The normalized name that the VM owns."""
    is_named: bool = False
    """Whether the version that the VM reports contains this name in Resources."""
    is_listed_as_ended: bool = False
    """Whether the VM's newest list of active events does not contain the event."""
    stored_bytes: int = 0
    """The estimated size of the event in the database."""

    @property
    def current(self) -> State:
        """Return the state of the event for the VM."""
        return State.ENDED if self.state.is_open and self.is_listed_as_ended else self.state

    @property
    def category(self) -> Category:
        """Return the fields by which the portal counts this view."""
        return Category(
            variant=self.variant,
            digest=self.digest,
            state=self.current,
            evidence=Evidence.UNKNOWN if self.state.is_open else self.evidence,
            is_named=self.is_named,
            is_member=self.is_member,
        )


class VmOfEvent(Report, frozen=True, kw_only=True):
    """A VM and its newest report of an event. `state` is the event's current state for the VM."""

    name: str | None
    vm: VmIdentity
    groups: tuple[str, ...]
    description: str | None
    is_confirmed: bool
    """Whether the VM owns its name, is named in Resources, and has sent a record recently."""
    agrees: bool
    """False if this report differs from the event that the portal shows."""


class EventStatus(msgspec.Struct, kw_only=True):
    """The state of an event, and the number of its VMs."""

    key: str
    """32 hexadecimal digits, computed from the EventId."""
    event: ScheduledEvent = ScheduledEvent(event_status="")
    """The version that the members report. The description is None if the members report different descriptions."""
    digest: str = ""
    """The digest of the version that the portal shows."""
    state: State = State.ENDED
    is_open: bool = False
    first_observed_at: str = ""
    observed_at: str = ""
    counts: dict[str, int] = {}
    """The number of members in each `State`, or of all reporters if no VM is a member."""
    differing: int = 0
    """The number of VMs that report a different version."""


class EventSummary(EventStatus, kw_only=True):
    """The row of an event, without its list of VMs.

    `event` contains only the first two names in Resources. Azure's document has no NotBefore for a started event, so
    `event` keeps the last known NotBefore.
    """

    variant: str = ""
    description: str | None = None
    """The description of the shown version."""
    names_count: int = 0
    region: str | None = None
    subscription: str | None = None
    resource_group: str | None = None
    scale_set: str | None = None
    categories: tuple[tuple[Category, int], ...] = ()
    """The number of views in each category."""
    sole_vm_key: str | None = None
    """The only VM that reports the event, or None."""

    @property
    def has_members(self) -> bool:
        """Return whether at least one VM is a member."""
        return any(category.is_member for category, _ in self.categories)

    @property
    def variants(self) -> set[str]:
        """Return the versions that VMs report."""
        return {category.variant for category, _ in self.categories}

    @property
    def names_text(self) -> str:
        """Return the first names in Resources, and the number of others: "app-1, app-2 +3"."""
        names = self.event.resources or ()
        more = self.names_count - len(names)
        return ", ".join(names) + (f" +{more}" if more > 0 else "")

    @property
    def wave(self) -> str | None:
        """Return the key of the wave: all announced events of one type, region, and hour."""
        event = self.event
        if self.state is not State.SCHEDULED or event.not_before is None:
            return None
        return without_nul(f"{event.event_type}|{self.region or ''}|{event.not_before:%Y-%m-%dT%H}")

    def chosen(self, followed: str | None) -> Category:
        """Return a category of the version to show.

        If versions have the same number of votes, the method prefers the version with the digest *followed*, which a
        member reported after the shown version.
        """
        named: Counter[str] = Counter()
        reported: Counter[str] = Counter()
        for category, number in self.categories:
            reported.update({category.digest: number, category.variant: number})
            if category.is_named:
                named.update({category.digest: number, category.variant: number})

        def rank(each: Category) -> tuple[object, ...]:
            of_digest = named[each.digest], reported[each.digest], each.digest == followed, each.digest == self.digest
            of_variant = named[each.variant], reported[each.variant], each.variant == self.variant
            return *of_digest, each.digest, not each.variant.endswith(THIN), *of_variant, each.variant

        return max((category for category, _ in self.categories), key=rank)

    def settle(self) -> None:
        """Compute the state and the counts from the categories."""
        counted = [each for each in self.categories if each[0].is_member] or self.categories
        counts: Counter[State] = Counter()
        for category, number in counted:
            counts[category.state] += number
        self.counts = {each.value: counts[each] for each in State if counts[each]}
        ending, _ = max(counted, key=lambda each: (_EVIDENCE_RANK[each[0].evidence], each[0].state.value))
        self.state = next((each for each in _OPEN if counts[each]), ending.state)
        self.is_open = self.state.is_open
        # Versions with the same digest differ only in their descriptions.
        shown = [category for category, _ in self.categories if category.digest == self.digest]
        agreeing = {each.variant for each in shown if each.is_named} or {each.variant for each in shown}
        description = self.description if len(agreeing) == 1 else None
        self.event = msgspec.structs.replace(self.event, description=description)
        self.differing = sum(number for category, number in self.categories if category.variant not in agreeing)


summary_of = msgspec.json.Decoder(EventSummary).decode
view_of = msgspec.json.Decoder(View).decode


class EventState(EventStatus, kw_only=True):
    """An event with the views of its VMs."""

    undecidable_because: str | None
    vms: tuple[VmOfEvent, ...]
    unconfirmed: tuple[str, ...]
    """The names in Resources that no VM confirms."""
    groups: tuple[str, ...]
    """The groups of the members, for scopes and filters: ``resource_group:west``, ``labels.team:payments``."""

    @property
    def too_late_because(self) -> str:
        """Return a warning with the VMs that report the start of a Scheduled event, or ""."""
        names = [each.name or each.vm_key for each in self.vms if each.is_member and each.state is State.STARTED]
        if self.state is not State.SCHEDULED or not names:
            return ""
        report = "reports" if len(names) == 1 else "report"
        return f"A hold might be too late, because {', '.join(names)} {report} that the event started."


def event_key(event: ScheduledEvent, vm: VmIdentity) -> str:
    """Return the key of *event*.

    The key is a hash of the EventId. Without an EventId, it is a hash of the type, the Resources, the subscription, and
    the resource group.
    """
    name: list[object] = [event.event_id]
    if event.event_id is None:
        names = sorted({normal_name(each) for each in event.resources or ()})
        name = [None, event.event_type, names, *place_of(vm)]
    return hashlib.sha256(compact_json(name).encode()).hexdigest()[:_KEY_CHARACTERS]


def key_of_event_id(event_id: str) -> str:
    """Return the key of the event with the EventId *event_id*."""
    return event_key(ScheduledEvent(event_id=event_id, event_status=""), VmIdentity())


def version_of(event: ScheduledEvent) -> Version:
    """Return the version that *event* reports.

    Results are cached, because most VMs of an event report the same version.
    """
    return _version(msgspec.json.encode(msgspec.structs.replace(event, event_status="", extra={})))


@lru_cache(maxsize=2)  # a record of 20,000 names takes 3 MB
def _version(encoded: bytes) -> Version:
    event = msgspec.json.decode(encoded, type=ScheduledEvent)
    found = digest(event)
    variant = hashlib.sha256(f"{found}\0{event.description}".encode()).hexdigest()[:_KEY_CHARACTERS]
    return Version(found, variant, frozenset(normal_name(each) for each in event.resources or ()))


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
    """Return the sentence that explains why no one can decide on *event*."""
    return f"No one can decide on this event: {event.undecidable_because}."


def view_after(
    known: View | None, record: TransitionRecord, event: ScheduledEvent, version: Version, vm: VmState
) -> View:
    """Return *vm*'s view of *event*, which has *version*, after *record*."""
    name = vm.owned_name
    at = min(record.observed_at, vm.heard_at)  # replaces a time in the future
    state = _OF_STATUS.get(event.event_status, State.OTHER)
    if record.transition.is_ending:
        state = State(record.transition.value)
    new = View(
        event_key=event_key(event, record.vm),
        vm_key=vm_key(record),
        event_id=event.event_id,
        position=vm.position_of(record),
        record_id=record.id,
        state=state,
        evidence=record.evidence,
        observed_at=at,
        first_observed_at=at,
        digest=version.digest,
        variant=version.variant,
        owned_name=name,
        is_named=name in version.names,
        affects_this_vm=record.affects_this_vm,
        measured=None if record.impact is None else record.impact.summary[:_MOST_SUMMARY_CHARACTERS],
    )
    if known is None:
        return new
    newest = max(known, new, key=lambda each: each.position)
    first = min(new.first_observed_at, known.first_observed_at)
    return msgspec.structs.replace(newest, first_observed_at=first, is_member=known.is_member)


def count_views(summary: EventSummary, *, added: Sequence[View], removed: Sequence[View] = ()) -> None:
    """Update the counts and the times in *summary*.

    If the event has members, reports from other VMs do not change its times.
    """
    counts = Counter(dict(summary.categories))
    counts.subtract(view.category for view in removed)
    counts.update(view.category for view in added)
    summary.categories = tuple((category, number) for category, number in counts.items() if number > 0)
    summary.sole_vm_key = added[0].vm_key if added and counts.total() == 1 else None
    has_members = summary.has_members
    for view in added:
        if view.is_member or not has_members:
            first = summary.first_observed_at or view.first_observed_at
            summary.first_observed_at = min(first, view.first_observed_at)
            summary.observed_at = max(summary.observed_at, view.observed_at)


def show_version(summary: EventSummary, event: ScheduledEvent, vm: VmIdentity) -> None:
    """Copy *event* to *summary*, with the region, scale set, and resource group of *vm*."""
    names = tuple(dict.fromkeys(event.resources or ()))
    shown = {"resources": names[:_SHOWN_NAMES], "not_before": event.not_before or summary.event.not_before}
    summary.event = msgspec.structs.replace(event, **shown, extra={})
    summary.description, summary.names_count = event.description, len(names)
    summary.region, summary.scale_set = vm.location, vm.scale_set
    summary.subscription, summary.resource_group = vm.subscription_id, vm.resource_group


def unconfirmed_names(event: ScheduledEvent, vms: Sequence[VmOfEvent]) -> tuple[str, ...]:
    """Return the names in Resources that no VM confirms.

    All VMs of an event belong to the same resource group. If a VM is in a different resource group than most members,
    it therefore confirms no names.
    """
    members = [each for each in vms if each.is_member]
    places = Counter(place_of(each.vm) for each in members)
    home = max(places, key=lambda place: places[place], default=None)
    confirmed = {normal_name(each.name or "") for each in members if each.is_confirmed and place_of(each.vm) == home}
    return tuple(name for name in dict.fromkeys(event.resources or ()) if normal_name(name) not in confirmed)
