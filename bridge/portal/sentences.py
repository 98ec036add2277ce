"""The sentences of a page: what happens to an event and when, what a click does, and why it has not started yet. Pure.

There is no "deny", and the words must not suggest one: an event that nobody approves is started by Azure at NotBefore,
and a hold only keeps this portal and the rules of the VMs from starting it earlier. So each button has a sentence that
names every VM and what becomes of them, and a row says first what happens if nobody acts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from bridge.clock import format_time, parse_time
from bridge.events.event import ScheduledEvent
from bridge.portal.decision_progress import AcceptedApproval, DecisionProgress, Stage, is_accepted
from bridge.portal.fleet import EventState, State
from bridge.portal.signing import AgentSeen, addressees
from bridge.portal.store.event_details import EventDetails
from bridge.portal.user_names import folded_name
from bridge.portal.users import Person
from bridge.portal.verdicts import TAKE_BACK, Choice, Outcome, Ruling, people_of

#: How a person names the fields of an event, in the order in which a change of them is told.
_FIELDS = {
    "event_type": "EventType",
    "not_before_raw": "NotBefore",
    "resources": "Resources",
    "duration_seconds": "DurationInSeconds",
    "event_source": "EventSource",
    "event_id": "EventId",
}

_ENDS = {
    State.COMPLETED: "It is over.",
    State.CANCELED: "Azure took it back: it did not happen.",
    State.ENDED: "It is over, and no VM saw how.",
}


_ON_ITS_WAY = frozenset({Stage.QUEUED, Stage.RECEIVED})


class Moment(msgspec.Struct, frozen=True):
    """A time, as a machine and as a person reads it."""

    machine: str
    text: str


class PageContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the view of an event depends on beside the event."""

    now: datetime
    person: Person
    agents: Mapping[str, AgentSeen]
    kid: str | None
    """The key that the portal signs with; None: it has none."""
    required: int
    approvers: int | None
    """How many people may approve at all; None: nobody knows, for a proxy may bring others."""


class Buttons(msgspec.Struct, frozen=True, kw_only=True):
    """What this person can do about an event now, each as what it does; None: that cannot be done."""

    approve: str | None = None
    hold: str | None = None
    why_not: str = ""
    """Why something cannot be done; nothing, where that needs no words."""


def vm_names(event: EventState) -> tuple[str, ...]:
    """Return the names of every VM of the event: those of Resources, else of the VMs that told of it."""
    return tuple(dict.fromkeys(event.event.resources or ())) or tuple(vm.vm.name or vm.vm_key for vm in event.vms)


def how_many(names: Sequence[str]) -> str:
    """Return "3 VMs"."""
    return f"{len(names)} VM{'' if len(names) == 1 else 's'}"


def these(names: Sequence[str]) -> str:
    """Return every one of *names*: "these 3 VMs: a, b, c"."""
    return f"this VM: {names[0]}" if len(names) == 1 else f"these {len(names)} VMs: {', '.join(names)}"


def moment(when: datetime | str) -> Moment:
    """Return *when* for a page."""
    at = parse_time(when) if isinstance(when, str) else when
    return Moment(format_time(at), f"{at:%Y-%m-%d %H:%M:%S} UTC")


def differences(before: ScheduledEvent, now: ScheduledEvent) -> tuple[str, ...]:
    """Return a sentence for each field of *before* that is another in *now*, of those that a decision is about."""
    found = []
    for field, name in _FIELDS.items():
        old, new = getattr(before, field), getattr(now, field)
        if field == "resources":
            old, new = tuple(sorted(set(old or ()))), tuple(sorted(set(new or ())))
        if old != new:
            found.append(f"{name} was {_text(old)} and is {_text(new)}.")
    return tuple(found)


