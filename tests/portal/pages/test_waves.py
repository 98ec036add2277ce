"""Waves and selections: one confirmation, one reason, and one audit entry for many events."""

import re
from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record, vm_id_of
from msgspec.structs import replace
from page_kit import ABLE, Office, Page

from bridge.portal.fleet import key_of_event_id

WAVE = "Freeze|westeurope|2026-11-20T11"


@pytest.fixture
def office(tmp_path):
    with Office(tmp_path) as office:
        yield office


def announced(vm, number, resources, **fields):
    """Return a record of an event in the wave. Each event is in its own resource group."""
    record = fleet_record(vm, event_id=f"E-{number}", resources=resources, **fields)
    return replace(record, vm=replace(record.vm, location="westeurope", resource_group=f"rg-{number}"))


def announce(office, *, events, vms, **fields):
    """Announce *events* events to *vms* VMs, and return the VMs of each event."""
    of_event = [range(number, vms, events) for number in range(events)]
    for number, members in enumerate(of_event):
        names = tuple(f"vm_{vm}" for vm in members)
        office.portal.send(*(announced(vm, number, names, **fields) for vm in members))
    return of_event


def audit(office, action):
    return [each for each in office.portal.get("/audit").json()["entries"] if each["action"] == action]


def decide(browser, verdict, numbers, **fields):
    """Submit the confirmation page for the events with *numbers*."""
    query = "&".join(f"event={key_of_event_id(f'E-{number}')}" for number in numbers)
    return browser.submit(f"/decide?verdict={verdict}&{query}", verdict, **fields)


def text_of(answer):
    return Page(answer.text).text


def test_hold_of_a_wave_reaches_all_its_vms_with_one_audit_entry(office):
    announce(office, events=48, vms=212)
    answer = office.browser("ann").submit(f"/decide?wave={WAVE}", "hold", reason="month end")
    assert answer.status_code == 200
    assert text_of(answer).count("Accepted") == 48
    assert "Held. The hold is queued for the agents of 5 VMs." in text_of(answer)  # no agent has polled yet
    [entry] = audit(office, "held")
    assert (entry["actor"], entry["details"]["reason"], len(entry["details"]["events"])) == ("ann", "month end", 48)
    assert sum(len(each["decisions"]) for each in entry["details"]["events"]) == 212
    assert all(len(office.poll(vm)["decisions"]) == 1 for vm in (0, 100, 211))
    assert "48 events, 212 VMs" in office.browser("bob").page("/audit").text
    for line in ('events{decision="held"} 48.0', "undecided_soon_events 0.0", "decision_seconds_count 48.0"):
        assert f"scheduled_events_portal_{line}" in office.portal.metrics()


def test_vm_of_several_events_counts_once(office):
    names = ("vm_0", "vm_1")
    for vm, group in ((0, "rg"), (1, "rg"), (2, "RG")):  # the metadata service does not always use the same case
        records = (announced(vm, number, names) for number in ((6,) if vm == 2 else range(6)))
        office.portal.send(*(replace(each, vm=replace(each.vm, resource_group=group)) for each in records))
    other = announced(3, 7, names)
    office.portal.send(replace(other, vm=replace(other.vm, name="vm_0", resource_group="other")))
    ann = office.browser("ann")
    assert "8 x Freeze, pause 4 VMs" in ann.page("/").text
    assert "early start of each event, for 4 VMs." in ann.page(f"/decide?wave={WAVE}").text
    ann.submit(f"/decide?wave={WAVE}", "hold")
    assert "8 events, 4 VMs" in ann.page("/audit").text
    assert "8 x Freeze, up to 16 VMs" in ann.page("/timeline").text


def test_selection_of_different_groups_is_approved_with_one_confirmation(office):
    announce(office, events=20, vms=20)
    for vm in range(20):
        office.poll(vm, **ABLE)
    answer = decide(office.browser("ann"), "approve", range(20), reason="quiet")
    assert text_of(answer).count("Accepted") == 20
    [entry] = audit(office, "approved")
    assert [list(each["decisions"]) for each in entry["details"]["events"]] == [[vm_id_of(vm)] for vm in range(20)]


def test_pages_state_the_limit_of_an_approval_before_the_confirmation(office):
    announce(office, events=21, vms=21)
    for vm in range(21):
        office.poll(vm, **ABLE)
    ann = office.browser("ann")
    assert "Approve… Hold… Approve at most 20 events at once." in ann.page(f"/?wave={WAVE}").text
    query = "&".join(f"event={key_of_event_id(f'E-{number}')}" for number in range(21))
    page = ann.page(f"/decide?verdict=approve&{query}")
    assert "You can approve at most 20 events at once. Select fewer than 21 events." in page.text
    assert page.buttons == ["Sign out"]


