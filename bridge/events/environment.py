"""Converts a record to environment variables for programs that the agent runs.

The command sink and the commands in approval rules receive the same variables (docs/reference/sinks.md). Every variable
is set, even if its value is empty, so that scripts can use ``set -u``.

Control characters are replaced with spaces, so each value is a single line. To respect the limits of the operating
system, a value has at most 1,024 characters, and the list of VM names has at most 8,192. Linux allows 128 KiB for each
variable (execve(2)), and Windows allows 32,767 characters in total.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridge.clock import format_time
from bridge.events.event import ScheduledEvent
from bridge.events.record import TransitionRecord
from bridge.text import one_line

ENVIRONMENT_PREFIX = "SCHEDULED_EVENT_"

_MOST_CHARACTERS = 1_024
_MOST_NAME_CHARACTERS = 8_192
#: Used for records that contain no event, such as heartbeats and approvals of unknown events.
_NO_EVENT = ScheduledEvent(event_status="")


def environment_of(record: TransitionRecord, *, rule: str | None = None) -> dict[str, str]:
    """Return the variables for *record*, including *rule* for the command of an approval."""
    vm, approval = record.vm, record.approval
    values: dict[str, str | None] = {
        "ID": record.id,
        "TRANSITION": record.transition.value,
        "EVIDENCE": record.evidence.value,
        "OBSERVED_AT": record.observed_at,
        "SEQUENCE": str(record.sequence),
        **_of_event(record.event or _NO_EVENT),
        "AFFECTS_THIS_VM": None if record.affects_this_vm is None else str(record.affects_this_vm).lower(),
        "NOTICE_SECONDS": _number(record.notice_seconds),
        "CHANGED": ",".join(record.changed),
        "VM_NAME": vm.name,
        "VM_ID": vm.vm_id,
        "VM_RESOURCE_ID": vm.resource_id,
        "APPROVAL_RESULT": None if approval is None else approval.result,
        **({} if rule is None else {"RULE": rule}),
    }
    limits = {"RESOURCES": _MOST_NAME_CHARACTERS}
    return {
        ENVIRONMENT_PREFIX + name: one_line(value or "", limits.get(name, _MOST_CHARACTERS))
        for name, value in values.items()
    }


def _of_event(event: ScheduledEvent) -> dict[str, str | None]:
    names, moment = event.resources or (), event.not_before
    return {
        "EVENT_ID": event.event_id,
        "EVENT_TYPE": event.event_type,
        "EVENT_STATUS": event.event_status,
        "EVENT_SOURCE": event.event_source,
        "RESOURCES": _joined(names),
        "RESOURCE_COUNT": str(len(names)),
        "NOT_BEFORE": None if moment is None else format_time(moment).replace(".000Z", "Z"),
        "DURATION_SECONDS": _number(event.duration_seconds),
        "DESCRIPTION": event.description,
    }


def _number(value: float | None) -> str | None:
    """Return *value* without an exponent, because shells cannot read numbers such as 9e+02."""
    return None if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def _joined(names: Iterable[str]) -> str:
    text = ",".join(names)
    return text if len(text) <= _MOST_NAME_CHARACTERS else text[: _MOST_NAME_CHARACTERS + 1].rpartition(",")[0]
