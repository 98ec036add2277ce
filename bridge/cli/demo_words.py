"""What a transition of the demo means in plain words, and what somebody on call would do then.

Written for a reader who has never heard of Scheduled Events. What is said of Azure is from Microsoft's page
"Scheduled Events for Linux VMs"; how long a freeze stays Started is from published incident notes.
"""

from __future__ import annotations

from bridge.events.record import Transition, TransitionRecord

_ON_CALL = {
    Transition.SCHEDULED: "On call: nothing is down; drain what cannot bear a pause.",
    Transition.STARTED: "On call: this explains the VM's alerts for some minutes.",
    Transition.COMPLETED: "On call: put the VM back to work; check long TCP sessions.",
    Transition.CANCELED: "On call: undo what you prepared.",
}


def meaning(record: TransitionRecord) -> str:
    """Return what happened, in one sentence."""
    event = record.event
    if event is None:
        return f"The agent says {record.transition.value}."
    kind = event.event_type or "event of unknown type"
    if record.transition is Transition.SCHEDULED:
        impact = f" of {event.duration_seconds} s" if event.duration_seconds else ""
        notice = f", {record.notice_seconds:.0f} s of notice" if record.notice_seconds is not None else ""
        return f"Azure announced a {kind}{impact}{notice}."
    if record.transition is Transition.STARTED:
        return f"The {kind} began: the VM may pause at any moment."
    if record.transition is Transition.COMPLETED:
        return "It had started and left the document: it is over."
    if record.transition is Transition.CANCELED:
        return "It left the document before it could start: called off."
    return f"The agent says {record.transition.value}."


def on_call(record: TransitionRecord) -> str:
    """Return what somebody on call would do now; empty where nothing is to be done."""
    return _ON_CALL.get(record.transition, "")
