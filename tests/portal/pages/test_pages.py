"""The pages without JavaScript: their texts, decisions, and permissions."""

import re
from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record
from page_kit import ABLE, PEOPLE, Office, Page

from bridge.events.record import Transition
from bridge.portal.fleet import key_of_event_id

A, B = key_of_event_id("A"), key_of_event_id("B")


def _results(answer):
    assert answer.headers["Content-Type"].startswith("text/html")
    return Page(answer.text).text


def test_buttons_name_every_vm_and_the_consequence(office):
    page = office.browser("ann").page(f"/events/{A}")
    approve = "Approve starts the event now, for these 2 VMs: vm_0, vm_1"
    assert f"{approve}. The approval goes to the agents of only 1 of the 2 VMs, which is enough" in page.buttons
    office.poll(1, **ABLE)
    assert approve in office.browser("ann").page(f"/events/{A}").buttons
    assert (
        "Hold prevents an early start. Azure starts the event at 11:15:00 UTC. For these 2 VMs: vm_0, vm_1"
        in page.buttons
    )
    assert "If no one acts, Azure starts the event at 11:15:00 UTC." in page.text
    assert "Why it has not started: No one has decided." in page.text


def test_approval_is_signed_and_its_delivery_is_shown(office):
    ann = office.browser("ann")
    answer = ann.submit(f"/events/{A}", "approve", reason="while it is quiet")
    assert (answer.status_code, answer.headers["Location"]) == (303, f"/events/{A}")
    shown = ann.page(f"/events/{A}").text
    assert "ann approved it: “while it is quiet”" in shown
    assert "Approval for the agent of vm_0: queued" in shown
    told = office.poll(0, **ABLE)
    assert len(told["decisions"]) == 1
    office.poll(0, index=told["index"], **ABLE)
    assert "Approval for the agent of vm_0: received" in ann.page(f"/events/{A}").text


@pytest.mark.parametrize(
    ("transition", "result", "shown"),
    [
        (Transition.APPROVED, "accepted", "Approval for the agent of vm_0: followed"),
        (Transition.APPROVED, "dry_run", "refused a sentence (dry_run)"),
        (Transition.APPROVAL_REFUSED, "superseded", "refused a sentence (superseded)"),
        (Transition.APPROVAL_REFUSED, "brand_new", "refused a sentence (brand_new)"),
    ],
)
def test_event_page_shows_the_outcome_from_the_agent(office, transition, result, shown):
    ann = office.browser("ann")
    ann.submit(f"/events/{A}", "approve")
    office.tell_outcome(transition, result)
    assert shown in ann.page(f"/events/{A}").text


def test_decision_on_a_changed_event_is_rejected_with_the_differences(office):
    ann = office.browser("ann")
    form, pressed = ann.page(f"/events/{A}").form_with("approve")
    office.portal.send(
        fleet_record(0, sequence=2, seconds=5, resources=("vm_0", "vm_1", "vm_2"), event_type="Reboot"),
        fleet_record(1, sequence=2, seconds=5, resources=("vm_0", "vm_1", "vm_2"), event_type="Reboot"),
    )
    answer = ann.post(form.action, [*form.fields, *pressed])
    shown = _results(answer)
    assert answer.status_code == 409
    assert "The event has changed since you loaded the page." in shown
    assert "EventType changed from Freeze to Reboot." in shown
    assert "Resources changed from vm_0, vm_1 to vm_0, vm_1, vm_2." in shown
    assert office.poll(0, **ABLE)["decisions"] == []


def test_withdrawn_hold_allows_an_approval(office):
    ann, bob = office.browser("ann"), office.browser("bob")
    assert ann.submit(f"/events/{A}", "hold", reason="batch").headers["Location"] == f"/events/{A}"
    page = bob.page(f"/events/{A}")
    assert "Held by ann. Azure starts the event at 11:15:00 UTC." in page.text
    assert not any(text.startswith("Approve") for text in page.buttons)
    assert bob.submit(f"/events/{A}", "Withdraw").status_code == 303
    assert "ann held it, withdrawn" in bob.page(f"/events/{A}").text
    assert bob.submit(f"/events/{A}", "approve").status_code == 303


def _why_not_yet(browser):
    return browser.page(f"/events/{A}").text.partition("Why it has not started: ")[2]


