"""Defines the transition record, its JSON format, and its ID.

A record has the same ID on every sink and every retry, even if the agent crashes and then observes the same transition
again. If a transition happens twice, the second record gets a new ID (`record_id`).

Consumers depend on the JSON format. Every field is always present, and null means unknown or not applicable. The order
of the fields never changes, and all times are in UTC.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Any

import msgspec

from bridge.clock import format_time
from bridge.events.event import Incarnation, ScheduledEvent, VmIdentity, compact_json

SCHEMA_VERSION = 1
SCHEMA_ID = "urn:scheduled-events-bridge:transition-record:v1"

#: The namespace of all record IDs. Never change it, because consumers detect duplicates by their IDs.
NAMESPACE = uuid.UUID("6f0f6f6c-3c7e-5d4b-9a53-0b8b0b6d5a1e")


_REPEAT_KEY_LENGTH = 16


class Transition(str, Enum):
    """The type of a record: a change by Azure (six types), or an action of the agent."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    UPDATED = "updated"
    COMPLETED = "completed"
    CANCELED = "canceled"
    ENDED = "ended"
    APPROVED = "approved"
    APPROVAL_REFUSED = "approval_refused"
    APPROVAL_FAILED = "approval_failed"
    HEARTBEAT = "heartbeat"
    TEST = "test"

    @property
    def is_ending(self) -> bool:
        """Whether the transition ends the event."""
        return self in {Transition.COMPLETED, Transition.CANCELED, Transition.ENDED}

    @property
    def is_by_azure(self) -> bool:
        """Whether a change by Azure caused the record."""
        return self.is_ending or self in {Transition.SCHEDULED, Transition.STARTED, Transition.UPDATED}


class Evidence(str, Enum):
    """The certainty of a transition."""

    OBSERVED = "observed"
    """The documents show the transition."""
    INFERRED = "inferred"
    """The event vanished, and all known facts match this ending."""
    BOOT_ID = "boot_id"
    """The event vanished, and this VM has booted at a matching time."""
    UNKNOWN = "unknown"
    """The event vanished for an unknown reason."""


class Verdict(str, Enum):
    """The verdict of a decision: approve or hold."""

    APPROVE = "approve"
    HOLD = "hold"


class ApprovalResult(str, Enum):
    """The result of an approval. A refused approval has a `RefusalReason` instead."""

    ACCEPTED = "accepted"
    ALREADY_APPROVED = "already_approved"
    DRY_RUN = "dry_run"
    UNANSWERED = "unanswered"
    GAVE_UP = "gave_up"
    REJECTED = "rejected"
    DISABLED = "disabled"
    UNSAFE_FILES = "unsafe_files"
    COMMAND_FAILED = "command_failed"


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """The decision that led to an accepted, refused, or failed approval."""

    source: str
    """"rule:NAME", "portal", or "cli"."""
    decision_id: str | None = None
    """The decision's id; None for a rule."""
    approvers: tuple[str, ...] = ()
    """The names of the approvers."""
    reason: str | None = None
    """The reason that the approvers gave."""
    result: str
    """accepted, dry_run, or the reason of the refusal or failure."""
    http_status: int | None = None
    """The status of Azure's response. None if the agent sent no request."""
    jws_sha256: tuple[str, ...] = ()
    """SHA-256 (hexadecimal) of the text of each signed decision behind the outcome."""


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A time during which the VM did not run, as measured inside the VM."""

    at: str
    """Start of the pause: UTC, milliseconds."""
    seconds: float | None
    """Length of the pause. None if the length is unknown. *reason* then contains the cause."""
    late_seconds: float
    """The part that the monotonic clock shows. A timer fired this much too late while the VM did no work."""
    step_seconds: float
    """The part that the monotonic clock does not show, because that clock stood still."""
    source: str
    """Clock that shows the length: timer, ptp_hyperv, realtime, or date_header."""
    reason: str | None = None
    """Why *seconds* is None."""


class DowntimeParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a downtime, in seconds."""

    until_kernel_seconds: float | None = None
    """From the last sign of life before the boot until the kernel started."""
    until_agent_seconds: float | None = None
    """From the start of the kernel until the agent ran."""


