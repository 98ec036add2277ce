"""The wire record and the parsed document: frozen values, and the only two ways to write them down.

A transition record is what consumers depend on, so its shape lives in one place and nowhere else: field order is the
order on the wire, every field is always present, null means unknown or not applicable. Times are UTC. JSON is ASCII
(a lone surrogate would break SQLite and UUIDs further down).
"""

from __future__ import annotations

import hashlib
import json
import uuid
from datetime import datetime, timezone
from enum import Enum
from typing import Any, TypeAlias

import msgspec

SCHEMA_VERSION = 1
SCHEMA_ID = "urn:scheduled-events-bridge:transition-record:v1"

#: The fixed namespace of record ids. Never change it: consumers recognise duplicates by ids made under it.
NAMESPACE = uuid.UUID("6f0f6f6c-3c7e-5d4b-9a53-0b8b0b6d5a1e")

Incarnation: TypeAlias = int | str | None

#: The event types that leave nobody behind to tell: they go first, and their retries never wait longer than 2 s.
URGENT_EVENT_TYPES = frozenset({"Preempt", "Terminate"})


class Transition(str, Enum):
    """What happened. The first six are Azure's doing; the rest are the agent's own words."""

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


class Evidence(str, Enum):
    """How sure the agent is of a transition."""

    OBSERVED = "observed"
    """A document said so."""
    INFERRED = "inferred"
    """The event vanished, and everything known fits this ending."""
    BOOT_ID = "boot_id"
    """The event vanished, and this VM has booted since."""
    UNKNOWN = "unknown"
    """The event vanished, and nothing says why."""


class ScheduledEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event as the document shows it; a field that an old api-version lacks, or that is odd, is null."""

    event_id: str | None = None
    """Azure's EventId: the same for the whole life of an event."""
    event_type: str | None = None
    """Freeze, Reboot, Redeploy, Preempt, Terminate; others are passed on as they come."""
    event_status: str
    """Scheduled or Started today; others are passed on as they come."""
    resource_type: str | None = None
    resources: tuple[str, ...] | None = None
    """The names of every VM affected, in the document's order; [] and null name no VM."""
    not_before: datetime | None = None
    """UTC; the event does not start before this unless it is approved. Null: unknown or already started."""
    not_before_raw: str | None = None
    """NotBefore exactly as the document has it."""
    description: str | None = None
    event_source: str | None = None
    """Platform or User."""
    duration_seconds: int | None = None
    """The expected impact in seconds; null when unknown (Azure says -1)."""
    extra: dict[str, Any] = {}
    """Fields this version does not know, and known ones with a value of the wrong type, as they came."""

    @property
    def is_urgent(self) -> bool:
        """True for a spot eviction or a deletion: whoever waits is too late."""
        return self.event_type in URGENT_EVENT_TYPES

    @property
    def key(self) -> str:
        """Return the EventId; without one, the type and the sorted resources as JSON."""
        if self.event_id is not None:
            return self.event_id
        return compact_json([self.event_type, sorted(set(self.resources or ()))])


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A Scheduled Events document, or the state that the agent believes in."""

    incarnation: Incarnation = None
    events: tuple[ScheduledEvent, ...] = ()


class VmIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this VM is, from the instance document; null where it does not say."""

    name: str | None = None
    vm_id: str | None = None
    resource_id: str | None = None
    subscription_id: str | None = None
    resource_group: str | None = None
    location: str | None = None
    scale_set: str | None = None
    zone: str | None = None
    placement_group_id: str | None = None
    tags: dict[str, str] = {}


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """What an approval record says of the decision behind it."""

    source: str
    """"rule:NAME", "portal" or "cli"."""
    decision_id: str | None = None
    approvers: tuple[str, ...] = ()
    reason: str | None = None
    result: str
    http_status: int | None = None


class TransitionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the document, as every sink sends it."""

    schema_version: int = SCHEMA_VERSION
    id: str
    """UUID: the same on every sink, on every retry and when the same change is observed again."""
    transition_key: str
    """SHA-256: the same on every VM that sees this transition."""
    stream_id: str
    """UUID of the outbox that wrote this record."""
    sequence: int
    """Counts up within a stream. Order one VM's records by this, never by arrival."""
    transition: Transition
    evidence: Evidence
    observed_at: str
    """When the agent saw it: UTC, milliseconds, e.g. 2026-11-20T11:00:01.123Z."""
    incarnation: Incarnation
    previous_incarnation: Incarnation
    event: ScheduledEvent | None
    """The event after the change; for a vanished event its last known form; null for a heartbeat."""
    previous: dict[str, Any] | None
    """event_status, not_before and the old value of everything in *changed*; null for a new event."""
    changed: tuple[str, ...]
    """The names of the event's fields that changed; empty for new and vanished events."""
    notice_seconds: float | None
    """NotBefore minus observed_at; negative when it has passed, null when it is unknown."""
    affects_this_vm: bool | None
    """Whether Resources name this VM; null when either is unknown."""
    vm: VmIdentity
    labels: dict[str, str]
    """From the configuration."""
    approval: Approval | None = None

    @property
    def event_key(self) -> str:
        """Return what orders this record: its event's key, or a key of its own when it has no event."""
        return self.id if self.event is None else self.event.key

    @property
    def is_urgent(self) -> bool:
        """True when the record's event is a spot eviction or a deletion."""
        return self.event is not None and self.event.is_urgent


_decode_record = msgspec.json.Decoder(TransitionRecord).decode
_decode_document = msgspec.json.Decoder(Document).decode


def encode(value: msgspec.Struct) -> bytes:
    """Return *value* as compact JSON in UTF-8."""
    return msgspec.json.encode(value)


def decode_record(text: str | bytes) -> TransitionRecord:
    """Return the record that `encode` wrote."""
    return _decode_record(text)


def decode_document(text: str | bytes) -> Document:
    """Return the document that `encode` wrote."""
    return _decode_document(text)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a transition record (draft 2020-12)."""
    schema = msgspec.json.schema(TransitionRecord)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}


def compact_json(value: object) -> str:
    """Return *value* as JSON with sorted keys, no spaces, ASCII only: the bytes under every id."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def format_time(moment: datetime) -> str:
    """Return *moment* in UTC with milliseconds: ``2026-11-20T11:00:01.123Z``."""
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: str) -> datetime:
    """Return the aware UTC datetime that `format_time` wrote."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def format_not_before(moment: datetime | None) -> str | None:
    """Return NotBefore as the record carries it: ``2022-04-11T22:26:58Z``, null when it is unknown."""
    return None if moment is None else str(msgspec.to_builtins(moment))


def canonical_event(event: ScheduledEvent | None) -> Any:
    """Return the record's ``event`` as plain JSON values, with Resources sorted.

    Azure may list Resources in another order on another VM, or in another answer; keys made from this do not notice.
    """
    if event is None:
        return None
    value = msgspec.to_builtins(event)
    if event.resources is not None:
        value["resources"] = sorted(set(event.resources))
    return value


def record_id(
    *,
    vm_key: str,
    event_key: str,
    transition: Transition,
    incarnation: Incarnation,
    event: ScheduledEvent | None,
    repeat: int = 0,
    outcome: tuple[str, str] | None = None,
) -> str:
    """Return a record's id; *outcome* is an approval's (decision_id, result).

    No clock enters, nor evidence: the same change seen again gets the same id. *repeat* counts the times that the
    outbox held the id already.
    """
    text = None if incarnation is None else str(incarnation)
    name: list[Any] = [1, vm_key, event_key, transition.value, text, canonical_event(event)]
    name.extend(outcome or ())
    if repeat:
        name.append(repeat)
    return str(uuid.uuid5(NAMESPACE, compact_json(name)))


def transition_key(event_key: str, transition: Transition, event: ScheduledEvent | None, *, repeat: int = 0) -> str:
    """Return the key that every VM which sees this transition computes alike."""
    name: list[Any] = [event_key, transition.value, canonical_event(event)]
    if repeat:
        name.append(repeat)
    return hashlib.sha256(compact_json(name).encode()).hexdigest()


def vm_key(vm: VmIdentity) -> str:
    """Return what tells this VM's ids from another's: vmId in lower case, else the name, else ""."""
    return vm.vm_id.lower() if vm.vm_id else vm.name or ""


def normal_name(name: str) -> str:
    """Return *name* as names are compared: whole, without case, without the leading ``_`` of 2017."""
    return name.removeprefix("_").casefold()


def names_vm(event: ScheduledEvent | None, vm_name: str | None) -> bool | None:
    """Return whether *event* names this VM; null when it names nobody or the VM's name is unknown."""
    if event is None or not event.resources or not vm_name:
        return None
    wanted = normal_name(vm_name)
    return any(normal_name(name) == wanted for name in event.resources)
