"""Builds the sentences that the pages show about an event.

The sentences never imply that a person can prevent an event, because Azure starts the event at its NotBefore time even
without an approval. For each event, the page first states what happens if no one acts. Each button describes its effect
and lists all affected VMs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from bridge.clock import parse_time
from bridge.events.event import ScheduledEvent
from bridge.portal.connected_agents import AgentSeen
from bridge.portal.decision_progress import AcceptedApproval, DecisionProgress, Stage, is_accepted
from bridge.portal.fleet import EventState, State, undecidable
from bridge.portal.signing import NO_AGENT, why_unreachable
from bridge.portal.store.event_details import EventDetails
from bridge.portal.two_person_rule import too_few
from bridge.portal.users import Person
from bridge.portal.verdicts import NO_KEY, WITHDRAW_HOLD, Choice, Outcome, Ruling, people_of
from bridge.text import duration

_FIELDS = {
    "event_type": "EventType",
    "not_before_raw": "NotBefore",
    "resources": "Resources",
    "duration_seconds": "DurationInSeconds",
    "event_source": "EventSource",
    "event_id": "EventId",
}

_ENDS = {
    State.COMPLETED: "The event is over.",
    State.CANCELED: "Azure canceled the event.",
    State.ENDED: "The event is over. No VM reported how it ended.",
}
STATE_WORDS = {
    State.SCHEDULED: "announced",
    State.STARTED: "started",
    State.OTHER: "unknown status",
    State.COMPLETED: "completed",
    State.CANCELED: "canceled",
    State.ENDED: "over",
}
_MOST_NAMES = 20
_DELETED = frozenset({"Preempt", "Terminate"})
_DOWN = frozenset({"Reboot", "Redeploy"})
_ON_ITS_WAY = frozenset({Stage.QUEUED, Stage.RECEIVED})


class PageContext(msgspec.Struct, frozen=True, kw_only=True):
    """The context in which an event is shown to a person."""

    now: datetime
    person: Person
    agents: Mapping[str, AgentSeen]
    kid: str | None
    required: int
    approvers: int | None
    """The number of people who can approve, or None if people who are not in the database could also approve."""


class Buttons(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of the visible buttons. A hidden button is None."""

    approve: str | None = None
    hold: str | None = None
    why_not: str = ""
    confirm: tuple[str, ...] = ()
    """Before an approval, the person must confirm each of these names in Resources."""


def vm_names(event: EventState) -> tuple[str, ...]:
    """Return the names in Resources.

    Without Resources, return the VMs that have reported the event.
    """
    return tuple(dict.fromkeys(event.event.resources or ())) or tuple(vm.name or vm.vm_key for vm in event.vms)


def how_many(names: Sequence[str]) -> str:
    """Return "3 VMs"."""
    return f"{len(names)} VM{'' if len(names) == 1 else 's'}"


def these(names: Sequence[str]) -> str:
    """Return *names*, or the first 20 of them: "these 3 VMs: a, b, c"."""
    if len(names) == 1:
        return f"this VM: {names[0]}"
    more = len(names) - _MOST_NAMES
    return f"these {len(names)} VMs: {', '.join(names[:_MOST_NAMES])}" + (f", and {more} more" if more > 0 else "")


def effect_of(event_type: str | None, seconds: int | None) -> str:
    """Return the effect on the VM: "5 s pause", "minutes down", or "VM deleted"."""
    if event_type in _DELETED:
        return "VM deleted"
    if seconds is None or seconds < 0:
        return "minutes down" if event_type in _DOWN else "pause" if event_type == "Freeze" else "unknown"
    if seconds == 0:
        return "none"
    return f"{duration(seconds)} {'pause' if event_type == 'Freeze' else 'down'}"


def differences(before: ScheduledEvent, now: ScheduledEvent) -> tuple[str, ...]:
    """Return a sentence for each difference that changes the digest."""
    found = []
    for field, name in _FIELDS.items():
        old, new = getattr(before, field), getattr(now, field)
        if field == "resources":
            old, new = tuple(sorted(set(old or ()))), tuple(sorted(set(new or ())))
        if old != new:
            found.append(f"{name} changed from {_text(old)} to {_text(new)}.")
    return tuple(found)


def clock_text(event: EventState) -> str:
    """Return NotBefore as "at 11:15:00 UTC".

    The text includes the date if the agent announced the event more than 12 hours before NotBefore.
    """
    at = event.event.not_before
    if at is None:
        return "at an unknown time"
    near = abs(at - parse_time(event.first_observed_at)) < timedelta(hours=12)
    return f"at {at:%H:%M:%S} UTC" if near else f"on {at:%Y-%m-%d} at {at:%H:%M:%S} UTC"


def next_event(event: EventState, now: datetime, accepted: AcceptedApproval | None = None) -> str:
    """Return what happens if no one acts, without the countdown."""
    if not event.is_open:
        return _ENDS[event.state]
    if event.state is State.STARTED:
        return "Azure has started the event. The event is over when Azure no longer reports it to the VMs."
    if event.state is State.OTHER:
        return f"The event has the status {event.event.event_status}, which this version does not support."
    return accepted.sentence if accepted is not None else _next_of_announced(event, now)


