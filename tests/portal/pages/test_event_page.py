"""The page of one event: its history, its VMs, its records, and the buttons of a started event."""

import re

from fleet_records import fleet_record
from msgspec.structs import replace
from page_kit import ABLE, Office

from bridge.events.record import Impact, Transition
from bridge.portal.fleet import key_of_event_id

A = key_of_event_id("A")


def history_of(page):
    """Return the texts of the history entries."""
    part = page.html.partition('<ol class="history">')[2].partition("</ol>")[0]
    return [" ".join(re.sub("<[^>]*>", " ", each).split())[23:] for each in part.split("<li")[1:] if each]


def test_history_shows_each_step_from_the_announcement_to_the_impact(office):
    ann = office.browser("ann")
    office.portal.send(
        fleet_record(0, sequence=2, seconds=5, transition=Transition.UPDATED, event_type="Reboot"),
        fleet_record(1, sequence=2, seconds=6, transition=Transition.UPDATED, event_type="Reboot"),
        fleet_record(7, sequence=2, seconds=7, transition=Transition.STARTED),
    )
    ann.submit(f"/events/{A}", "approve", reason="drained")
    office.poll(0, **ABLE)
    office.portal.send(
        *(
            fleet_record(vm, sequence=4, seconds=70, transition=Transition.STARTED, event_type="Reboot")
            for vm in (0, 1)
        ),
    )
    ending = fleet_record(0, sequence=5, seconds=90, transition=Transition.COMPLETED, event_type="Reboot")
    office.portal.send(replace(ending, impact=Impact(longest_seconds=4.2, resolution_seconds=0.05)))
    entries = "\n".join(history_of(ann.page(f"/events/{A}")))
    steps = [
        "Azure announced the event Reported by vm_0, vm_1.",
        "Azure changed the event EventType changed from Freeze to Reboot. Reported by vm_0, vm_1.",
        "ann approved it “drained”",
        "Approval for the agent of vm_0: queued",
        "Azure started the event Reported by vm_0, vm_1.",
        "Azure completed the event Reported by vm_0. Measured pause: 4.2 s (resolution 0.05 s) on vm_0.",
    ]
    places = [entries.find(step) for step in steps]
    assert -1 not in places, entries
    assert places == sorted(places)
    assert "vm_7" not in entries


def test_started_event_offers_no_hold_and_no_withdrawal(office):
    ann = office.browser("ann")
    ann.submit(f"/events/{A}", "hold")
    started = {"sequence": 2, "seconds": 40, "transition": Transition.STARTED, "not_before": None, "not_before_raw": ""}
    office.portal.send(fleet_record(0, **started), fleet_record(1, **started))
    page = ann.page(f"/events/{A}")
    assert page.buttons == ["Sign out"]
    assert "unknown time" not in page.text


def test_event_page_shows_the_agent_of_each_vm_and_the_records(office):
    office.portal.send(fleet_record(7, seconds=7))
    page = office.browser("vic").page(f"/events/{A}")
    assert "vm_0 announced connected" in page.text
    assert "vm_1 announced not polling" in page.text
    assert "vm_7 not a VM of the event announced not polling" in page.text
    assert page.text.count('"transition": "scheduled"') == 3


def test_event_of_many_vms_has_pages_with_the_total(tmp_path):
    names = tuple(f"vm_{vm}" for vm in range(250))
    with Office(tmp_path) as office:
        office.portal.send(*(fleet_record(vm, resources=names) for vm in range(250)))
        vic = office.browser("vic")
        first, last = vic.page(f"/events/{A}"), vic.page(f"/events/{A}?vms=200&records=240")
    assert "1-100 of 250" in first.text
    assert "1-20 of 250" in first.text
    assert "201-250 of 250" in last.text
    assert "241-250 of 250" in last.text
    assert len(first.html) < 300_000
