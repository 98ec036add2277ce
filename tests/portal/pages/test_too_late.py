"""The pages after Azure has accepted an approval, and after a withdrawal: past states are not shown as current."""

import pytest
from fleet_records import fleet_record
from page_kit import ABLE

from bridge.events.record import Transition
from bridge.portal.fleet import key_of_event_id

A = key_of_event_id("A")
TOLD = "Approved by ann, and posted to Azure at 11:00:30 UTC. It can start at any moment. A hold might be too late."


def test_accepted_approval_is_shown_first_and_a_hold_might_be_too_late(office):
    ann, bob = office.browser("ann"), office.browser("bob")
    ann.submit(f"/events/{A}", "approve")
    office.tell_outcome(Transition.APPROVED, "accepted")
    page = ann.page(f"/events/{A}")
    assert TOLD in page.text
    assert "countdown" not in page.html
    assert not any(text.startswith(("Approve", "Withdraw")) for text in page.buttons)
    assert any(
        "A hold might be too late, because vm_0 reported that the event was approved." in text for text in page.buttons
    )
    assert bob.submit(f"/events/{A}", "hold").status_code == 303
    assert "held" in {each["action"] for each in office.portal.get("/audit").json()["entries"]}


@pytest.mark.parametrize(
    ("transition", "result"),
    [(Transition.APPROVED, "dry_run"), (Transition.APPROVAL_FAILED, "rejected"), (Transition.APPROVED, "accepted")],
)
def test_event_that_azure_did_not_accept_or_changed_later_can_be_held(office, transition, result):
    ann = office.browser("ann")
    ann.submit(f"/events/{A}", "approve")
    office.tell_outcome(transition, result)
    if result == "accepted":
        changed = {"sequence": 3, "seconds": 40, "event_type": "Reboot"}
        office.portal.send(fleet_record(0, **changed), fleet_record(1, **changed))
    page = ann.page(f"/events/{A}")
    assert "If no one acts, Azure starts the event at 11:15:00 UTC." in page.text
    assert any(text.startswith("Withdraw") for text in page.buttons)
    assert ann.submit(f"/events/{A}", "hold").status_code == 303


def test_approval_of_a_changed_event_is_not_shown_as_posted_before_its_outcome(office):
    ann = office.browser("ann")
    ann.submit(f"/events/{A}", "approve")
    office.tell_outcome(Transition.APPROVED, "accepted")
    changed = {"sequence": 3, "seconds": 40, "event_type": "Reboot"}
    office.portal.send(fleet_record(0, **changed), fleet_record(1, **changed))
    assert ann.submit(f"/events/{A}", "approve").status_code == 303
    assert "Approved. An agent has not posted the approval to Azure yet." in ann.page(f"/events/{A}").text


def test_approval_withdrawn_after_its_post_to_azure_is_marked_too_late(office):
    ann = office.browser("ann")
    ann.submit(f"/events/{A}", "approve")
    ann.submit(f"/events/{A}", "Withdraw")
    assert "Hold for the agent of vm_0: queued" in ann.page(f"/events/{A}").text
    office.tell_outcome(Transition.APPROVED, "accepted")  # Azure had the approval already; the record arrives later
    started = {"sequence": 3, "seconds": 60, "transition": Transition.STARTED, "not_before_raw": ""}
    office.portal.send(fleet_record(0, **started), fleet_record(1, **started))
    shown = ann.page(f"/events/{A}").text
    assert "ann approved it, withdrawn too late: posted to Azure at 11:00:30 UTC" in shown
    assert "does not start the event early" not in shown


def test_withdrawn_hold_is_shown_as_no_longer_in_effect(office):
    ann = office.browser("ann")
    ann.submit(f"/events/{A}", "hold")
    told = office.poll(0, **ABLE)
    office.poll(0, index=told["index"], **ABLE)
    assert "received The agent does not start the event early." in ann.page(f"/events/{A}").text
    ann.submit(f"/events/{A}", "Withdraw")
    page = ann.page(f"/events/{A}")
    assert "The agent does not start the event early." not in page.text
    assert "Hold for the agent of vm_0: received (no longer in effect)" in page.text
    assert "ann held it, withdrawn (no longer in effect)" in page.text
    assert "11:01:00 UTC Hold by ann withdrawn" in page.text
    assert "Verdicts" not in [found.get("aria-label") for _, found in page.tags]