class Impact(msgspec.Struct, frozen=True, kw_only=True):
    """The impact of an event on this VM, as measured inside the VM. Null means unknown."""

    pauses: tuple[Pause, ...] = ()
    """The pauses during the event. Events that overlap share their pauses."""
    longest_seconds: float | None = None
    """Length of the longest pause; 0 if the agent sampled the whole event and measured no pause."""
    total_seconds: float | None = None
    """Sum of the lengths of all pauses. Never add up the pauses of several events."""
    resolution_seconds: float | None = None
    """Smallest difference that the measurement can show."""
    coverage: float | None = None
    """Fraction of the time from Started to the ending that the agent sampled. A restart lowers it."""
    agent_stalled_seconds: float | None = None
    """Time during which the VM ran, but the agent did not."""
    downtime_seconds: float | None = None
    """From the last sign of life before a reboot to the agent's start. None if the VM did not boot."""
    downtime_uncertainty_seconds: float | None = None
    """The downtime can be shorter by up to this time."""
    downtime_parts: DowntimeParts | None = None
    """The parts of the downtime."""
    reason: str | None = None
    """Why a measurement is missing. None if nothing is missing."""

    @property
    def summary(self) -> str:
        """Return the most important measurement in words."""
        if self.downtime_seconds is not None:
            uncertainty = self.downtime_uncertainty_seconds or 0.0
            return f"Measured downtime: {self.downtime_seconds:.1f} s (up to {uncertainty:.1f} s less)"
        if self.longest_seconds is None:
            return f"Measured pause: unknown ({(self.reason or '').rstrip('.')})"
        if not self.longest_seconds:
            return "Measured pause: none"
        resolution = "unknown" if self.resolution_seconds is None else f"{self.resolution_seconds:.2f} s"
        return f"Measured pause: {self.longest_seconds:.1f} s (resolution {resolution})"


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier transition of an event that has ended."""

    transition: Transition
    """The transition of the earlier record."""
    observed_at: str
    """The observed_at of the earlier record."""
    decision_id: str | None = None
    """The id of the decision behind an approval outcome, otherwise None."""


class EventHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The stored history of one event."""

    was_started: bool = False
    """Whether any record has shown the event as Started."""
    has_ended: bool = False
    """Whether a record has ended the event. It stays true if the event comes back."""
    counts: dict[str, int] = {}
    """How many records exist for each `repeat_key`. The next record with the same content uses this number as its n."""


class TransitionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One change in the Scheduled Events document, in the format that every sink sends."""

    schema_version: int = SCHEMA_VERSION
    """Version of the record's shape. New fields do not change the version."""
    id: str
    """UUID: the same on every sink, on every retry, and if the same change is seen again after a crash."""
    transition_key: str
    """SHA-256: the same on every VM that saw the same history of the event. Use it to group records, never to drop
    them."""
    stream_id: str
    """UUIDv7 of this run of the agent. It is new at each start and sorts after the ids of earlier starts."""
    sequence: int
    """A number that continues across starts. Order one VM's records by stream_id and sequence, never by arrival."""
    active_event_ids: tuple[str, ...] | None = None
    """EventIds of this VM's open events, sorted. An event that is not in the list has ended. None: unknown."""
    transition: Transition
    """The change in one word."""
    evidence: Evidence
    """Certainty of the transition: observed, inferred, boot_id, or unknown."""
    observed_at: str
    """Time of the first response that showed the change: UTC, milliseconds, e.g. 2026-11-20T11:00:01.123Z."""
    incarnation: Incarnation
    """DocumentIncarnation of the first response that showed the change; None if it is not a number."""
    previous_incarnation: Incarnation
    """DocumentIncarnation of the response before it; None if there was no response."""
    event: ScheduledEvent | None
    """The event after the change. For a vanished event, its last known form. None for a heartbeat."""
    previous: dict[str, Any] | None
    """event_status, not_before, and the old value of each field in *changed*. None for a new event."""
    changed: tuple[str, ...]
    """Names of the event's fields that changed. Empty for new and vanished events."""
    notice_seconds: float | None
    """NotBefore minus observed_at. Negative if NotBefore has passed, None if it is unknown."""
    affects_this_vm: bool | None
    """Whether Resources contains this VM. None if either is unknown."""
    vm: VmIdentity
    """The VM whose agent sent the record."""
    labels: dict[str, str]
    """Labels from the configuration."""
    approval: Approval | None = None
    """The decision behind an approval outcome. None for every other record."""
    impact: Impact | None = None
    """The measured impact of an event that is completed or ended. None if it is unknown, and for all other records."""
    timeline: tuple[TimelineEntry, ...] | None = None
    """The earlier transitions of an event that has ended, oldest first. None for every other record."""

    @property
    def event_key(self) -> str:
        """Return the key of the event, or the ID of a record without an event."""
        return self.id if self.event is None else self.event.key

    @property
    def is_urgent(self) -> bool:
        """Whether the event is a spot eviction or a deletion."""
        return self.event is not None and self.event.is_urgent