def clock_text(event: EventState) -> str:
    """Return when Azure starts the event: "at 11:15:00 UTC"; with the day when it is not near."""
    at = event.event.not_before
    if at is None:
        return "at a time that it does not say"
    near = abs(at - parse_time(event.first_observed_at)) < timedelta(hours=12)
    return f"at {at:%H:%M:%S} UTC" if near else f"on {at:%Y-%m-%d} at {at:%H:%M:%S} UTC"


def next_event(event: EventState, now: datetime, accepted: AcceptedApproval | None = None) -> str:
    """Return what happens if nobody acts, without the time that is counted down; *told*: Azure took an approval."""
    if not event.is_open:
        return _ENDS.get(event.state, "It is over.")
    if event.state is State.STARTED:
        return "Azure has started it. It is under way until Azure takes it from the VMs' documents."
    if event.state is State.OTHER:
        return f"Its status is {event.event.event_status}, which this version does not know."
    return accepted.sentence if accepted is not None else _next_of_announced(event, now)


def _next_of_announced(event: EventState, now: datetime) -> str:
    at = event.event.not_before
    if at is None:
        return "If nobody acts, Azure starts it; it does not say when."
    if at <= now:
        return f"Azure may start it at any moment: NotBefore was {clock_text(event)}."
    return f"If nobody acts, Azure starts it {clock_text(event)}."


def buttons(
    event: EventState,
    ruling: Ruling,
    progress: Sequence[DecisionProgress],
    context: PageContext,
    *,
    accepted: AcceptedApproval | None,
) -> Buttons:
    """Return what the person can do, and what that does; an approval that no agent followed can be given again.

    Once Azure took an approval, as *told* says, nothing can be done, and what stands at the top says why.
    """
    if accepted is not None and event.state is State.SCHEDULED:
        return Buttons()
    if event.undecidable_because is not None:
        is_odd = event.state is State.SCHEDULED
        return Buttons(why_not=f"Nobody can decide on it: {event.undecidable_because}." if is_odd else "")
    why_not = context.person.why_not_decide(event)
    if why_not is None and context.kid is None:
        why_not = "This portal has no key of its own. Sign with `decide --to`, and it carries that."
    if why_not is None and ruling.outcome is Outcome.HELD:
        why_not = f"It is held. {TAKE_BACK}"
    if why_not is not None:
        return Buttons(why_not=why_not)
    names = these(vm_names(event))
    hold = f"we do not start it early; Azure does {clock_text(event)}. For {names}"
    why_not = _why_not_approve(event, ruling, progress, context)
    if why_not is not None:
        return Buttons(hold=hold, why_not=why_not)
    more = ruling.needed - 1
    if more > 0:
        others = "one more person has" if more == 1 else f"{more} more people have"
        why_not = too_few(context.required, context.approvers)
        return Buttons(approve=f"starts once {others} approved too, for {names}", hold=hold, why_not=why_not)
    return Buttons(approve=f"starts now, for {names}", hold=hold)


def too_few(required: int, approvers: int | None) -> str:
    """Return what is said where fewer people may approve than must; nothing where enough may."""
    if approvers is None or approvers >= required:
        return ""
    people = "person" if required == 1 else "different people"
    return f"{required} {people} must approve, and only {approvers} may here: `portal users` lets others in."


def _why_not_approve(
    event: EventState, ruling: Ruling, progress: Sequence[DecisionProgress], context: PageContext
) -> str | None:
    """Return why there is nothing to approve for this person, who may hold it; None when there is."""
    if ruling.outcome is Outcome.APPROVED and (_was_followed(progress) or _is_on_its_way(progress)):
        return ""
    nobody = unreachable(event, context)
    if nobody:
        return f"An approval would reach no agent now: {nobody}."
    if ruling.outcome is Outcome.WAITING and folded_name(context.person.name) in {
        folded_name(each.user_name) for each in ruling.verdicts
    }:
        return f"You have approved it; another person must too. {too_few(context.required, context.approvers)}".rstrip()
    return None


