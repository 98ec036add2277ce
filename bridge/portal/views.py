"""The view of an event for one person: its state, its buttons, and its verdicts.

The page's sentences never imply that someone can prevent an event, because Azure starts the event at its NotBefore time
even without an approval. For each event, the page first states what happens if no one acts. Next to each button, the
page describes the effect and lists all affected VMs.

If an event has members, its history omits what other VMs reported about changes by Azure. The table of VMs on the same
page includes these reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cached_property

import msgspec

from bridge.approval.digest import digest
from bridge.clock import format_time
from bridge.events.event import ScheduledEvent
from bridge.events.record import Transition, TransitionRecord
from bridge.portal.connected_agents import AgentSeen
from bridge.portal.decision_progress import (
    UNDER_WAY,
    AcceptedApproval,
    DecisionProgress,
    accepted_approval,
    is_accepted,
    progress_of,
)
from bridge.portal.fleet import EventState, State, undecidable
from bridge.portal.sentences import differences, first_of, how_many, start_text, these, vm_names
from bridge.portal.signing import addressees, why_unreachable
from bridge.portal.site import Site
from bridge.portal.store.event_details import EventDetails
from bridge.portal.users import Person
from bridge.portal.verdicts import NO_KEY, WITHDRAW_HOLD, Choice, Outcome, Ruling, Verdict, lift, rule, too_few
from bridge.portal.vm_state import vm_key


class Buttons(msgspec.Struct, frozen=True, kw_only=True):
    """The text next to each button, or None if the button is hidden."""

    approve: str | None = None
    hold: str | None = None
    why_not: str = ""


class EventView(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """An event as one person sees it."""

    site: Site
    person: Person
    now: datetime
    details: EventDetails

    @property
    def event(self) -> EventState:
        """Return the event."""
        return self.details.event

    @cached_property
    def vms(self) -> tuple[str, ...]:
        """Return the names in Resources, or the VMs that have reported the event."""
        return vm_names(self.event)

    @cached_property
    def accepted(self) -> AcceptedApproval | None:
        """Return the approval that Azure accepted, or None."""
        return accepted_approval(self.details)

    @cached_property
    def ruling(self) -> Ruling:
        """Return the ruling at the time of the page."""
        at = format_time(self.now)
        return rule(self.details.counting, digest=self.event.digest, at=at, required=self.site.required)

    @cached_property
    def progress(self) -> tuple[DecisionProgress, ...]:
        """Return the progress of every decision."""
        return progress_of(self.details, self.agents, self.accepted, now=self.now)

    @cached_property
    def agents(self) -> Mapping[str, AgentSeen]:
        """Return the agents of the event and of its decisions."""
        of_decisions = {each.vm_key for each in self.details.decisions}
        return self.site.connected_agents.of({vm.vm_key for vm in self.event.vms} | of_decisions)

    @property
    def _too_few(self) -> str:
        """Return a warning if not enough people can approve, or ""."""
        return "" if self.site.users.others_may_approve else too_few(self.site.required, self.details.approvers)

    @property
    def until(self) -> datetime | None:
        """Return NotBefore if the page counts down to this time."""
        at = self.event.event.not_before
        is_waiting = self.event.state is State.SCHEDULED and self.accepted is None
        return at if is_waiting and at is not None and at > self.now else None

    @property
    def is_under_way(self) -> bool:
        """Return whether an agent might still post an approval to Azure."""
        approvals = (each for each in self.progress if each.choice is Choice.APPROVE and not each.is_past)
        return any(each.stage in UNDER_WAY for each in approvals)

    @property
    def is_stopped(self) -> bool:
        """Return whether a later hold stopped an approval."""
        return any(each.is_stopped for each in self.progress if each.choice is Choice.APPROVE)

    @property
    def was_accepted(self) -> bool:
        """Return whether Azure accepted an approval of this or of an earlier version of the event."""
        return any(map(is_accepted, self.details.outcomes))

    @cached_property
    def buttons(self) -> Buttons:
        """Return the buttons for the person. A person can repeat an approval that had no effect.

        After Azure accepts an approval, only the hold button is left, with a warning.
        """
        event = self.event
        if not event.is_open or event.event.event_id is None or event.event.is_advisory:
            return Buttons(why_not=undecidable(event) if event.is_open else "")
        why_not = self.person.why_not_decide(event, is_hold=True)
        if why_not is None and self.site.kid is None:
            why_not = NO_KEY
        if why_not is None and self.ruling.outcome is Outcome.HELD:
            why_not = f"The event is held. {WITHDRAW_HOLD}"
        if why_not is not None:
            return Buttons(why_not=why_not)
        if event.state is State.STARTED and not event.unconfirmed:
            return Buttons()
        hold = f"prevents an early start. {start_text(event, self.now)}. For {these(self.vms)}"
        if self._too_late:
            hold = f"{self._too_late} The hold {hold}"
        why_not = "" if self.accepted is not None else self._why_not_approve
        if why_not is not None:
            return Buttons(hold=hold, why_not=why_not)
        if self.ruling.needed <= 1:
            approve, total = f"starts the event now, for {these(self.vms)}", len(self.vms)
            recipients = len(addressees(event, self.agents, self.site.kid or ""))
            if recipients < total:
                approve += f". The approval goes to the agents of only {recipients} of the {total} VMs, which is enough"
            return Buttons(approve=approve, hold=hold)
        more = how_many(self.ruling.needed - 1, "other approval")
        approve = f"starts the event early after {more}, for {these(self.vms)}"
        return Buttons(approve=approve, hold=hold, why_not=self._too_few)

    @property
    def _too_late(self) -> str:
        """Return why a hold may be too late, or ""."""
        if self.event.state is State.STARTED:
            return "A hold might be too late, because the VMs report that the event started."
        if self.accepted is not None:
            return f"A hold might be too late, because {self.accepted.vm_names} reported that the event was approved."
        return self.event.too_late_because

    @property
    def _why_not_approve(self) -> str | None:
        event, ruling = self.event, self.ruling
        if event.undecidable_because is not None:
            return undecidable(event) if event.state is State.SCHEDULED else ""
        why_not = self.person.why_not_decide(event)
        if why_not is not None:
            return why_not
        if ruling.outcome is Outcome.APPROVED and self.is_under_way:
            return ""
        unreachable = why_unreachable(event, self.agents, self.site.kid or "")
        if unreachable:
            return unreachable
        if ruling.outcome is Outcome.WAITING and self.person.key in {each.person_key for each in ruling.verdicts}:
            return f"You approved the event. Another person must also approve it. {self._too_few}".rstrip()
        return None

    def withdrawing(self, verdict: Verdict) -> str | None:
        """Return the effect of a withdrawal, or None if this person cannot withdraw *verdict*."""
        event, person, at = self.event, self.person, format_time(self.now)
        if verdict.withdrawn_at is not None or event.state is not State.SCHEDULED or self.site.kid is None:
            return None
        is_posted = verdict.choice is Choice.APPROVE and self.accepted is not None
        if is_posted or person.why_not_decide(event, is_hold=True) is not None:
            return None
        effect = "stops the approval unless it is already posted to Azure"
        if verdict.choice is Choice.HOLD:
            effect = "leaves the event held by another person"
            if len(self.ruling.verdicts) == 1:  # PROTOCOL.md, section 8
                effect = "lets people approve the event. The rules of the VMs stay stopped until an approval"
        _, needed = lift(verdict, person.key, (), at=at, until=at, required=self.site.required)
        if needed:
            people = "person withdraws" if needed == 1 else "people withdraw"
            effect = f"leaves the event held until {needed} more {people} the hold"
        return f"{effect}. If no one acts, {start_text(event, self.now)}. For {these(self.vms)}"

    def sentence(self, verdict: Verdict) -> str:
        """Return the phrase that names the person and shows whether *verdict* has an effect."""
        is_hold, is_withdrawn = verdict.choice is Choice.HOLD, verdict.withdrawn_at is not None
        is_undecided = self.event.state is State.SCHEDULED and self.accepted is None
        verb, note = "held it" if is_hold else "approved it", ""
        if is_withdrawn:
            note = ", withdrawn"
        elif is_hold and is_undecided:
            verb = "holds it"
            agreed = [key for key, end in verdict.lifts.items() if end > format_time(self.now)]
            if agreed:
                names = ", ".join(self.details.names.get(key, key.partition(" ")[2]) for key in agreed)
                note = f", {names} agree{'s' if len(agreed) == 1 else ''} to lift the hold"
        elif is_undecided and verdict.digest != self.event.digest:
            verb = "approved an earlier version of it"
        elif is_undecided and verdict.expires_at <= format_time(self.now):
            note = ", expired"
        is_too_late = not is_withdrawn if is_hold else is_withdrawn
        if self.accepted is not None and is_too_late and (is_hold or verdict in self.accepted.verdicts):
            note += f" too late: posted to Azure at {self.accepted.clock}"
        return f"{verdict.user_name} {verb}{note}"


_TEXTS = {
    Transition.SCHEDULED: "Azure announced the event",
    Transition.UPDATED: "Azure changed the event",
    Transition.STARTED: "Azure started the event",
    Transition.COMPLETED: "Azure completed the event",
    Transition.CANCELED: "Azure canceled the event",
    Transition.ENDED: "The event ended in an unknown way",
}
_DECISIONS = {Choice.APPROVE: "Approval", Choice.HOLD: "Hold"}
_MOST_NAMES = 3


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the history."""

    at: str
    text: str
    note: str = ""
    is_past: bool = False
    """Whether the entry no longer has an effect."""


