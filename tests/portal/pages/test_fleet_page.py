"""The page of all VMs and their agents: counts, filters, pages, and name conflicts."""

from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record
from msgspec.structs import replace
from page_kit import PEOPLE, Office

from bridge.events.record import Transition
from bridge.testing import ManualClock

ABLE = {"version": "9.9", "kids": ["p1"]}


@pytest.fixture
def clock():
    return ManualClock(NOW + timedelta(minutes=1))


@pytest.fixture
def office(tmp_path, clock):
    users = (*PEOPLE, ("sam", "approver", "labels.team:search"), ("olga", "operator", ""))
    with Office(tmp_path, clock=clock.clock, users=users) as office:
        yield office


def heartbeat(vm, **more):
    return fleet_record(vm, transition=Transition.HEARTBEAT, event_id=None, active=(), **more)


def test_fleet_page_shows_counts_and_agents_that_would_not_follow(office):
    office.portal.send(heartbeat(0), heartbeat(1), heartbeat(2))
    office.poll(0, **ABLE)
    office.poll(1, version="9.8", kids=["other"], dry_run=True)
    vic = office.browser("vic")
    page = vic.page("/agents").text
    counts = "1 without a polling agent 2 connected 0 reconnecting 0 disconnected 0 silent for a day"
    assert f"1 would not follow a decision {counts}" in page
    assert "vm_1 connected no: it does not trust the key p1 9.8" in page
    assert "vm_0 connected" not in page
    assert "1-1 of 1 1 VM did not poll for decisions within the last day, and receives none." in page
    assert "9.8 1 (50.0 %)" in page
    every = vic.page("/agents?show=all").text
    assert "vm_0 connected yes 9.9" in every
    assert "vm_2 not polling no: it has not polled for decisions within the last day unknown" in every
    assert "Use shared tokens only for trials." in every
    assert vic.get("/agents?show=other").status_code == 400


def test_vms_without_a_polling_agent_are_listed_and_counted_if_they_have_an_event(office):
    office.portal.send(*map(heartbeat, range(4)), fleet_record(0, sequence=2, resources=("vm_0", "vm_1")))
    office.portal.send(fleet_record(1, sequence=2, resources=("vm_0", "vm_1")), fleet_record(3, sequence=2))
    office.poll(0, **ABLE)
    ann = office.browser("ann")
    page = ann.page("/agents?show=idle").text
    assert "3 without a polling agent 1 connected" in page
    assert "1-3 of 3" in page
    assert "0 agents would not follow 0 disconnected 1 affected VM without a polling agent" in ann.page("/").text


def test_disconnected_and_silent_vms_are_counted_and_listed(office, clock):
    office.portal.send(heartbeat(0), heartbeat(1))
    office.poll(0, **ABLE)
    clock.advance(60)
    office.poll(1, **ABLE)
    vic = office.browser("vic")
    page = vic.page("/agents?show=disconnected").text
    assert "vm_0 disconnected no: it is disconnected 9.9" in page
    assert "vm_1" not in page
    clock.advance(86_400)
    office.portal.send(replace(heartbeat(1, sequence=2), observed_at="2026-11-21T11:02:00.000Z"))
    page = office.browser("vic").page("/agents?show=silent").text
    assert "1 silent for a day" in page
    assert "vm_0" in page
    assert "vm_1" not in page


def test_search_pages_and_scope(office):
    office.portal.send(*(heartbeat(vm, labels={"team": "search" if vm % 2 else "web"}) for vm in range(120)))
    office.poll(1, kids=["other"])
    office.poll(2, kids=["other"])
    ann, sam = office.browser("ann"), office.browser("sam")
    page, seen = ann.page("/agents?show=all"), 0
    for first in (1, 51, 101):
        last = min(first + 49, 120)
        assert f"{first}-{last} of 120" in page.text
        seen += page.html.count('<tr><th scope="row"')
        following = [found["href"] for tag, found in page.tags if tag == "a" and found.get("rel") == "next"]
        page = ann.page(following[0]) if following else page
    assert seen == 120
    assert "1-1 of 1" in ann.page("/agents?q=VM_77").text
    assert "1-50 of 60" in ann.page("/agents?q=team:search").text
    assert ann.get("/agents?first=x").status_code == 400
    assert "2 would not follow a decision" in ann.page("/agents").text
    limited = sam.page("/agents").text
    assert "1 would not follow a decision 59 without a polling agent 1 connected" in limited
    assert "60 VMs" in limited
    assert "vm_2" not in limited


def test_agent_without_a_record_is_listed_with_its_vm_id(office):
    office.poll(7, kids=["other"])
    assert "1 of 1 agent without a record" in office.browser("ann").page("/agents").text
    assert "1 of 1 agents" not in office.browser("sam").page("/agents").text


def test_approver_resolves_a_name_conflict_and_an_operator_only_sees_it(office):
    impostor = heartbeat(1)
    office.portal.send(heartbeat(0), replace(impostor, vm=replace(impostor.vm, name="vm_0")))
    olga, ann = office.browser("olga"), office.browser("ann")
    assert "1 with a name conflict" in olga.page("/agents").text
    assert olga.page("/agents?show=conflict").buttons == ["Sign out", "Search all VMs"]
    answer = ann.submit("/agents?show=conflict", "Give the name")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/agents?show=conflict")
    assert "Give the name to this VM" in ann.page("/agents?show=conflict").buttons  # the other VM claims it now