def unreachable(event: EventState, context: PageContext) -> str:
    """Return why no agent would follow an approval now, VM by VM; nothing when one would."""
    if context.kid is None or addressees(event, context.agents, context.kid):
        return ""
    found = []
    for vm in event.vms:
        seen = context.agents.get(vm.vm_key)
        why = "has not asked for decisions" if seen is None else seen.why_not(context.kid)
        found.append(f"{vm.vm.name or vm.vm_key} {why or 'sees another event than this'}")
    return "; ".join(found)


def why_not_yet(
    details: EventDetails,
    ruling: Ruling,
    progress: Sequence[DecisionProgress],
    accepted: AcceptedApproval | None = None,
) -> str:
    """Return why an announced event has not started; nothing for every other."""
    event = details.event
    if event.state is not State.SCHEDULED or accepted is not None:
        return "Azure has not shown it as started yet." if event.state is State.SCHEDULED else ""
    people = people_of(ruling.verdicts)
    if ruling.outcome is Outcome.HELD:
        if _was_followed(progress):
            return f"Held by {people}, but Azure was told to start it before it changed, and may at any moment."
        return f"Held by {people}: we do not start it early; Azure does {clock_text(event)}."
    if ruling.outcome is Outcome.WAITING:
        more = "one more person" if ruling.needed == 1 else f"{ruling.needed} more people"
        return f"Approved by {people}; {more} must approve it.{_all_the_same(details, progress)}"
    if ruling.outcome is Outcome.APPROVED:
        return _why_approved_is_not_started(people, progress)
    return _why_undecided_is_not_started(details) + _all_the_same(details, progress)


def _why_undecided_is_not_started(details: EventDetails) -> str:
    if any(is_accepted(each) for each in details.outcomes):
        return "Azure was told to start it before it changed, and may at any moment."
    gone = [each for each in details.verdicts if each.choice is Choice.APPROVE and each.withdrawn_at is None]
    if not gone:
        return "Nobody has decided."
    what = "has run out"
    if gone[-1].digest != details.event.digest:
        what = "was of the event before it changed"
    elif gone[-1] not in details.counting:
        what = "does not count, for they may approve no more"
    return f"Nobody has decided: the approval of {gone[-1].user_name} {what}."


def _why_approved_is_not_started(people: str, progress: Sequence[DecisionProgress]) -> str:
    """Return how far the approval of *people* came; approved is said only where agents were told, and no hold since."""
    if _was_followed(progress):
        return "Approved, and Azure was told. Azure has not shown it as started yet."
    if _is_on_its_way(progress):
        return "Approved. It waits for an agent to take it to Azure."
    accepted = [each for each in progress if each.choice is Choice.APPROVE]
    if not accepted:
        return f"No agent was told of the approval of {people}: approve it again."
    if all(each.is_stopped for each in accepted):
        return f"Agents were told to hold it after the approval of {people}: approve it again."
    return "Approved, and no agent followed: approve it again."


def _all_the_same(details: EventDetails, progress: Sequence[DecisionProgress]) -> str:
    """Return what is said where an agent has an approval that counts here no more, or was signed elsewhere."""
    is_changed = any(each.choice is Choice.APPROVE and each.digest != details.event.digest for each in details.verdicts)
    if is_changed or not _is_on_its_way(progress):  # of an event that changed, agents refuse it
        return ""
    return " An approval is on its way to an agent all the same; a hold stops it."


def _was_followed(progress: Iterable[DecisionProgress]) -> bool:
    """Return whether Azure was told by an agent that followed an approval."""
    return any(each.choice is Choice.APPROVE and each.stage is Stage.FOLLOWED for each in progress)


def _is_on_its_way(progress: Iterable[DecisionProgress]) -> bool:
    """Return whether an agent has an approval, or gets one, that no hold came after."""
    return any(each.choice is Choice.APPROVE and each.stage in _ON_ITS_WAY and not each.is_stopped for each in progress)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "nothing"
    return "unknown" if value is None else str(value)
