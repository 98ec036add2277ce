"""The values that templates show for an event, a VM, and an audit entry. Pure."""

from __future__ import annotations

from datetime import datetime
from enum import Enum

import msgspec

from bridge.clock import format_time, parse_time
from bridge.events.event import ScheduledEvent, compact_json
from bridge.portal.audit import Entry
from bridge.portal.decision_progress import AcceptedApproval, DecisionProgress, accepted_approval, progress_of
from bridge.portal.fleet import EventState, State
from bridge.portal.sentences import (
    Moment,
    PageContext,
    buttons,
    clock_text,
    how_many,
    moment,
    next_event,
    these,
    vm_names,
    why_not_yet,
)
from bridge.portal.signing import AgentSeen
from bridge.portal.store.event_details import EventDetails, KnownVm
from bridge.portal.verdicts import Choice, Verdict, rule
from bridge.text import duration


class Section(str, Enum):
    """The section of the first page."""

    ANNOUNCED = "announced"
    UNDER_WAY = "under-way"
    OVER = "over"


class VerdictView(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict of one person."""

    verdict_id: str
    sentence: str
    reason: str
    at: Moment
    can_withdraw: bool
    withdrawing: str
    """The effect of a withdrawal."""
    is_past: bool
    """The verdict was withdrawn."""


class VmReport(msgspec.Struct, frozen=True):
    """The report of one VM about the event."""

    name: str
    vm_key: str
    state: str
    note: str
    agrees: bool


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """An event for one person."""

    key: str
    digest: str
    title: str
    state: str
    section: Section
    order: str
    """The sort key of rows."""
    vms: tuple[str, ...]
    groups: tuple[str, ...]
    next_event: str
    """What happens if no one acts."""
    until: Moment | None
    """NotBefore, if it is in the future; the page counts down to it."""
    why_not_yet: str
    approve: str | None
    """The effect of an approval; None: this person cannot approve the event now."""
    hold: str | None
    no_button: str
    """The reason for a missing button; can be empty."""
    verdicts: tuple[VerdictView, ...]
    progress: tuple[DecisionProgress, ...]
    reports: tuple[VmReport, ...]
    facts: tuple[tuple[str, str], ...]
    """Further fields of the event, as names and texts."""
    impact: str
    source: str
    description: str
    """Azure's description; can be empty."""


def view_of(details: EventDetails, context: PageContext) -> EventView:
    """Return the view of the event of *details*."""
    event = details.event
    ruling = rule(details.counting, digest=event.digest, at=format_time(context.now), required=context.required)
    accepted = accepted_approval(details)
    progress = progress_of(details, context.agents, now=context.now, accepted=accepted)
    names = vm_names(event)
    can = buttons(event, ruling, progress, context, accepted=accepted)
    until = _until(event, context.now) if accepted is None else None
    return EventView(
        key=event.key,
        digest=event.digest,
        title=f"{event.event.event_type or 'Event'} of {how_many(names)}",
        state=_STATE_WORDS[event.state],
        section=_SECTIONS.get(event.state, Section.OVER),
        order=_order(event),
        vms=names,
        groups=event.groups,
        next_event=next_event(event, context.now, accepted),
        until=until,
        why_not_yet=why_not_yet(details, ruling, progress, accepted),
        approve=can.approve,
        hold=can.hold,
        no_button=can.why_not,
        verdicts=tuple(_verdict_view(each, details, context, accepted) for each in details.verdicts),
        progress=progress,
        reports=tuple(_vm_report(vm.vm_key, vm.vm.name, vm.state, agrees=vm.agrees) for vm in event.vms),
        facts=_facts(event),
        impact=_impact(event.event),
        source=event.event.event_source or "unknown",
        description=event.event.description or "",
    )


_STATE_WORDS = {
    State.SCHEDULED: "announced",
    State.STARTED: "started",
    State.OTHER: "unknown status",
    State.COMPLETED: "completed",
    State.CANCELED: "canceled",
    State.ENDED: "over",
}
_SECTIONS = {
    State.SCHEDULED: Section.ANNOUNCED,
    State.STARTED: Section.UNDER_WAY,
    State.OTHER: Section.UNDER_WAY,
}


def _order(event: EventState) -> str:
    """Return a key that sorts open events by NotBefore, and ended events by their end, newest first."""
    if not event.is_open:
        seconds = int(parse_time(event.observed_at).timestamp() * 1000)
        return f"{10**15 - seconds:016d} {event.key}"
    at = event.event.not_before or parse_time(event.first_observed_at)
    return f"{format_time(at)} {event.key}"


def _until(event: EventState, now: datetime) -> Moment | None:
    at = event.event.not_before
    return moment(at) if event.state is State.SCHEDULED and at is not None and at > now else None


def _verdict_view(
    verdict: Verdict, details: EventDetails, context: PageContext, accepted: AcceptedApproval | None
) -> VerdictView:
    event = details.event
    can = (
        verdict.withdrawn_at is None
        and accepted is None
        and event.state is State.SCHEDULED
        and context.kid is not None
        and context.person.why_not_decide(event) is None
    )
    does = "stops it where Azure was not told yet"
    if verdict.choice is Choice.HOLD:
        others = [each for each in details.counting if each.choice is Choice.HOLD and each.withdrawn_at is None]
        does = "people may approve it again" if len(others) == 1 else "it stays held, for others hold it too"
    return VerdictView(
        verdict_id=verdict.verdict_id,
        sentence=f"{verdict.user_name} {_verb(verdict, details, context.now, accepted)}",
        reason=verdict.reason,
        at=moment(verdict.made_at),
        can_withdraw=can,
        withdrawing=f"{does}; if nobody acts, Azure starts it {clock_text(event)}. For {these(vm_names(event))}",
        is_past=verdict.withdrawn_at is not None,
    )


def _verb(verdict: Verdict, details: EventDetails, now: datetime, accepted: AcceptedApproval | None) -> str:
    """Return the action of the verdict and, for a Scheduled event, the reason why an approval does not count."""
    if verdict.choice is Choice.HOLD:
        return _verb_of_hold(verdict, details, accepted)
    if verdict.withdrawn_at is not None:
        late = (
            f" too late: Azure was told at {accepted.clock}"
            if accepted is not None and verdict in accepted.verdicts
            else ""
        )
        return f"approved it, which was taken back{late}"
    if details.event.state is State.SCHEDULED and accepted is None:
        if verdict.digest != details.event.digest:
            return "approved it as it was before it changed"
        if verdict.expires_at <= format_time(now):
            return "approved it, which has run out"
        if verdict not in details.counting:
            return "approved it, and may approve no more"
    return "approved it"


def _verb_of_hold(verdict: Verdict, details: EventDetails, accepted: AcceptedApproval | None) -> str:
    if verdict.withdrawn_at is not None:
        return "held it, which was taken back"
    if accepted is not None:
        return f"held it too late: Azure was told at {accepted.clock}"
    return "holds it" if details.event.state is State.SCHEDULED else "held it"


def _vm_report(vm_key: str, name: str | None, state: State, *, agrees: bool) -> VmReport:
    note = "" if agrees else "says something else than is shown here"
    return VmReport(name or vm_key, vm_key, _STATE_WORDS[state], note, agrees)


def _facts(event: EventState) -> tuple[tuple[str, str], ...]:
    shown = event.event
    pairs = (
        ("NotBefore", shown.not_before_raw),
        ("Azure says", shown.description),
        ("Impact", _impact(shown)),
        ("Source", shown.event_source),
        ("Groups", ", ".join(event.groups)),
        ("Not heard from", ", ".join(event.unheard)),
        ("EventId", shown.event_id),
    )
    return tuple((name, text) for name, text in pairs if text)


def _impact(event: ScheduledEvent) -> str:
    """Return the duration that Azure expects: "5 s pause" for a Freeze."""
    seconds = event.duration_seconds
    if seconds is None or seconds < 0:
        return "unknown"
    if seconds == 0:
        return "none"
    return f"{duration(seconds)} pause" if event.event_type == "Freeze" else duration(seconds)


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """A VM and its agent."""

    vm_key: str
    name: str
    groups: str
    is_connected: bool
    asks: str
    version: str
    follows: str
    """Whether the agent would act on an approval by the portal's key, or the reason why not."""
    is_able: bool
    required: str
    last_record: Moment | None
    open_events: int


def agent_view(
    vm_key: str, vm: KnownVm | None, seen: AgentSeen | None, *, kid: str | None, open_events: int
) -> AgentView:
    """Return the view of a VM; None for *vm*: it sent no record; None for *seen*: its agent never polled."""
    why_not = "has not asked for decisions" if seen is None else None if kid is None else seen.why_not(kid)
    follows = "yes" if why_not is None else f"no: it {why_not}"
    if kid is None and seen is not None:
        follows = "the portal has no key of its own"
    said_required = None if seen is None else seen.required_approvals
    return AgentView(
        vm_key=vm_key,
        name=(vm.vm.name if vm is not None else None) or vm_key,
        groups="" if vm is None else ", ".join(_groups(vm)),
        is_connected=seen is not None and seen.is_connected,
        asks="connected" if seen is not None and seen.is_connected else "never asked" if seen is None else "away",
        version=(seen.version if seen is not None else None) or "unknown",
        follows=follows,
        is_able=why_not is None and kid is not None,
        required="unknown" if said_required is None else str(said_required),
        last_record=None if vm is None else moment(vm.observed_at),
        open_events=open_events,
    )


def groups_of_vm(vm: KnownVm) -> frozenset[str]:
    """Return the groups that a scope can name."""
    return frozenset(_groups(vm))


def _groups(vm: KnownVm) -> list[str]:
    group = [f"resource_group:{vm.vm.resource_group.casefold()}"] if vm.vm.resource_group else []
    return group + [f"labels.{name}:{value}" for name, value in sorted(vm.labels.items())]


class EntryView(msgspec.Struct, frozen=True, kw_only=True):
    """An audit entry."""

    entry: int
    at: Moment
    actor: str
    action: str
    key: str
    """The key of the event; empty if there is none."""
    event: str
    reason: str
    details: tuple[tuple[str, str], ...]
    hash: str


def entry_view(entry: Entry, event: EventState | None) -> EntryView:
    """Return the view of *entry* about *event*."""
    details = [(name, value) for name, value in entry.details.items() if value not in (None, "", [], {})]
    return EntryView(
        entry=entry.entry,
        at=moment(entry.at),
        actor=entry.actor,
        action=entry.action.replace("_", " "),
        key="" if event is None else event.key,
        event="" if event is None else f"{event.event.event_type or 'Event'} of {', '.join(vm_names(event))}",
        reason=str(entry.details.get("reason") or ""),
        details=tuple((name, value if isinstance(value, str) else compact_json(value)) for name, value in details),
        hash=entry.hash,
    )
