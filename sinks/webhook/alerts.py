"""What the alert formats share: which transitions begin and end an alert, its severity, and its summary.

An alert begins with `scheduled` or `started`, is refreshed by `updated` and ends with `completed`, `canceled` or
`ended`. Heartbeats and the outcomes of approvals page nobody and make no request; send those to a log.
"""

from __future__ import annotations

from bridge.sink import Transition, TransitionRecord
from sinks.sentence import sentence

BEGINS = frozenset({Transition.SCHEDULED, Transition.STARTED, Transition.UPDATED})
ENDS = frozenset({Transition.COMPLETED, Transition.CANCELED, Transition.ENDED})

_SEVERITIES = {"Freeze": "info", "Preempt": "critical", "Terminate": "critical"}
_MOST_NAMES = 3


def severity(event_type: str | None) -> str:
    """Return info, warning or critical: a pause, an outage with an end, the end."""
    return _SEVERITIES.get(event_type or "", "warning")


def summary(record: TransitionRecord) -> str:
    """Return what is happening to whom: ``Reboot of WestNO_0 scheduled, not before 2026-11-20 11:15:00 UTC``."""
    event = record.event
    if event is None:
        return f"{record.transition.value} from {record.vm.name or 'an Azure VM'}"
    names = event.resources or ()
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    whom = f" of {', '.join(names[:_MOST_NAMES])}{more}" if names else ""
    what = "test: nothing happens" if record.transition is Transition.TEST else record.transition.value
    is_ahead = event.not_before is not None and record.transition not in ENDS
    when = f", not before {event.not_before:%Y-%m-%d %H:%M:%S} UTC" if is_ahead else ""
    return f"{event.event_type or 'Event of unknown type'}{whom} {what}{when}"


def details(record: TransitionRecord) -> str:
    """Return the whole sentence that a person reads in text output, without its time."""
    return sentence(record).removeprefix(record.observed_at).strip()
