"""Defines immutable classes for scheduled events, documents, and VM identities.

Filters for event types and event sources are case-sensitive. A filter for ``reboot`` would never match the Azure type
``Reboot``, so `check_spelling` rejects known names with the wrong case. The function accepts unknown names, because
Azure might add types and sources.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from typing import Any, TypeAlias

import msgspec

Incarnation: TypeAlias = int | str | None

#: Azure turns the service off if a VM sends no request for this time (Microsoft, "Scheduled Events for Linux VMs").
SERVICE_OFF_AFTER_SECONDS = 24 * 3600.0

#: Azure advises against using the VM, but does not change the VM. Acknowledging these events has no effect.
ADVISORY_EVENT_TYPES = frozenset({"SpotRebalanceRecommendation"})
NO_EFFECT = "Acknowledging a recommendation has no effect."

#: These events delete the VM. Therefore, their records are sent first, and their retries wait at most 2 s.
URGENT_EVENT_TYPES = frozenset({"Preempt", "Terminate"})


class ScheduledEvent(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One event in a document. A field is null if it is missing or has the wrong type."""

    event_id: str | None = None
    """Azure's EventId: the same for the whole life of an event."""
    event_type: str | None = None
    """Freeze, Reboot, Redeploy, Preempt, Terminate, SpotRebalanceRecommendation, or an unknown type."""
    event_status: str
    """Scheduled, Started, or an unknown status."""
    resource_type: str | None = None
    """VirtualMachine in all known documents."""
    resources: tuple[str, ...] | None = None
    """The names of all affected VMs, in the order of the document. [] and None mean that no VM is named."""
    not_before: datetime | None = None
    """UTC. The event does not start before this time unless it is approved. None: unknown or already started."""
    not_before_raw: str | None = None
    """The text of NotBefore in the document."""
    description: str | None = None
    """Azure's description, for people."""
    event_source: str | None = None
    """Platform or User."""
    duration_seconds: int | None = None
    """The expected impact in seconds. None if it is unknown (Azure sends -1)."""
    extra: dict[str, Any] = {}
    """Unknown fields, and known fields with a value of the wrong type, unchanged."""

    @property
    def is_urgent(self) -> bool:
        """Whether the event is a spot eviction or a deletion."""
        return self.event_type in URGENT_EVENT_TYPES

    @property
    def is_advisory(self) -> bool:
        """Whether the event is only a recommendation, which no one can approve."""
        return self.event_type in ADVISORY_EVENT_TYPES

    @property
    def key(self) -> str:
        """Return the EventId. If it is missing, return the type and the sorted Resources as JSON."""
        if self.event_id is not None:
            return self.event_id
        return compact_json([self.event_type, sorted(set(self.resources or ()))])

    @cached_property
    def canonical_json(self) -> str:
        """The event as JSON with sorted Resources. Record IDs are computed from this JSON.

        Sorting is necessary because Azure might return the same Resources in any order, and record IDs must not change.
        """
        value = msgspec.to_builtins(self)
        if self.resources is not None:
            value["resources"] = sorted(set(self.resources))
        return compact_json(value)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A Scheduled Events document: a good IMDS response or the document that the agent tracks."""

    api_version: str = ""
    """The request's api-version, or "" if it is unknown."""
    incarnation: Incarnation = None
    events: tuple[ScheduledEvent, ...] = ()


class VmIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a VM, as reported by the instance document. Unknown fields are null."""

    name: str | None = None
    """The VM's name in Resources."""
    vm_id: str | None = None
    """The vmId, a UUID."""
    resource_id: str | None = None
    """The ARM resource id, /subscriptions/..."""
    subscription_id: str | None = None
    """The subscription, a UUID."""
    resource_group: str | None = None
    """The resource group."""
    location: str | None = None
    """The region, such as westeurope."""
    scale_set: str | None = None
    """The name of the scale set that the VM belongs to."""
    zone: str | None = None
    """The availability zone."""
    placement_group_id: str | None = None
    """The placement group of the scale set."""
    size: str | None = None
    """The VM's size, such as Standard_D2s_v5."""
    fault_domain: str | None = None
    """The VM's fault domain, a number as text."""
    update_domain: str | None = None
    """The VM's update domain, a number as text."""
    tags: dict[str, str] = {}
    """The VM's tags. Each value is text."""

    def with_overrides(self, configured: VmIdentity) -> VmIdentity:
        """Return this identity, in which the values that *configured* contains replace the others."""
        values = msgspec.structs.asdict(configured)
        return msgspec.structs.replace(self, **{name: value for name, value in values.items() if value})


def encode(value: msgspec.Struct) -> bytes:
    """Return *value* as compact JSON in UTF-8."""
    # The copy is necessary, because the buffer that msgspec returns is larger than its content by a fifth.
    return bytes(memoryview(msgspec.json.encode(value)))


decode_document = msgspec.json.Decoder(Document).decode
"""Decodes a document that `encode` has encoded."""

compact_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode
"""Returns a value as ASCII JSON with sorted keys and no spaces, as all IDs require."""


def normal_name(name: str) -> str:
    """Return *name* for comparisons: case-folded, without the leading ``_`` of the 2017 API."""
    return name.removeprefix("_").casefold()


def names_vm(event: ScheduledEvent | None, vm_name: str | None) -> bool | None:
    """Return whether Resources contains this VM, or None if Resources or the name is unknown."""
    if event is None or not event.resources or not vm_name:
        return None
    wanted = normal_name(vm_name)
    return any(normal_name(name) == wanted for name in event.resources)


def is_first_named(event: ScheduledEvent, vm_name: str | None) -> bool | None:
    """Return whether this VM is the first in Resources, or None if that cannot be determined."""
    if not event.resources or not vm_name:
        return None
    return normal_name(event.resources[0]) == normal_name(vm_name)


EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate", "SpotRebalanceRecommendation")
EVENT_SOURCES = ("Platform", "User")


def check_spelling(value: str) -> None:
    """Raise ValueError if a known event type or source has the wrong case."""
    for right in (*EVENT_TYPES, *EVENT_SOURCES):
        if value != right and value.casefold() == right.casefold():
            raise ValueError(f"{right!r}, which is Azure's spelling")