def _next_of_announced(event: EventState, now: datetime) -> str:
    if event.event.is_advisory:
        return "Azure reports a higher risk of an eviction. The recommendation does not change the VM."
    at = event.event.not_before
    if at is None:
        return "If no one acts, Azure starts the event. The start time is unknown, because Azure reported no NotBefore."
    if at <= now:
        return f"Azure can start the event at any moment. NotBefore was {clock_text(event)}."
    return f"If no one acts, Azure starts the event {clock_text(event)}."


def buttons(
    event: EventState,
    ruling: Ruling,
    progress: Sequence[DecisionProgress],
    context: PageContext,
    *,
    accepted: AcceptedApproval | None,
) -> Buttons:
    """Return the buttons for the person. A person can repeat an approval that had no effect.

    After Azure has accepted an approval, the function returns only the hold button, with a warning.
    """
    if not event.is_open or event.event.event_id is None:
        return Buttons(why_not=undecidable(event) if event.is_open else "")
    why_not = context.person.why_not_decide(event, is_hold=True)
    if why_not is None and context.kid is None:
        why_not = NO_KEY
    if why_not is None and ruling.outcome is Outcome.HELD:
        why_not = f"The event is held. {WITHDRAW_HOLD}"
    if why_not is not None:
        return Buttons(why_not=why_not)
    names = these(vm_names(event))
    if event.state is State.STARTED and not event.unconfirmed:
        return Buttons()
    at = "" if event.event.not_before is None else f" Azure starts the event {clock_text(event)}."
    hold = f"prevents an early start.{at} For {names}"
    too_late = too_late_text(event, accepted)
    if too_late:
        hold = f"{too_late} The hold {hold}"
    why_not = _why_not_approve(event, ruling, progress, context)
    if accepted is not None:
        why_not = ""
    if why_not is not None:
        return Buttons(hold=hold, why_not=why_not)
    more = ruling.needed - 1
    if more > 0:
        others = "one more person approves" if more == 1 else f"{more} more people approve"
        why_not = too_few(context.required, context.approvers)
        text = f"starts the event after {others}, for {names}"
        return Buttons(approve=text, hold=hold, why_not=why_not, confirm=event.unconfirmed)
    return Buttons(approve=f"starts the event now, for {names}", hold=hold, confirm=event.unconfirmed)


def too_late_text(event: EventState, accepted: AcceptedApproval | None) -> str:
    """Return why a hold may be too late, or ""."""
    if event.state is State.STARTED:
        return "A hold might be too late, because the VMs report that the event started."
    if accepted is not None and accepted.vm_names:
        return f"A hold might be too late, because {accepted.vm_names} reported that the event was approved."
    return event.too_late_because


def _why_not_approve(
    event: EventState, ruling: Ruling, progress: Sequence[DecisionProgress], context: PageContext
) -> str | None:
    if event.undecidable_because is not None:
        return undecidable(event) if event.state is State.SCHEDULED else ""
    why_not = context.person.why_not_decide(event)
    if why_not is not None:
        return why_not
    if ruling.outcome is Outcome.APPROVED and (_was_followed(progress) or _is_on_its_way(progress)):
        return ""
    unreachable = "" if context.kid is None else why_unreachable(event, context.agents, context.kid)
    if unreachable:
        return f"{NO_AGENT}: {unreachable}."
    if ruling.outcome is Outcome.WAITING and context.person.key in {each.person_key for each in ruling.verdicts}:
        why_too_few = too_few(context.required, context.approvers)
        return f"You approved the event. Another person must also approve it. {why_too_few}".rstrip()
    return None


def why_not_yet(
    details: EventDetails,
    ruling: Ruling,
    progress: Sequence[DecisionProgress],
    accepted: AcceptedApproval | None = None,
) -> str:
    """Return the reason why a Scheduled event has not started. Return "" for all other events."""
    event, people = details.event, people_of(ruling.verdicts)
    if event.state is not State.SCHEDULED:
        return ""
    if accepted is not None:
        return "Azure has not reported the start yet."
    if ruling.outcome is Outcome.APPROVED:
        return _why_approved_is_not_started(people, progress)
    if ruling.outcome is Outcome.WAITING:
        more = "One more person" if ruling.needed == 1 else f"{ruling.needed} more people"
        return f"Approved by {people}. {more} must also approve the event."
    held = f"Held by {people}. " if ruling.outcome is Outcome.HELD else ""
    if any(is_accepted(each) for each in details.outcomes):
        return f"{held}An earlier version of the event was approved. Azure can start the event at any moment."
    return f"{held}Azure starts it {clock_text(event)}." if held else "No one has decided."


def _why_approved_is_not_started(people: str, progress: Sequence[DecisionProgress]) -> str:
    if _was_followed(progress):
        return "Approved, and posted to Azure. Azure has not reported the start yet."
    if _is_on_its_way(progress):
        return "Approved. An agent has not posted the approval to Azure yet."
    if any(each.is_stopped for each in progress if each.choice is Choice.APPROVE):
        return f"A later hold stopped the approval by {people}. Approve the event again."
    return f"No agent acted on the approval by {people}. Approve the event again."


def _was_followed(progress: Iterable[DecisionProgress]) -> bool:
    return any(each.choice is Choice.APPROVE and each.stage is Stage.FOLLOWED for each in progress)


def _is_on_its_way(progress: Iterable[DecisionProgress]) -> bool:
    return any(each.choice is Choice.APPROVE and each.stage in _ON_ITS_WAY and not each.is_stopped for each in progress)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "nothing"
    return "unknown" if value is None else str(value)
