"""Computes the values that the templates show."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from bridge.clock import format_time
from bridge.portal.decision_progress import AcceptedApproval, DecisionProgress, accepted_approval, progress_of
from bridge.portal.fleet import EventState, State
from bridge.portal.history import HistoryEntry
from bridge.portal.sentences import (
    STATE_WORDS,
    Buttons,
    PageContext,
    buttons,
    clock_text,
    effect_of,
    how_many,
    next_event,
    these,
    vm_names,
    why_not_yet,
)
from bridge.portal.store.event_details import EventDetails
from bridge.portal.two_person_rule import lifts_needed, rule, with_lift
from bridge.portal.verdicts import Choice, Lift, Verdict


class VerdictView(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict of one person."""

    verdict: Verdict
    sentence: str
    withdrawing: str | None
    """The effect of a withdrawal, or None if this person cannot withdraw the verdict."""


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """An event as one person sees it."""

    event: EventState
    title: str
    state: str
    vms: tuple[str, ...]
    next_event: str
    """What happens if no one acts."""
    until: datetime | None
    """NotBefore, if it is in the future. The page counts down to this time."""
    why_not_yet: str
    buttons: Buttons
    verdicts: Sequence[VerdictView]
    progress: Sequence[DecisionProgress]

    @property
    def decided(self) -> list[HistoryEntry]:
        """Return the verdicts as entries of the history."""
        return [
            HistoryEntry(
                at=each.verdict.made_at,
                text=each.sentence,
                note=f"“{each.verdict.reason}”" if each.verdict.reason else "",
                is_past=each.verdict.withdrawn_at is not None,
            )
            for each in self.verdicts
        ]

    @property
    def counts(self) -> str:
        """Return the number of VMs in each state: "98 announced, 1 started, 1 not confirmed"."""
        words = [f"{number} {STATE_WORDS[State(name)]}" for name, number in self.event.counts.items()]
        return ", ".join(
            [*words, *([f"{len(self.event.unconfirmed)} not confirmed"] if self.event.unconfirmed else [])]
        )

    @property
    def differing(self) -> str:
        """Return the number of VMs that report a different version, or ""."""
        number = self.event.differing
        return f"by {number} VM{'' if number == 1 else 's'}" if number else ""

    @property
    def impact(self) -> str:
        """Return the effect on the VM: "5 s pause" for a Freeze."""
        return effect_of(self.event.event.event_type, self.event.event.duration_seconds)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Return further fields of the event, as names and texts."""
        shown = self.event.event
        pairs = (
            ("NotBefore", shown.not_before_raw),
            ("Description", shown.description),
            ("Impact", self.impact),
            ("Source", shown.event_source),
            ("Groups", ", ".join(self.event.groups)),
            ("Not confirmed", ", ".join(self.event.unconfirmed)),
            ("Reported differently", self.differing),
            ("EventId", shown.event_id),
        )
        return [(name, text) for name, text in pairs if text]


def view_of(details: EventDetails, context: PageContext) -> EventView:
    """Return the view of the event of *details*."""
    event = details.event
    ruling = rule(details.counting, digest=event.digest, at=format_time(context.now), required=context.required)
    accepted = accepted_approval(details)
    progress = progress_of(details, context.agents, now=context.now, accepted=accepted)
    names, at = vm_names(event), event.event.not_before
    counts_down = event.state is State.SCHEDULED and at is not None and at > context.now and accepted is None
    return EventView(
        event=event,
        title=f"{event.event.event_type or 'Event'} of {how_many(names)}",
        state=STATE_WORDS[event.state],
        vms=names,
        next_event=next_event(event, context.now, accepted),
        until=at if counts_down else None,
        why_not_yet=why_not_yet(details, ruling, progress, accepted),
        buttons=buttons(event, ruling, progress, context, accepted=accepted),
        verdicts=[_verdict_view(each, details, context, accepted) for each in details.verdicts],
        progress=progress,
    )


def _verdict_view(
    verdict: Verdict, details: EventDetails, context: PageContext, accepted: AcceptedApproval | None
) -> VerdictView:
    event = details.event
    can_withdraw = (
        verdict.withdrawn_at is None
        and event.state is State.SCHEDULED
        and context.kid is not None
        and context.person.why_not_decide(event, is_hold=True) is None
    )
    effect = "stops the approval unless it is already posted to Azure"
    if verdict.choice is Choice.HOLD:
        holds = [each for each in details.counting if each.choice is Choice.HOLD and each.withdrawn_at is None]
        effect = "leaves the event held by another person"
        if len(holds) == 1:  # PROTOCOL.md, section 8
            effect = "lets people approve the event. The rules of the VMs stay stopped until an approval"
    lifts = with_lift(verdict, _lift(context), (), at=format_time(context.now))
    needed = lifts_needed(verdict, lifts, by=context.person.key, required=context.required)
    if needed:
        more = "1 more person withdraws" if needed == 1 else f"{needed} more people withdraw"
        effect = f"leaves the event held until {more} the hold"
    withdrawing = f"{effect}. If no one acts, Azure starts it {clock_text(event)}. For {these(vm_names(event))}"
    return VerdictView(
        verdict=verdict,
        sentence=f"{verdict.user_name} {_verb(verdict, details, context.now, accepted)}",
        withdrawing=withdrawing if can_withdraw else None,
    )


def _lift(context: PageContext) -> Lift:
    return Lift(person_key=context.person.key, user_name=context.person.name, expires_at=format_time(context.now))


def _verb(verdict: Verdict, details: EventDetails, now: datetime, accepted: AcceptedApproval | None) -> str:
    is_hold, is_withdrawn = verdict.choice is Choice.HOLD, verdict.withdrawn_at is not None
    is_undecided = details.event.state is State.SCHEDULED and accepted is None
    verb, note = "held it" if is_hold else "approved it", ""
    if is_withdrawn:
        note = ", withdrawn"
    elif is_hold and is_undecided:
        verb = "holds it"
    elif is_undecided and verdict.digest != details.event.digest:
        verb = "approved an earlier version of it"
    elif is_undecided and verdict.expires_at <= format_time(now):
        note = ", expired"
    if accepted is not None and (not is_withdrawn if is_hold else is_withdrawn and verdict in accepted.verdicts):
        note += f" too late: posted to Azure at {accepted.clock}"
    return verb + note
