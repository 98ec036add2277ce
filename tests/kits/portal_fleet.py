"""Fills a portal with a fleet for the benchmark: VMs, open events, and past events."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from fleet_records import fleet_record, vm_id_of
from fold_kit import received
from msgspec.structs import replace

from bridge.clock import format_time
from bridge.events.event import VmIdentity
from bridge.events.record import Transition, TransitionRecord
from bridge.portal.fleet import key_of_event_id
from bridge.portal.store.database import Store
from bridge.portal.store.ingest import add_records

_REGIONS = ("westeurope", "northeurope", "eastus2")
_TEAMS = ("pay", "db", "web", "search", "batch", "mail")
_TYPES = (("Freeze", 5), ("Reboot", None), ("Redeploy", None), ("Freeze", 9), ("Preempt", None))
_VMS_OF_SET = 20
_AT_ONCE = 500


def name_of(vm: int) -> str:
    """Return the name of the VM with that number."""
    return f"{_TEAMS[vm // _VMS_OF_SET % len(_TEAMS)]}-{vm}"


def record_of(vm: int, vms: tuple[int, ...], *, now: datetime, sequence: int = 1, **fields: Any) -> TransitionRecord:
    """Return a record of *vm* about an event of *vms*, *seconds* after *now*."""
    of_set = vm // _VMS_OF_SET
    team = _TEAMS[of_set % len(_TEAMS)]
    seconds = fields.pop("seconds", 0.0)
    not_before = fields.pop("not_before", now + timedelta(minutes=15))
    record = fleet_record(
        vm,
        sequence=sequence,
        resources=tuple(map(name_of, vms)),
        labels={"team": team},
        not_before=not_before,
        not_before_raw=f"{not_before:%a, %d %b %Y %H:%M:%S} GMT",
        **fields,
    )
    identity = VmIdentity(
        name=name_of(vm),
        vm_id=vm_id_of(vm),
        resource_group=f"rg-{team}",
        scale_set=f"set-{of_set}",
        location=_REGIONS[of_set % len(_REGIONS)],
        subscription_id=f"00000000-0000-4000-8000-00000000000{of_set % 3}",
    )
    at = format_time(now + timedelta(seconds=seconds))
    return replace(record, observed_at=at, vm=identity, affects_this_vm=True)


def fill(store: Store, *, vms: int, open_events: int, past_events: int = 0, now: datetime) -> list[tuple[int, ...]]:
    """Store a record of each VM, *past_events* that are over, and *open_events*. Return the VMs of each open event."""
    at = format_time(now)
    records: list[TransitionRecord] = []

    def add(record: TransitionRecord) -> None:
        records.append(record)
        if len(records) == _AT_ONCE:
            flush()

    def flush() -> None:
        store.write(add_records, received(records), at)
        records.clear()

    for number in range(past_events):
        vm = number % vms
        past = {"seconds": -3_600 - number * 60.0, "event_id": f"past-{number}", "transition": Transition.COMPLETED}
        add(record_of(vm, (vm,), now=now, sequence=number + 1, **past))
    for vm in range(vms):
        add(record_of(vm, (vm,), now=now, sequence=past_events + 1, transition=Transition.HEARTBEAT, event_id=None))
    found = []
    for number in range(open_events):
        size = 1 + number % 5 if number % 10 else 12
        first = number * vms // open_events
        of_event = tuple((first + each) % vms for each in range(min(size, vms)))
        event_type, seconds = _TYPES[number % len(_TYPES)]
        left = timedelta(seconds=190 + number * 41) if number % 40 else timedelta(hours=3 + number / 5)
        fields = {
            "event_id": f"{key_of_event_id(str(number))[:8].upper()}-0000-4000-8000-{number:012d}",
            "event_type": event_type,
            "duration_seconds": seconds,
            "description": f"Host {number} is being updated.",
        }
        for vm in of_event:
            add(record_of(vm, of_event, now=now, sequence=past_events + 2 + number, not_before=now + left, **fields))
        found.append(of_event)
    flush()
    return found
