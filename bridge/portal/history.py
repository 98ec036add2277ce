"""Builds the history of an event for its page, oldest entry first.

The history contains only records of VMs that the event names. The table of VMs on the same page also contains the
reports of other VMs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from bridge.approval.digest import digest
from bridge.events.event import ScheduledEvent
from bridge.events.record import Transition, TransitionRecord
from bridge.portal.decision_progress import is_accepted
from bridge.portal.fleet import EventState
from bridge.portal.sentences import differences, first_of
from bridge.portal.verdicts import Choice
from bridge.portal.views import EventView
from bridge.portal.vm_state import vm_key

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
