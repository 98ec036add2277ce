"""Decisions of several people on several events, at one portal and at two portals on PostgreSQL."""

import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from fleet_records import fleet_record, vm_id_of
from msgspec.structs import replace
from page_kit import Page
from portal_databases import audit_fault
from portal_users import csrf_token_of

WAVE = "Freeze|westeurope|2026-11-20T11"
EVENTS, VMS = 48, 212


def announce(fleet, *, events=EVENTS, vms=VMS, **fields):
    for number in range(events):
        members = range(number, vms, events)
        names = tuple(f"vm_{vm}" for vm in members)
        for vm in members:
            record = fleet_record(vm, event_id=f"E-{number}", resources=names, **fields)
            fleet.report(
                vm, replace(record, vm=replace(record.vm, location="westeurope", resource_group=f"r-{number}"))
            )


def form_of(fleet, person, path, button):
    """Return the URL and the fields that *button* submits on the page at *path*."""
    form, pressed = fleet.page(person, path).form_with(button)
    return form.action, [*form.fields, *pressed]


def verdicts_of(fleet, vm):
    """Verify the signatures, and return the verdicts for *vm*, oldest first."""
    claims = [fleet.claims(each) for each in fleet.poll(vm)["decisions"]]
    assert {each.audience for each in claims} <= {vm_id_of(vm)}
    return [each.verdict.value for each in sorted(claims, key=lambda each: each.issued_at)]


def audit(fleet, *actions):
    return [each for each in fleet.portal().get("/audit").json()["entries"] if each["action"] in actions]


def test_concurrent_holds_of_a_wave_have_one_audit_entry_per_user(fleet_of, database):
    with fleet_of().running() as fleet:
        announce(fleet)
        forms = {person: form_of(fleet, person, f"/decide?wave={WAVE}", "hold") for person in ("ann", "sam")}
        together = Barrier(len(forms))

        def submit(person):
            together.wait()
            return fleet.submit(person, *forms[person])

        with ThreadPoolExecutor(len(forms)) as pool:
            answers = list(pool.map(submit, forms))
        assert [(each.status_code, Page(each.text).text.count("Accepted")) for each in answers] == [(200, EVENTS)] * 2
        entries = audit(fleet, "held")
        assert sorted(each["actor"] for each in entries) == ["ann", "sam"]
        for entry in entries:
            assert sum(len(each["decisions"]) for each in entry["details"]["events"]) == VMS
        for vm in (0, 100, VMS - 1):
            assert set(verdicts_of(fleet, vm)) == {"hold"}
    store = database.store()
    assert audit_fault(store) is None


def test_concurrent_approval_and_hold_never_result_in_an_approval(fleet_of):
    """Whichever is stored first, the hold is the newest decision on each event."""
    with fleet_of().running() as fleet:
        announce(fleet, events=10, vms=10)
        for vm in range(10):
            fleet.poll(vm)
        keys = "&".join(f"event={each['key']}" for each in fleet.events()["events"])
        forms = [
            (person, *form_of(fleet, person, f"/decide?verdict={verdict}&{keys}", verdict))
            for person, verdict in (("ann", "approve"), ("sam", "hold"))
        ]
        together = Barrier(len(forms))

        def submit(form):
            together.wait()
            return fleet.submit(*form)

        with ThreadPoolExecutor(len(forms)) as pool:
            approved, held = pool.map(submit, forms)
        assert (held.status_code, Page(held.text).text.count("Accepted")) == (200, 10)
        refused = Page(approved.text).text.count("The event is held by sam.")
        assert Page(approved.text).text.count("Accepted") + refused == 10
        found = [fleet.portal().get(f"/events/E-{number}").json() for number in range(10)]
        assert {verdicts_of(fleet, vm)[-1] for vm in range(10)} == {"hold"}, found


def test_lifting_the_hold_of_another_person_requires_two_people(fleet_of):
    with fleet_of(people={"required_approvals": 2}).running() as fleet:
        for vm, team in ((0, "payments"), (1, "search")):
            fleet.report(vm, fleet_record(vm, labels={"team": team}))
        assert fleet.decide("ann", "hold", "A").status_code == 303
        path = f"/events/{fleet.event('A')['key']}"
        [withdraw] = re.findall(r"/verdicts/[0-9a-f-]{36}/withdraw", fleet.page("sam", path).html)

        def lift(person):
            return fleet.submit(person, withdraw, {"csrf": csrf_token_of(person)})

        for _ in range(2):
            assert lift("sam").status_code == 303
            assert "ann holds it, sam agrees to lift the hold" in fleet.page("sam", path).text
            assert fleet.decide("ann", "approve", "A").status_code == 409
        assert lift("eve").status_code == 303
        assert fleet.decide("ann", "approve", "A").status_code == 303
        actions = [(each["actor"], each["action"]) for each in audit(fleet, "held", "agreed_to_lift", "withdrew")]
        assert sorted(actions) == [
            ("ann", "held"),
            ("eve", "withdrew"),
            ("sam", "agreed_to_lift"),
            ("sam", "agreed_to_lift"),
        ]