def test_selection_with_two_events_of_one_group_is_rejected_with_the_reason(office):
    announce(office, events=2, vms=2)
    other = announced(2, 2, ("vm_2",))
    office.portal.send(replace(other, vm=replace(other.vm, resource_group="RG-0")))
    for vm in range(3):
        office.poll(vm, **ABLE)
    answer = decide(office.browser("ann"), "approve", range(3))
    assert answer.status_code == 409
    assert "The events E-0 and E-2 affect VMs of the same group (resource group RG-0)." in text_of(answer)
    assert audit(office, "approved") == []
    assert decide(office.browser("ann"), "hold", range(3)).status_code == 200


@pytest.mark.parametrize("verdict", ["approve", "hold"])
def test_event_changed_since_the_page_load_is_skipped_and_listed(office, verdict):
    announce(office, events=3, vms=3)
    for vm in range(3):
        office.poll(vm, **ABLE)
    ann = office.browser("ann")
    keys = [key_of_event_id(f"E-{number}") for number in range(3)]
    form, pressed = ann.page(f"/decide?verdict={verdict}&" + "&".join(f"event={key}" for key in keys)).form_with(
        verdict
    )
    office.portal.send(announced(1, 1, ("vm_1",), sequence=2, seconds=5, event_type="Reboot"))
    answer = text_of(ann.post(form.action, [*form.fields, *pressed]))
    assert (answer.count("Accepted"), answer.count("Refused")) == (2, 1)
    assert "EventType changed from Freeze to Reboot." in answer


def test_wave_of_another_scope_is_neither_shown_nor_held(tmp_path):
    users = [("ann", "approver", ""), ("sam", "approver", "resource_group:rg-1\nresource_group:rg-2")]
    with Office(tmp_path, users=users) as office:
        announce(office, events=6, vms=6)
        sam, ann = office.browser("sam"), office.browser("ann")
        answer = sam.submit(f"/decide?wave={WAVE}", "hold")
        assert text_of(answer).count("Accepted") == 2
        form, pressed = ann.page(f"/decide?wave={WAVE}").form_with("hold")
        fields = dict(form.fields) | {"csrf": dict(sam.page("/").forms[0].fields)["csrf"]}
        answer = text_of(sam.post(form.action, [*fields.items(), *pressed]))
        assert (answer.count("Accepted"), answer.count("No record reports this event.")) == (2, 4)


def test_events_of_another_hour_type_or_state_are_not_in_the_wave(office):
    announce(office, events=5, vms=5)
    later = {"not_before": NOW + timedelta(hours=2), "not_before_raw": "Fri, 20 Nov 2026 13:00:00 GMT"}
    office.portal.send(announced(5, 5, ("vm_5",), **later), announced(6, 6, ("vm_6",), event_type="Reboot"))
    assert "Hold 5 events" in office.browser("ann").page(f"/decide?wave={WAVE}").text


def test_line_of_a_wave_counts_its_events_by_decision(office):
    announce(office, events=6, vms=6)
    for vm in range(6):
        office.poll(vm, **ABLE)
    ann = office.browser("ann")
    decide(ann, "hold", (0, 1))
    decide(ann, "approve", (2,))
    page = ann.page("/")
    assert "3 undecided, 2 held by ann" in page.text
    assert 'title="3 undecided, 2 held by ann"' in page.html  # without markup
    assert "approved by ann" in page.text  # in its own line


def test_pages_name_one_agent_vm_event_or_approver_in_the_singular(tmp_path):
    users = [("ann", "approver", ""), ("bob", "approver", "")]
    with Office(tmp_path, people={"required_approvals": 2}, users=users) as office:
        announce(office, events=1, vms=1)
        office.poll(0, **ABLE)
        office.poll(9, **{**ABLE, "dry_run": True})
        ann = office.browser("ann")
        pages = [decide(ann, "approve", (0,)), ann.get(f"/events/{key_of_event_id('E-0')}"), ann.get("/")]
        for vm in (0, 1):  # the events that only one VM reports are not in a wave
            office.portal.send(*(announced(vm, number, ("vm_0",), sequence=number + 1) for number in range(5)))
        wave = f"/decide?wave={WAVE}"
        pages += [ann.get(path) for path in ("/", wave, "/timeline", "/agents", "/agents?show=all", "/audit")]
        ann.submit(wave, "hold")
        pages += [ann.get("/audit"), ann.get("/")]
    text = " ".join(map(text_of, pages))
    assert re.findall(r"\b1 (?:agents|VMs|events|lines|need|approvals|approvers|people) .{20}", text) == []
    for phrase in ("1 agent would not", "1 waiting for a second approver", "of 1 line, 5 events", "5 events, 1 VM "):
        assert phrase in text
