"""Converts a transition record to one readable line of text.

The line contains the transition, the event, the announced time, and Microsoft's advice for the event. Control
characters and bidirectional characters are escaped so that an event's description cannot forge a log line or change the
terminal's colors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bridge.sink import Evidence, ScheduledEvent, Transition, TransitionRecord, duration, encode, escaped

_MOST_NAMES = 5

#: Azure gives more than an hour of notice only for a predicted hardware failure.
_PREDICTED_SECONDS = 3_600
_PREDICTED = (
    "A hardware failure is predicted: Microsoft recommends redeploying the VM yourself as soon as possible, "
    "because the hardware might fail before NotBefore."
)
_ASKED_FOR = "A user requested this event. An approval starts the event now instead of at NotBefore."


def sentence(record: TransitionRecord) -> str:
    """Return *record* as one line, without a line break at the end."""
    start = f"{record.observed_at} {_headline(record)}"
    measured = "" if record.impact is None else record.impact.summary
    notes = [
        note for note in (_change(record), _outcome(record), measured, _description(record), _advice(record)) if note
    ]
    return escaped(". ".join([start, *(note.rstrip(".") for note in notes)]))


def line(record: TransitionRecord, kind: Literal["json", "text"]) -> bytes:
    """Return *record* as one line of JSON or text."""
    return (sentence(record).encode() if kind == "text" else encode(record)) + b"\n"


def _headline(record: TransitionRecord) -> str:
    sure = "" if record.evidence is Evidence.OBSERVED else f" ({record.evidence.value})"
    what = f"{record.transition.value}{sure}"
    event = record.event
    if event is None:
        return f"{what} from {record.vm.name or 'this VM'}"
    return f"{what}: {event.event_type or 'event of unknown type'} of {_who(record, event)}{_when(record, event)}"


def _who(record: TransitionRecord, event: ScheduledEvent) -> str:
    names = event.resources or ()
    if record.affects_this_vm:
        others = len(set(names)) - 1
        me = f"this VM ({record.vm.name})" if record.vm.name else "this VM"
        return f"{me} and {others} more" if others > 0 else me
    if not names:
        return "no VM by name"
    return first_names(names, _MOST_NAMES)


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first *most* of *names*, and the number of others: ``vm_0, vm_1 and 6 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _when(record: TransitionRecord, event: ScheduledEvent) -> str:
    """Return the announced time. A remaining time would be wrong for a later reader."""
    if record.transition.is_ending:
        return ""
    if event.not_before is None:
        return f", not before {event.not_before_raw!r} (unreadable)" if event.not_before_raw else ""
    return f", not before {event.not_before:%Y-%m-%d %H:%M:%S} UTC"


def _change(record: TransitionRecord) -> str:
    return f"Changed: {', '.join(record.changed)}" if record.transition is Transition.UPDATED and record.changed else ""


def _outcome(record: TransitionRecord) -> str:
    approval = record.approval
    if approval is None:
        return ""
    reason = f" ({approval.reason})" if approval.reason else ""
    return f"Approval by {approval.source}: {approval.result}{reason}"


def _description(record: TransitionRecord) -> str:
    event = record.event
    if event is None:
        return ""
    impact = ""
    if event.duration_seconds is not None:
        impact = f"Impact {duration(event.duration_seconds)}" if event.duration_seconds else "No impact expected"
    return ". ".join(text for text in ((event.description or "").strip().rstrip("."), impact) if text)


def _advice(record: TransitionRecord) -> str:
    event = record.event
    is_announced = record.transition in {Transition.SCHEDULED, Transition.UPDATED, Transition.TEST}
    if event is None or event.event_status != "Scheduled" or not is_announced:
        return ""
    if event.event_source == "User":
        return _ASKED_FOR
    is_early = record.notice_seconds is not None and record.notice_seconds > _PREDICTED_SECONDS
    return _PREDICTED if event.event_type == "Redeploy" and event.event_source == "Platform" and is_early else ""
