"""Defines the state that the portal keeps for each VM, and the order of the VM's records."""

from __future__ import annotations

import contextlib
import uuid
from datetime import timedelta

import msgspec

from bridge.clock import format_time, parse_time
from bridge.events.event import ScheduledEvent, VmIdentity, normal_name
from bridge.events.record import Transition, TransitionRecord

#: RFC 9562, section 5.7: the first 48 bits of a UUIDv7 are its time in milliseconds.
_TIME_SHIFT, _VERSION_7 = 80, 7
_CONFIRMED_SECONDS = 600.0
#: An agent begins a stream at each start. The arrival time of a stream is needed if the VM's clock was ahead, or if the
#: ID of the stream contains no time.
_MOST_STREAMS = 16
#: The limits of the heartbeat interval. A delayed heartbeat must not end the confirmation.
_SHORTEST_HEARTBEAT_SECONDS, _LONGEST_HEARTBEAT_SECONDS = 30.0, 3_600.0

#: The sort key for the records of one VM: the time and ID of the stream, the sequence, and the ID of the record.
Position = tuple[int, str, int, str]
_FIRST: Position = (-1, "", -1, "")


# `Raw` skips a value without creating an object for each of its parts. Only the stored text needs these values.
class PlainEvent(ScheduledEvent, frozen=True, kw_only=True, dict=True):
    """An event without `extra`."""

    extra: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


class PlainRecord(TransitionRecord, frozen=True, kw_only=True):
    """A record without `previous`."""

    previous: msgspec.Raw  # type: ignore[assignment]
    event: PlainEvent | None


record_of = msgspec.json.Decoder(PlainRecord).decode


class VmState(msgspec.Struct, kw_only=True):
    """The newest state of a VM and its active events."""

    vm_key: str
    position: Position = _FIRST
    observed_at: str = ""
    vm: VmIdentity = VmIdentity()
    labels: dict[str, str] = {}
    heard_at: str = ""
    """The time at which a record last arrived."""
    name: str | None = None
    """The first name that the VM reported, or its name in the inventory. Later names do not count."""
    name_key: str | None = None
    """The key of the first name: subscription, resource group, and name."""
    is_conflict: bool = False
    """Whether this name belongs to another VM."""
    groups: tuple[str, ...] = ()
    """The VM's groups, for scopes and filters, and its region and subscription, for filters only."""
    listed_at: Position = _FIRST
    """The position of the newest record that lists the active events."""
    active_event_ids: tuple[str, ...] = ()
    heartbeat_at: str = ""
    heartbeat_seconds: float | None = None
    """The time between the last two heartbeats."""
    streams: dict[str, str] = {}
    """For each of the newest streams, the arrival time of its first record."""
    open_events: int = 0
    stored_bytes: int = 0

    @property
    def owned_name(self) -> str | None:
        """Return the normalized name if it belongs to the VM."""
        return None if self.name is None or self.is_conflict else normal_name(self.name)

    @property
    def confirmed_until(self) -> str:
        """Return the time until which the VM counts as confirmed.

        A VM counts as confirmed for two heartbeat intervals after its last record arrived, or for 10 minutes if it
        sends no heartbeats.
        """
        seconds = _CONFIRMED_SECONDS if self.heartbeat_seconds is None else 2 * self.heartbeat_seconds
        return format_time(parse_time(self.heard_at) + timedelta(seconds=seconds))

    def update(self, record: TransitionRecord, *, received_at: str) -> None:
        """Apply *record*, even if the record is late or a duplicate."""
        self.heard_at = received_at
        if record.stream_id not in self.streams:
            streams = [*self.streams.items(), (record.stream_id, received_at)]
            self.streams = dict(streams[-_MOST_STREAMS:])
        position, observed_at = self.position_of(record), min(record.observed_at, received_at)
        self.name = self.name or record.vm.name or None
        if position > self.position:
            self.position, self.observed_at, self.vm, self.labels = position, observed_at, record.vm, record.labels
        if record.active_event_ids is not None and position > self.listed_at:
            self.listed_at = position
            self.active_event_ids = tuple(sorted(set(record.active_event_ids)))
        if record.transition is Transition.HEARTBEAT:
            if self.heartbeat_at and self.heartbeat_at < observed_at:
                gap = (parse_time(observed_at) - parse_time(self.heartbeat_at)).total_seconds()
                self.heartbeat_seconds = min(max(gap, _SHORTEST_HEARTBEAT_SECONDS), _LONGEST_HEARTBEAT_SECONDS)
            self.heartbeat_at = max(self.heartbeat_at, observed_at)

    def position_of(self, record: TransitionRecord) -> Position:
        """Return the position of *record* among the records of this VM.

        A stream's UUIDv7 contains its creation time. If that is later than the arrival of its first record, the portal
        uses the arrival time. Otherwise, a stream from a VM whose clock was ahead would take precedence over newer
        streams. It also uses the arrival time if the ID contains no time.
        """
        arrival = self.streams.get(record.stream_id, self.heard_at)
        milliseconds = int(parse_time(arrival).timestamp() * 1000)
        with contextlib.suppress(ValueError):
            stream = uuid.UUID(record.stream_id)
            if stream.version == _VERSION_7:
                milliseconds = min(milliseconds, stream.int >> _TIME_SHIFT)
        return milliseconds, record.stream_id.lower(), record.sequence, record.id


vm_of = msgspec.json.Decoder(VmState).decode


def place_of(vm: VmIdentity) -> tuple[str, str]:
    """Return the subscription and the resource group in lowercase."""
    return (vm.subscription_id or "").casefold(), (vm.resource_group or "").casefold()


def vm_key(record: TransitionRecord) -> str:
    """Return the VM's key: the vmId in lowercase, or the stream if the vmId is unknown."""
    vm_id = record.vm.vm_id
    return vm_id.lower() if vm_id else f"stream:{record.stream_id.lower()}"


def places_of(vm: VmState) -> tuple[str, ...]:
    """Return the region and the subscription that *vm* reports. A scope cannot contain them."""
    places = (("region", vm.vm.location), ("subscription", vm.vm.subscription_id))
    return tuple(f"{name}:{value.casefold()}" for name, value in places if value)