def shown_vms(view: EventView) -> list[str]:
    """Return the keys of the VMs whose names the history contains."""
    return [key for each in view.progress for key in each.vm_keys[:_MOST_NAMES]]


def history(view: EventView, records: Iterable[TransitionRecord], names: Mapping[str, str]) -> list[HistoryEntry]:
    """Return the changes by Azure, verdicts, decisions, and outcomes by time.

    *names* contains the names of `shown_vms`.
    """
    found = _by_azure(view.event, records)
    for each in view.details.verdicts:
        note, is_past = f"“{each.reason}”" if each.reason else "", each.withdrawn_at is not None
        found.append(HistoryEntry(at=each.made_at, text=view.sentence(each), note=note, is_past=is_past))
        if each.withdrawn_at is not None:
            text = f"{_DECISIONS[each.choice]} by {each.user_name} withdrawn"
            found.append(HistoryEntry(at=each.withdrawn_at, text=text))
    for decision in view.progress:
        vms = first_of([names.get(key, key) for key in decision.vm_keys], _MOST_NAMES)
        text = f"{_DECISIONS[decision.choice]} for the agent of {vms}: {decision.stage.value}"
        found.append(HistoryEntry(at=decision.made_at, text=text, note=decision.because, is_past=decision.is_past))
    found += map(_outcome, view.details.outcomes)
    return sorted(found, key=lambda each: each.at)


