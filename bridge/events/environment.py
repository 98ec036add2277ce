"""A transition record as environment variables, for the programs that the agent runs.

The command sink and the command of an approval set the same variables. Every variable is always set, and is empty
without a value, so that ``set -u`` and ``[ -n "$X" ]`` both work. Each value is one line: control characters and NUL
become spaces. A value has at most 1,024 characters unless the list gives another limit, because the size of an
environment is limited (execve(2): 128 KiB per variable on Linux; 32,767 characters in all on Windows). Standard input
has the complete record.

    SCHEDULED_EVENT_ID                the record's id: the same each time this record is sent
    SCHEDULED_EVENT_TRANSITION        scheduled, started, updated, completed, canceled, ended, approved, ..., test
    SCHEDULED_EVENT_EVIDENCE          observed, inferred, boot_id, or unknown: the certainty
    SCHEDULED_EVENT_OBSERVED_AT       time of the observation, UTC: 2026-11-20T11:00:01.123Z
    SCHEDULED_EVENT_SEQUENCE          orders this VM's records
    SCHEDULED_EVENT_EVENT_ID          Azure's EventId
    SCHEDULED_EVENT_EVENT_TYPE        Freeze, Reboot, Redeploy, Preempt or Terminate
    SCHEDULED_EVENT_EVENT_STATUS      Scheduled or Started
    SCHEDULED_EVENT_EVENT_SOURCE      Platform or User
    SCHEDULED_EVENT_RESOURCES         the VMs affected, joined by commas; at most 8,192 characters of whole names
    SCHEDULED_EVENT_RESOURCE_COUNT    how many VMs are affected, also when not all names fit
    SCHEDULED_EVENT_AFFECTS_THIS_VM   true, false, or empty if unknown
    SCHEDULED_EVENT_NOT_BEFORE        UTC: 2026-11-20T11:15:00Z; empty if unknown or already started
    SCHEDULED_EVENT_NOTICE_SECONDS    NotBefore minus the time of observation; may be negative
    SCHEDULED_EVENT_DURATION_SECONDS  the expected impact
    SCHEDULED_EVENT_DESCRIPTION       Azure's description
    SCHEDULED_EVENT_CHANGED           of an update: the fields that changed, joined by commas
    SCHEDULED_EVENT_VM_NAME           the name of this VM
    SCHEDULED_EVENT_VM_ID             its vmId
    SCHEDULED_EVENT_VM_RESOURCE_ID    its ARM resource id
    SCHEDULED_EVENT_APPROVAL_RESULT   of an approval's record: its result

A command of an approval gets one more:

    SCHEDULED_EVENT_RULE              the name of the rule; empty for the command of approval.remote
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
#: For a heartbeat, and for an approval of an unknown event.
_NO_EVENT = ScheduledEvent(event_status="")


def environment_of(record: TransitionRecord, *, rule: str | None = None) -> dict[str, str]:
    """Return the variables for *record*. The command of an approval also has its *rule*."""
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
    """Return *value* without an exponent, because shells and ``test`` cannot read 9e+02."""
    return None if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def _joined(names: Iterable[str]) -> str:
    """Return as many complete *names* as fit, joined by commas."""
    fitting: list[str] = []
    left = _MOST_NAME_CHARACTERS
    for name in names:
        left -= len(name) + 1
        if left < 0:
            break
        fitting.append(name)
    return ",".join(fitting)
