"""Fills a portal with a fleet: VMs, open events, and past events, for the benchmark and the demonstration.

`python tests/kits/portal_fleet.py --vms 5000 --open 500 --past 1000` runs a portal with these events on the real clock,
and prints its address and its users.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from msgspec.structs import replace

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests" / "kits"), str(ROOT)]

import requests  # noqa: E402  # after the path is set
from fleet_records import fleet_record, vm_id_of  # noqa: E402
from fold_kit import received  # noqa: E402
from page_kit import PASSWORD, Office  # noqa: E402

from bridge.clock import REAL_CLOCK, format_time  # noqa: E402
from bridge.events.event import VmIdentity  # noqa: E402
from bridge.events.record import Transition, TransitionRecord  # noqa: E402
from bridge.portal.fleet import key_of_event_id  # noqa: E402
from bridge.portal.store.database import Store  # noqa: E402
from bridge.portal.store.ingest import add_records  # noqa: E402

_REGIONS = ("westeurope", "northeurope", "eastus2")
_TEAMS = ("pay", "db", "web", "search", "batch", "mail")
_TYPES = (("Freeze", 5), ("Reboot", None), ("Redeploy", None), ("Freeze", 9), ("Preempt", None))
_VMS_OF_SET = 20
_AT_ONCE = 500
_MOST_AGENTS = 200


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


def decide(office: Office, *, events: int) -> None:
    """Hold and approve some of the events of the first page, as ann and bob do in a demonstration."""
    ann, bob = office.browser("ann"), office.browser("bob")
    keys = [each["key"] for each in office.portal.get("/events", state="open").json()["events"]][:events]
    for number, key in enumerate(keys):
        page = ann.page(f"/events/{key}")
        if number % 7 == 1:
            ann.submit(f"/events/{key}", "hold", reason="wait for the end of the batch run")
        elif number % 7 == 3 and 'value="approve"' in page.html:
            bob.submit(f"/events/{key}", "approve", reason="drained")


def start_agents(office: Office, vms: int) -> None:
    """Poll as the agents of some VMs, each in a thread, until the process ends."""
    for vm in range(vms):
        kids = ["old"] if vm % 97 == 5 else ["p1"]
        report = {"version": "1.0.0" if vm % 9 else "0.9.0", "kids": kids, "dry_run": vm % 131 == 7}
        threading.Thread(target=_poll, args=(office, vm, report), daemon=True).start()


def _poll(office: Office, vm: int, report: dict[str, Any]) -> None:
    index = 0
    while True:
        try:
            index = office.poll(vm, index=index, wait=60, **report).get("index", index)
        except requests.RequestException:
            time.sleep(1)


def main() -> int:
    """Run a portal with a fleet until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vms", type=int, default=50)
    parser.add_argument("--open", type=int, default=30)
    parser.add_argument("--past", type=int, default=200)
    parser.add_argument("--approvals", type=int, default=1, help="people.required_approvals")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        people = {"required_approvals": chosen.approvals}
        with Office(Path(directory), people=people, clock=REAL_CLOCK) as office:
            now = datetime.now(timezone.utc)
            fill(office.store, vms=chosen.vms, open_events=chosen.open, past_events=chosen.past, now=now)
            start_agents(office, min(chosen.vms, _MOST_AGENTS))
            time.sleep(3)
            decide(office, events=60)
            sys.stdout.write(f"{office.origin}\nusers ann, bob, vic (viewer), password: {PASSWORD}\nCtrl-C stops it.\n")
            sys.stdout.flush()
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