def test_approval_of_an_event_held_meanwhile_is_rejected(office):
    ann, bob = office.browser("ann"), office.browser("bob")
    form, pressed = ann.page(f"/events/{A}").form_with("approve")
    bob.submit(f"/events/{A}", "hold")
    answer = ann.post(form.action, [*form.fields, *pressed])
    assert answer.status_code == 409
    assert "The event is held by bob. Withdraw the hold to approve the event." in _results(answer)
    bob.submit(f"/events/{A}", "Withdraw lets people approve the event")
    assert _why_not_yet(ann).startswith("No one has decided.")
    assert "ann approved it" not in ann.page(f"/events/{A}").text


def test_approval_stopped_by_a_later_hold_can_be_repeated(office):
    ann, bob = office.browser("ann"), office.browser("bob")
    ann.submit(f"/events/{A}", "approve")
    bob.submit(f"/events/{A}", "hold")
    page = bob.page(f"/events/{A}").text
    assert "Why it has not started: Held by bob. Azure starts the event" in page
    assert "Approval for the agent of vm_0: queued" in page
    assert "Hold for the agent of vm_0: queued" in page
    bob.submit(f"/events/{A}", "Withdraw lets people approve the event")
    assert _why_not_yet(ann).startswith("A later hold stopped the approval by ann. Approve the event again.")
    before = office.poll(0, **ABLE)
    ann.submit(f"/events/{A}", "approve")
    assert _why_not_yet(ann).startswith("Approved. An agent has not posted the approval to Azure yet.")
    assert len(office.poll(0, **ABLE)["decisions"]) == len(before["decisions"]) + 1


def test_required_approvals_need_two_different_users(tmp_path):
    with Office(tmp_path, people={"required_approvals": 2}) as office:
        office.portal.send(fleet_record(0, resources=("vm_0",)))
        office.poll(0, **ABLE)
        ann, bob = office.browser("ann"), office.browser("bob")
        assert (
            "Approve starts the event early after 1 other approval, for this VM: vm_0"
            in ann.page(f"/events/{A}").buttons
        )
        ann.submit(f"/events/{A}", "approve")
        page = ann.page(f"/events/{A}")
        assert "Approved by ann. The event needs 1 more approval." in page.text
        assert "You approved the event. Another person must also approve it." in page.text
        assert not any(text.startswith("Approve") for text in page.buttons)
        assert "Approve starts the event now, for this VM: vm_0" in bob.page(f"/events/{A}").buttons
        bob.submit(f"/events/{A}", "approve")
        assert len(office.poll(0, **ABLE)["decisions"]) == 1


def test_unsatisfiable_required_approvals_are_reported(tmp_path, caplog):
    said = "3 different people must approve, and only 2 can. Add approvers with `portal users`."
    with Office(tmp_path, people={"required_approvals": 3}) as office:
        assert f"No event can be approved: {said}" in caplog.text
        office.portal.send(fleet_record(0, resources=("vm_0",)))
        office.poll(0, **ABLE)
        ann = office.browser("ann")
        assert said in ann.page(f"/events/{A}").text
        ann.submit(f"/events/{A}", "approve")
        assert f"You approved the event. Another person must also approve it. {said}" in ann.page(f"/events/{A}").text


def test_decision_on_many_events_has_one_reason_and_a_result_for_each(office):
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    office.poll(2, **ABLE)
    ann, bob = office.browser("ann"), office.browser("bob")
    page = ann.page(f"/decide?verdict=approve&event={A}&event={B}")
    assert any("Approve starts each event as described above. VMs: vm_0, vm_1; vm_2" in text for text in page.buttons)
    form, pressed = page.form_with("approve")
    bob.submit(f"/events/{B}", "hold")
    fields = [field for field in form.fields if field[0] != "reason"]
    answer = ann.post(form.action, [*fields, ("reason", "all of them"), *pressed])
    shown = _results(answer)
    assert answer.status_code == 200
    assert "Accepted: Freeze of these 2 VMs: vm_0, vm_1 Approved. The approval was sent to 1 agent." in shown
    assert "Refused: Freeze of this VM: vm_2 The event is held by bob. Withdraw the hold to approve the event." in shown
    assert (
        len(office.poll(0, **ABLE)["decisions"]) == 2
    )  # the approval, and the hold of the other event in the same group
    assert "“all of them”" in ann.page(f"/events/{A}").text


def test_viewer_sees_no_buttons_and_receives_403(office):
    vic, ann = office.browser("vic"), office.browser("ann")
    for path in ("/", f"/events/{A}"):
        assert vic.page(path).buttons in (["Sign out"], ["Sign out", "Filter"])
    form, pressed = ann.page(f"/events/{A}").form_with("approve")
    csrf = dict(vic.page(f"/events/{A}").forms[0].fields)["csrf"]
    fields = [(name, csrf if name == "csrf" else value) for name, value in form.fields]
    assert vic.post("/decide", [*fields, *pressed]).status_code == 403
    assert vic.get(f"/decide?verdict=hold&event={A}").status_code == 403
    ann.submit(f"/events/{A}", "hold")
    form, _ = ann.page(f"/events/{A}").form_with("Withdraw")
    assert vic.post(form.action, {"csrf": csrf}).status_code == 403
    assert "ann holds it" in vic.page(f"/events/{A}").text


