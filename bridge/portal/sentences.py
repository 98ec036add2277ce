"""Builds the phrases that several pages show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta

from bridge.approval.digest import canonical_json
from bridge.clock import parse_time
from bridge.events.event import ScheduledEvent
from bridge.portal.fleet import EventState, State
from bridge.text import duration

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


def vm_names(event: EventState) -> tuple[str, ...]:
    """Return the names in Resources.

    Without Resources, return the VMs that have reported the event.
    """
    return tuple(dict.fromkeys(event.event.resources or ())) or tuple(vm.name or vm.vm_key for vm in event.vms)


def how_many(number: int, noun: str = "VM") -> str:
    """Return "3 VMs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def these(names: Sequence[str]) -> str:
    """Return *names*, or the first 20 of them: "these 3 VMs: a, b, c"."""
    if len(names) == 1:
        return f"this VM: {names[0]}"
    return f"these {len(names)} VMs: {first_of(names, _MOST_NAMES)}"


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first names, and the number of the others: "a, b, and 2 more"."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f", and {more} more" if more > 0 else "")


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
    old, new = (json.loads(canonical_json(each)) for each in (before, now))
    changed = [name for name in new if old[name] != new[name]]
    return tuple(f"{name} changed from {_text(old[name])} to {_text(new[name])}." for name in changed)


def start_text(event: EventState, now: datetime) -> str:
    """Return "Azure starts the event at 11:15:00 UTC".

    The text includes the date if an agent first observed the event at least 12 hours before NotBefore.
    """
    at = event.event.not_before
    if at is None:
        return "Azure starts the event at an unknown time"
    if at <= now:
        return "Azure can start the event at any moment"
    near = abs(at - parse_time(event.first_observed_at)) < timedelta(hours=12)
    return f"Azure starts the event {'at' if near else f'on {at:%Y-%m-%d} at'} {at:%H:%M:%S} UTC"


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "nothing"
    return "unknown" if value is None else str(value)
