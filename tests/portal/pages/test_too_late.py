"""What the pages say once Azure took an approval, and of what was taken back: the past does not read as what holds."""

from __future__ import annotations

import pytest
from fleet_records import fleet_record
from msgspec.structs import replace
from page_kit import Office, Page

from bridge.events.record import Approval, Transition
from bridge.portal.fleet import key_of_event_id

A = key_of_event_id("A")
ABLE = {"version": "9.9", "kids": ["p1"], "required_approvals": 1, "dry_run": False, "disabled": False}
TOLD = "Approved by ann; Azure was told at 11:00:30 UTC: it may start at any moment and can no longer be stopped."


@pytest.fixture
def office(tmp_path):
    with Office(tmp_path) as office:
        office.portal.send(fleet_record(0), fleet_record(1))
        office.poll(0, **ABLE)
        yield office


def test_approval_that_azure_took_leads_the_row_and_leaves_no_button(office):
    ann, bob = office.browser("ann"), office.browser("bob")
    ann.submit("/", "approve")
    back, press_back = ann.page("/").form_with("Take it back")
    hold, press_hold = bob.page("/").form_with("hold")
    office.tell_outcome(Transition.APPROVED, "accepted")
    for path in ("/", f"/events/{A}"):
        page = ann.page(path)
        assert TOLD in page.text
        assert "If nobody acts" not in page.text
        assert "data-until" not in page.html
        assert not any(text.startswith(("Approve", "Hold", "Take it back")) for text in page.buttons)
    for browser, form, pressed in ((ann, back, press_back), (bob, hold, press_hold)):
        answer = browser.post(form.action, [*form.fields, *pressed])
        assert answer.status_code == 409
        assert TOLD in Page(answer.text).text
    assert {each["action"] for each in office.portal.get("/audit").json()["entries"]}.isdisjoint({"withdrew", "held"})


@pytest.mark.parametrize(
    ("transition", "result"),
    [(Transition.APPROVED, "dry_run"), (Transition.APPROVAL_FAILED, "rejected"), (Transition.APPROVED, "accepted")],
)
def test_what_azure_did_not_take_or_changed_afterwards_can_be_held(office, transition, result):
    ann = office.browser("ann")
    ann.submit("/", "approve")
    office.tell_outcome(transition, result)
    if result == "accepted":
        changed = {"sequence": 3, "seconds": 40, "event_type": "Reboot"}
        office.portal.send(fleet_record(0, **changed), fleet_record(1, **changed))
    page = ann.page("/")
    assert "If nobody acts, Azure starts it at 11:15:00 UTC." in page.text
    assert any(text.startswith("Take it back") for text in page.buttons)
    assert ann.submit("/", "hold").status_code == 303


def test_approval_taken_back_after_azure_was_told_is_called_too_late(office):
    ann = office.browser("ann")
    ann.submit("/", "approve")
    ann.submit("/", "Take it back")
    assert "Stop of the approval, for every agent that could start it early: vm_0 queued" in ann.page("/").text
    office.tell_outcome(Transition.APPROVED, "accepted")  # it had been told; the record came later
    started = {"sequence": 3, "seconds": 60, "transition": Transition.STARTED, "not_before_raw": ""}
    office.portal.send(fleet_record(0, **started), fleet_record(1, **started))
    shown = ann.page("/").text
    assert "ann approved it, which was taken back too late: Azure was told at 11:00:30 UTC" in shown
    assert "Too late: Azure was told at 11:00:30 UTC." in shown
    assert "starts nothing early" not in shown


def test_hold_that_was_taken_back_is_told_as_past(office):
    ann = office.browser("ann")
    ann.submit("/", "hold")
    told = office.poll(0, **ABLE)
    office.poll(0, index=told["index"], **ABLE)
    assert "queued, received The agent starts nothing early." in ann.page("/").text
    ann.submit("/", "Take it back")
    page = ann.page("/")
    assert "The agent starts nothing early." not in page.text
    hold = "Before: Hold of this event, for every agent that could start it early: vm_0 queued, received"
    assert f"{hold} Taken back since. The rules of that VM stay stopped until somebody approves." in page.text
    assert [found["class"] for tag, found in page.tags if tag == "ul" and "aria-label" in found] == [
        "vms",
        "verdicts past",
        "progress past",
    ]


def test_hold_that_a_vm_s_rule_came_before_is_called_too_late(office):
    bob = office.browser("bob")
    bob.submit("/", "hold")
    outcome = fleet_record(0, sequence=2, transition=Transition.APPROVED, seconds=30)
    office.portal.send(replace(outcome, approval=Approval(source="rule:night", result="accepted")))
    shown = bob.page("/").text
    assert "Approved by the rule night of vm_0; Azure was told at 11:00:30 UTC:" in shown
    assert "bob held it too late: Azure was told at 11:00:30 UTC" in shown