def test_user_sees_only_events_within_the_scope(tmp_path):
    users = (*PEOPLE, ("sam", "approver", "labels.team:search"))
    with Office(tmp_path, users=users) as office:
        office.portal.send(
            fleet_record(0, resources=("vm_0",)),
            fleet_record(1, event_id="B", resources=("vm_1",), labels={"team": "search"}),
        )
        sam = office.browser("sam")
        assert "vm_1" in sam.page("/").text
        for path in ("/", "/timeline", "/agents", "/audit"):
            assert "vm_0" not in sam.page(path).text
        assert sam.get(f"/events/{A}").status_code == 404
        office.browser("ann").submit(f"/events/{A}", "hold")
        assert "vm_0" not in sam.page("/audit").html
        assert A not in sam.page(f"/?part={A}").html


def test_page_lists_reasons_if_no_agent_would_follow_an_approval(tmp_path):
    with Office(tmp_path) as office:
        office.portal.send(fleet_record(0), fleet_record(1))
        office.poll(1, kids=["p1"], disabled=True)
        page = office.browser("ann").page(f"/events/{A}")
        reasons = "vm_0 has not polled for decisions within the last day; vm_1 approves nothing"
        assert f"No agent would follow an approval now: {reasons}" in page.text
        assert not any(text.startswith("Approve") for text in page.buttons)


def test_reasons_name_only_vms_of_the_event(tmp_path):
    with Office(tmp_path) as office:
        office.portal.send(fleet_record(0), fleet_record(1), fleet_record(2))
        page = office.browser("ann").page(f"/events/{A}")
        assert "vm_1 has not polled for decisions within the last day." in page.text
        assert "vm_2 has not polled" not in page.text


def test_portal_without_a_signing_key_shows_a_message(tmp_path):
    with Office(tmp_path, signs=False) as office:
        office.portal.send(fleet_record(0))
        page = office.browser("ann").page(f"/events/{A}")
        assert "This portal has no key." in page.text
        assert page.buttons == ["Sign out"]


def test_ended_event_has_no_buttons_and_leaves_the_first_page_after_an_hour(office):
    ann = office.browser("ann")
    office.portal.send(
        fleet_record(0, sequence=2, transition=Transition.COMPLETED, seconds=20),
        fleet_record(1, sequence=2, transition=Transition.COMPLETED, seconds=20),
        fleet_record(2, event_id="B", resources=("vm_2",), seconds=-7200),
        fleet_record(2, event_id="B", resources=("vm_2",), sequence=2, transition=Transition.CANCELED, seconds=-7100),
    )
    page = ann.page("/")
    assert re.search("Ended in the last hour .* completed Freeze, 5 s pause vm_0, vm_1 West completed at", page.text)
    assert "vm_2" not in page.text
    page = ann.page(f"/events/{A}")
    assert not any(text.startswith(("Approve", "Hold")) for text in page.buttons)
    timeline = ann.page("/timeline").text
    assert "Freeze of vm_2 canceled" in timeline
    assert "vm_2" in timeline


def test_page_after_notbefore_names_no_time_of_the_start(office):
    ann, key = office.browser("ann"), key_of_event_id("late")
    office.portal.send(*(fleet_record(vm, event_id="late", not_before=NOW - timedelta(hours=1)) for vm in (0, 1)))
    start = "Azure can start the event at any moment."
    assert f"Hold prevents an early start. {start}" in ann.page(f"/events/{key}").text
    ann.submit(f"/events/{key}", "hold")
    held = ann.page(f"/events/{key}").text
    assert f"{start} NotBefore was 2026-11-20 10:00:00 UTC." in held
    assert f"Held by ann. {start}" in held
    assert "Azure starts" not in held.partition("Times are in UTC")[0]


def test_page_of_a_recommendation_does_not_explain_a_missing_start(office):
    office.portal.send(fleet_record(0, event_id="spot", event_type="SpotRebalanceRecommendation"))
    page = office.browser("ann").page(f"/events/{key_of_event_id('spot')}")
    assert "The recommendation does not change the VM." in page.text
    assert "Why it has not started" not in page.text
