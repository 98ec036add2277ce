"""What the alert formats share: which transitions begin and end an alert, its severity, and its summary.

An alert begins with `scheduled` or `started`, is refreshed by `updated` and ends with `completed`, `canceled` or
`ended`. Heartbeats and the outcomes of approvals page nobody and make no request; send those to a log.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

from bridge.sink import ScheduledEvent, Transition, TransitionRecord, escaped
from sinks.sentence import first_names, sentence

_BEGINS = frozenset({Transition.SCHEDULED, Transition.STARTED, Transition.UPDATED})


class Severity(str, Enum):
    """How bad it is: a pause, an outage that ends, the end of the VM."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


_SEVERITIES = {"Freeze": Severity.INFO, "Preempt": Severity.CRITICAL, "Terminate": Severity.CRITICAL}
_MOST_NAMES = 3
#: What each alert format opens.
_ALERTS = {"alertmanager": "an alert", "pagerduty": "an incident"}
_SILENT = frozenset(
    {Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED, Transition.HEARTBEAT}
)


def alerting_event(record: TransitionRecord) -> ScheduledEvent | None:
    """Return the event of *record* when the alert formats make a request of that transition."""
    transition = record.transition
    is_part = transition in _BEGINS or transition.is_ending or transition is Transition.TEST
    return record.event if is_part else None


def severity(event_type: str | None) -> Severity:
    """Return how bad an event of that type is."""
    return _SEVERITIES.get(event_type or "", Severity.WARNING)


def summary(record: TransitionRecord) -> str:
    """Return what is happening to whom: ``Reboot of WestNO_0 scheduled, not before 2026-11-20 11:15:00 UTC``."""
    event = record.event
    if event is None:
        return escaped(f"{record.transition.value} from {record.vm.name or 'an Azure VM'}")
    names = event.resources or ()
    whom = f" of {first_names(names, _MOST_NAMES)}" if names else ""
    what = "test: nothing happens" if record.transition is Transition.TEST else record.transition.value
    is_ahead = event.not_before is not None and not record.transition.is_ending
    when = f", not before {event.not_before:%Y-%m-%d %H:%M:%S} UTC" if is_ahead else ""
    return escaped(f"{event.event_type or 'Event of unknown type'}{whom} {what}{when}")


def details(record: TransitionRecord) -> str:
    """Return the whole sentence that a person reads in text output, without its time."""
    return sentence(record).removeprefix(record.observed_at).strip()


def alert_warnings(config: Any) -> list[str]:
    """Return a sentence for each setting of *config* by which an alert never fires, never resolves, or is none."""
    if config.format not in _ALERTS:
        return []
    chosen = set(Transition) if config.transitions is None else {Transition(each) for each in config.transitions}
    return [*_about_transitions(config, chosen), *_about_settings(config)]


def _about_transitions(config: Any, chosen: set[Transition]) -> Iterator[str]:
    alert = _ALERTS[config.format]
    missing = [each.value for each in Transition if each.is_ending and each not in chosen]
    begins = chosen & {Transition.SCHEDULED, Transition.STARTED}
    if begins and missing:
        until = " until it ages out" if config.format == "alertmanager" else ""
        yield (
            f"transitions lacks {', '.join(missing)}: {alert} of an event that ends so is not resolved{until}. Add "
            f"{'it' if len(missing) == 1 else 'them'}."
        )
    elif not begins and any(each.is_ending for each in chosen):
        yield f"transitions names neither scheduled nor started: {alert} that it would resolve never opens."
    silent = [each.value for each in Transition if each in chosen and each in _SILENT]
    if config.transitions is not None and silent:
        yield f"transitions names {', '.join(silent)}, for which format = {config.format!r} sends nothing."


def _about_settings(config: Any) -> Iterator[str]:
    if config.heartbeat:
        yield (
            f"heartbeat = true does nothing: format = {config.format!r} sends nothing for heartbeats. Give them a "
            "table of their own, with another format."
        )
    if config.format == "pagerduty" and config.max_age_seconds is not None:
        yield (
            f"max_age_seconds = {config.max_age_seconds:g} gives up the end of an event too: an incident whose end "
            "cannot be sent for so long stays open."
        )
    if config.format == "pagerduty" and config.urgent_as == "alert":
        yield (
            "urgent_as = 'alert' opens an incident for an eviction or a deletion, which takes along the VM that would "
            "resolve it: it stays open until a person, or another VM of the event, resolves it."
        )
