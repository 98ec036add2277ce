"""Azure's words about maintenance as frozen values: an event, a document, and the identity of this VM.

The words for types and sources are Azure's own. Filters compare exactly, so a known word in another case would never
match, and a sink or a rule would stay silent without an error: `check_event_type` and `check_event_source` refuse it.
Words that are not known yet pass, since Azure may add some.
(Microsoft, "Scheduled Events for Linux VMs in Azure", event properties.)
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, TypeAlias

import msgspec

Incarnation: TypeAlias = int | str | None

#: Scheduled Events is turned off for a VM that has not asked for so long (Microsoft: Scheduled Events for Linux VMs).
SERVICE_OFF_AFTER_SECONDS = 24 * 3600.0

#: The event types after which the VM is gone: their records go first, and their retries never wait longer than 2 s.
URGENT_EVENT_TYPES = frozenset({"Preempt", "Terminate"})


class ScheduledEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event as the document shows it; a field that an old api-version lacks, or that is odd, is null."""

    event_id: str | None = None
    """Azure's EventId: the same for the whole life of an event."""
    event_type: str | None = None
    """Freeze, Reboot, Redeploy, Preempt, Terminate; others are passed on as they come."""
    event_status: str
    """Scheduled or Started today; others are passed on as they come."""
    resource_type: str | None = None
    """VirtualMachine, in all that Azure has sent so far."""
    resources: tuple[str, ...] | None = None
    """The names of every VM affected, in the document's order; [] and None name no VM."""
    not_before: datetime | None = None
    """UTC; the event does not start before this unless it is approved. None: unknown or already started."""
    not_before_raw: str | None = None
    """NotBefore exactly as the document has it."""
    description: str | None = None
    """What Azure says of it, for people."""
    event_source: str | None = None
    """Platform or User."""
    duration_seconds: int | None = None
    """The expected impact in seconds; None when unknown (Azure says -1)."""
    extra: dict[str, Any] = {}
    """Fields this version does not know, and known ones with a value of the wrong type, as they came."""

    @property
    def is_urgent(self) -> bool:
        """True for a spot eviction or a deletion."""
        return self.event_type in URGENT_EVENT_TYPES

    @property
    def key(self) -> str:
        """Return the EventId; without one, the type and the sorted resources as JSON."""
        if self.event_id is not None:
            return self.event_id
        return compact_json([self.event_type, sorted(set(self.resources or ()))])


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A Scheduled Events document: a good response, or the document that the agent tracks."""

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

    def with_overrides(self, configured: VmIdentity) -> VmIdentity:
        """Return this identity with everything that *configured* sets."""
        values = {name: getattr(configured, name) for name in self.__struct_fields__}
        return msgspec.structs.replace(self, **{name: value for name, value in values.items() if value})


_decode_document = msgspec.json.Decoder(Document).decode


def encode(value: msgspec.Struct) -> bytes:
    """Return *value* as compact JSON in UTF-8."""
    return msgspec.json.encode(value)


def decode_document(text: str | bytes) -> Document:
    """Return the document that `encode` wrote."""
    return _decode_document(text)


def compact_json(value: object) -> str:
    """Return *value* as JSON with sorted keys, no spaces, ASCII only: the bytes under every id."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def format_not_before(moment: datetime | None) -> str | None:
    """Return NotBefore as the record carries it: ``2022-04-11T22:26:58Z``, None when it is unknown."""
    return None if moment is None else str(msgspec.to_builtins(moment))


def normal_name(name: str) -> str:
    """Return *name* as names are compared: whole, without case, without the leading ``_`` of 2017."""
    return name.removeprefix("_").casefold()


def names_vm(event: ScheduledEvent | None, vm_name: str | None) -> bool | None:
    """Return whether *event* names this VM; None when it names no VM, or when the VM's name is unknown."""
    if event is None or not event.resources or not vm_name:
        return None
    wanted = normal_name(vm_name)
    return any(normal_name(name) == wanted for name in event.resources)


def is_first_named(event: ScheduledEvent, vm_name: str | None) -> bool | None:
    """Return whether this VM is the first in Resources; None when they name no VM, or when its name is unknown."""
    if not event.resources or not vm_name:
        return None
    return normal_name(event.resources[0]) == normal_name(vm_name)


EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
EVENT_SOURCES = ("Platform", "User")


def check_event_type(value: str) -> None:
    """Raise ValueError, with what it must be, when *value* is a known event type in another case."""
    _spelt(value, EVENT_TYPES)


def check_event_source(value: str) -> None:
    """Raise ValueError, with what it must be, when *value* is a known event source in another case."""
    _spelt(value, EVENT_SOURCES)


def _spelt(value: str, known: tuple[str, ...]) -> None:
    for right in known:
        if value != right and value.casefold() == right.casefold():
            raise ValueError(f"spelt {right!r}, as Azure spells it")