def _by_azure(event: EventState, records: Iterable[TransitionRecord]) -> list[HistoryEntry]:
    """Return one entry for each change by Azure, with the VMs that report the change."""
    members = {each.vm_key for each in event.vms if each.is_member} or {each.vm_key for each in event.vms}
    reports: dict[tuple[Transition, str], list[TransitionRecord]] = {}
    for record in sorted(records, key=lambda each: (each.observed_at, each.vm.name or "")):
        if record.transition in _TEXTS and record.event is not None and vm_key(record) in members:
            is_version = record.transition in {Transition.SCHEDULED, Transition.UPDATED}
            version = digest(record.event) if is_version else ""
            reports.setdefault((record.transition, version), []).append(record)
    found: list[HistoryEntry] = []
    shown: ScheduledEvent | None = None
    for (transition, version), of_version in reports.items():
        first = of_version[0]
        names = tuple(dict.fromkeys(each.vm.name or vm_key(each) for each in of_version))
        notes = [f"Reported by {first_of(names, _MOST_NAMES)}."]
        if version:
            notes = [*(() if shown is None or first.event is None else differences(shown, first.event)), *notes]
            shown = first.event
        impacts = dict.fromkeys(
            f"{each.impact.summary} on {each.vm.name or vm_key(each)}."
            for each in of_version
            if each.impact is not None
        )
        notes += list(impacts)[:_MOST_NAMES]
        found.append(HistoryEntry(at=first.observed_at, text=_TEXTS[transition], note=" ".join(notes)))
    return found


def _outcome(record: TransitionRecord) -> HistoryEntry:
    name = record.vm.name or vm_key(record)
    result = "" if record.approval is None else f" ({record.approval.result})"
    text = f"The agent of {name} posted the approval to Azure"
    if not is_accepted(record):
        is_refused = record.transition is Transition.APPROVAL_REFUSED
        text = f"The agent of {name} {'refused' if is_refused else 'did not complete'} the approval{result}"
    return HistoryEntry(at=record.observed_at, text=text)