def new_record(
    transition: Transition,
    observed_at: datetime,
    *,
    incarnation: Incarnation = None,
    previous_incarnation: Incarnation = None,
    evidence: Evidence = Evidence.OBSERVED,
    event: ScheduledEvent | None = None,
    previous: dict[str, Any] | None = None,
    changed: tuple[str, ...] = (),
    approval: Approval | None = None,
) -> TransitionRecord:
    """Return a record without its ID, VM, labels, and sequence, which the outbox adds."""
    notice = None if event is None or event.not_before is None else event.not_before - observed_at
    return TransitionRecord(
        id="",
        transition_key="",
        stream_id="",
        sequence=0,
        active_event_ids=None,
        transition=transition,
        evidence=evidence,
        observed_at=format_time(observed_at),
        incarnation=incarnation,
        previous_incarnation=previous_incarnation,
        event=event,
        previous=previous,
        changed=changed,
        notice_seconds=None if notice is None else round(notice.total_seconds(), 3),
        affects_this_vm=None,
        vm=VmIdentity(),
        labels={},
        approval=approval,
    )


decode_record = msgspec.json.Decoder(TransitionRecord).decode
"""Decodes a record that `encode` has encoded."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a transition record (draft 2020-12)."""
    schema = msgspec.json.schema(TransitionRecord)
    for each in schema["$defs"].values():
        each["description"] = " ".join(each.get("description", "").split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}


def record_id(
    *,
    vm_key: str,
    event_key: str,
    transition: Transition,
    event: ScheduledEvent | None,
    n: int,
    outcome: tuple[str, str] | None = None,
) -> str:
    """Return the ID of a record: a UUIDv5 of the VM, the event, the transition, and *n*.

    *n* is the number of earlier records of this VM that have the same event key and `repeat_key`. A transition that
    occurs again therefore gets a new ID. The ID of an approval's record also depends on *outcome*, which contains the
    decision ID and the result.

    The ID does not depend on the time, the incarnation, or the evidence. If the agent crashes and then observes the
    same transition again, the ID is therefore the same.
    """
    return str(uuid.uuid5(NAMESPACE, _name([2, vm_key, event_key, transition.value], event, [n, *(outcome or ())])))


def transition_key(event_key: str, transition: Transition, event: ScheduledEvent | None, *, n: int) -> str:
    """Return a key that is equal on all VMs with the same history of the event."""
    return hashlib.sha256(_name([event_key, transition.value], event, [n]).encode()).hexdigest()


def repeat_key(transition: Transition, event: ScheduledEvent | None) -> str:
    """Return a short hash of the transition and the event, which is equal for repetitions."""
    return hashlib.sha256(_name([transition.value], event).encode()).hexdigest()[:_REPEAT_KEY_LENGTH]


def _name(before: Sequence[object], event: ScheduledEvent | None, after: Sequence[object] = ()) -> str:
    shown = "null" if event is None else event.canonical_json
    return f"[{','.join([*map(compact_json, before), shown, *map(compact_json, after)])}]"


def vm_key(vm: VmIdentity) -> str:
    """Return the part of the ID that identifies the VM: the lower-case vmId, else the name."""
    return vm.vm_id.lower() if vm.vm_id else vm.name or ""
