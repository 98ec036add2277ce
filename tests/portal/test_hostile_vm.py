"""One hostile VM with its own valid attested token, against a portal and against two portals on PostgreSQL.

The hostile VM is the VM with the number 66. vm_0 and vm_1 are honest VMs of the team payments.
"""

import hashlib
import json
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import pytest
from fleet_records import NOW, fleet_record, vm_id_of
from msgspec.structs import replace
from portal_kit import AGENT_TOKEN, BATCH, batch
from waiting import until

from bridge.clock import format_time
from bridge.events.record import Approval, Evidence, Transition

HOSTILE = 66
SEARCH = {"team": "search"}
COLLAPSED = "455 more events, which only vm_66 reports. The list and the counts above do not include them. "


@pytest.fixture
def fleet(fleet_of):
    with fleet_of(vm_limits={"records_per_minute": 10_000}).running() as running:
        yield running


def hostile(**fields):
    return fleet_record(HOSTILE, **{"labels": SEARCH, **fields})


def of_others(fleet):
    """Return the view of other users: the API, and the page of a user of each scope."""
    answer = fleet.events()
    return (
        [(each["key"], each["digest"], each["state"], each["groups"]) for each in answer["events"]],
        answer["total"],
        fleet.page("sam").text,
        fleet.page("ann").text.replace(COLLAPSED, ""),
    )


def test_invented_events_change_one_line(fleet):
    for vm in (0, 1):
        fleet.report(vm, fleet_record(vm))
    before = of_others(fleet)
    for start in range(0, 200, 50):
        fleet.report(
            HOSTILE,
            *(
                hostile(event_id=f"ahead-{number}", seconds=300 * 86_400, resources=("vm_66",))
                for number in range(start, start + 50)
            ),
        )
    fleet.report(HOSTILE, *(hostile(event_id=f"invented-{number}", resources=("vm_0",)) for number in range(255)))
    assert of_others(fleet) == before
    [line] = fleet.events()["collapsed"]
    assert (line["name"], line["count"]) == ("vm_66", 455)
    assert COLLAPSED in fleet.page("ann").text
    assert "vm_66" not in fleet.page("sam").text


def test_rate_and_size_of_records_are_limited(fleet_of):
    with fleet_of().running() as fleet:
        names = tuple(f"vm_{number}" for number in range(30_000))
        assert fleet.send(HOSTILE, hostile(resources=names)).status_code == 413
        statuses = [fleet.send(HOSTILE, hostile(event_id=f"E-{number}")).status_code for number in range(300)]
        assert statuses.count(204) <= 121 * len(fleet.portals)
        refused = fleet.send(HOSTILE, hostile(event_id="one more"))
        refused = refused if refused.status_code == 429 else fleet.send(HOSTILE, hostile(event_id="another"))
        assert (refused.status_code, int(refused.headers["Retry-After"]) >= 1) == (429, True)
        fleet.report(0, fleet_record(0))
        fleet.clock.advance(60)
        fleet.report(HOSTILE, hostile(event_id="a minute later"))


def test_large_record_counts_as_several(fleet_of):
    with fleet_of().running() as fleet:
        names = tuple(f"vm_{number}" for number in range(20_000))
        large = [hostile(event_id=f"E-{number}", resources=names) for number in range(30)]
        statuses = [fleet.send(HOSTILE, each).status_code for each in large]
        assert {204, 429} == set(statuses)
        assert statuses.count(204) <= 10 * len(fleet.portals)


def test_refused_requests_use_the_limit_of_the_vm(fleet_of):
    with fleet_of().running() as fleet:
        malformed, foreign = b"[" * 1_000_000, batch([fleet_record(0)])
        for portal in fleet.portals:
            post = partial(portal.post, content_type=BATCH)
            token = fleet.token_of(HOSTILE)
            assert [post(malformed, token=token).status_code for _ in range(4)] == [400, 400, 429, 429]
            fleet.clock.advance(120)
            assert [post(b"x" * 2_000_000, token=token).status_code for _ in range(3)] == [413, 413, 429]
            token = fleet.token_of(1)
            statuses = [post(foreign, token=token).status_code for _ in range(125)]
            assert {403, 429} == set(statuses)
            assert statuses.count(403) <= 121


def test_third_large_request_at_once_is_refused_before_the_portal_reads_its_body(fleet_of):
    with fleet_of().running() as fleet, ExitStack() as opened:
        for portal in fleet.portals:
            head = f"Authorization: Bearer {fleet.token_of(HOSTILE)}\r\nContent-Length: 1000000\r\n\r\n"
            for _ in range(3):
                connection = opened.enter_context(socket.create_connection(portal.portal.address, timeout=30))
                connection.sendall(f"POST /api/v1/records HTTP/1.1\r\nHost: x\r\n{head}".encode())
                time.sleep(0.1)  # the portal reads the heads in this order
            assert connection.recv(100).startswith(b"HTTP/1.1 429 ")


def test_records_that_change_many_events_use_the_limit_of_the_vm(fleet_of):
    with fleet_of(vm_limits={"records_per_minute": 1_000}).running() as fleet:
        fleet.report(HOSTILE, *(hostile(event_id=f"E-{number}") for number in range(200)))
        for start, portal in enumerate(fleet.portals):
            token, accepted = fleet.token_of(HOSTILE), 0
            for number in range(100 * start, 100 * start + 100):
                beat = hostile(sequence=2 + number, transition=Transition.HEARTBEAT, labels={"n": str(number)})
                accepted += portal.post(batch([beat]), content_type=BATCH, token=token).status_code == 204
            assert accepted < 50


def test_unusual_values_of_a_record_do_not_break_the_page(fleet):
    fleet.report(0, fleet_record(0))
    path = f"/events/{fleet.event('A')['key']}"
    for unusual in ('{"a": 1e999}', f'{{"a": {"9" * 5_000}}}'):
        body = json.loads(batch([hostile()]))
        body[0]["data"]["event"]["extra"], body[0]["data"]["previous"] = "X", "X"
        text = json.dumps(body).replace('"X"', unusual)
        assert fleet.portal().post(text.encode(), content_type=BATCH, token=fleet.token_of(HOSTILE)).status_code == 204
        assert "vm_66" in fleet.page("ann", path).text


def test_vm_that_changes_its_name_confirms_no_name(fleet):
    fleet.report(0, fleet_record(0))
    fleet.report(HOSTILE, hostile(event_id="its own", resources=("vm_66",)))
    fleet.report(HOSTILE, replace(hostile(sequence=2), vm=replace(hostile().vm, name="vm_1")))
    event = fleet.event("A")
    assert [vm["name"] for vm in event["vms"] if vm["is_member"]] == ["vm_0"]
    assert event["unconfirmed"] == ["vm_1"]


def test_vm_cannot_claim_the_record_of_another_vm(fleet):
    honest = fleet_record(0)
    fleet.report(HOSTILE, replace(hostile(), id=honest.id))
    fleet.report(0, honest)
    assert {each["vm"]["name"] for each in fleet.portal().get("/events/A").json()["records"]} == {"vm_0", "vm_66"}


def test_each_outcome_of_a_decision_has_one_audit_entry(fleet):
    for vm in (0, 1):
        fleet.report(vm, fleet_record(vm))
        fleet.poll(vm)
    assert fleet.decide("ann", "approve", "A").status_code == 303
    [decision] = fleet.poll(0)["decisions"]
    hashes = (hashlib.sha256(decision.encode()).hexdigest(),)
    failed, approved = Transition.APPROVAL_FAILED, Transition.APPROVED
    outcomes = [(failed, "rejected"), (failed, "rejected"), (failed, "gave_up"), (approved, "accepted")]
    for vm in (HOSTILE, 0):
        for sequence, (transition, result) in enumerate(outcomes, start=2):
            approval = Approval(source="portal", result=result, approvers=("ann",), jws_sha256=hashes)
            fleet.report(vm, replace(fleet_record(vm, sequence=sequence, transition=transition), approval=approval))
    entries = [each["details"] for each in fleet.portal().get("/audit").json()["entries"] if each["actor"] == "ann"]
    found = [(each["vm"], each["approval"]["result"]) for each in entries if "approval" in each]
    assert sorted(found) == [("vm_0", "accepted"), ("vm_0", "gave_up"), ("vm_0", "rejected")]


def test_invented_outcomes_of_a_decision_add_few_audit_entries(fleet):
    fleet.report(0, fleet_record(0, resources=("vm_0",)))
    fleet.poll(0)
    assert fleet.decide("ann", "approve", "A").status_code == 303
    [decision] = fleet.poll(0)["decisions"]
    hashes = (hashlib.sha256(decision.encode()).hexdigest(),)
    for number in range(50):
        approval = Approval(source="portal", result=f"%{number:060}", approvers=("ann",), jws_sha256=hashes)
        outcome = fleet_record(0, sequence=2 + number, transition=Transition.APPROVAL_FAILED)
        fleet.report(0, replace(outcome, approval=approval))
    entries = fleet.portal().get("/audit").json()["entries"]
    assert len([each for each in entries if each["action"] == "outcome_approval_failed"]) < 10


def test_report_of_an_outsider_changes_nothing_and_blocks_no_hold(fleet):
    for vm in (0, 1):
        fleet.report(vm, fleet_record(vm, description="planned", active=("A",)))
        fleet.poll(vm)
    compared = ("state", "digest", "event", "groups", "counts", "unconfirmed", "first_observed_at", "observed_at")
    before, buttons = fleet.event("A"), fleet.page("sam").buttons
    taken = Approval(source="rule:mine", result="accepted", approvers=("ann",))
    reports = [
        hostile(event_type="Terminate", resources=("vm_66", "vm_0")),
        hostile(sequence=2, description="checked with the DBA team"),
        hostile(sequence=3, transition=Transition.STARTED),
        replace(hostile(sequence=4, transition=Transition.APPROVED), approval=taken),
        hostile(sequence=5, transition=Transition.COMPLETED, evidence=Evidence.OBSERVED, seconds=86_400),
        hostile(sequence=6, transition=Transition.HEARTBEAT, active=()),
    ]
    for report in reports:
        fleet.report(HOSTILE, report)
        after = fleet.event("A")
        assert {name: after[name] for name in compared} == {name: before[name] for name in compared}
        assert fleet.page("sam").buttons == buttons
        assert [vm["is_member"] for vm in after["vms"] if vm["name"] == "vm_66"] == [False]
    assert "not a VM of the event" in fleet.page("ann", f"/events/{before['key']}").text
    answer = fleet.decide("sam", "hold", "A")
    assert answer.status_code == 303, answer.text


def test_scoped_approver_sees_the_urgent_event_first_among_500(fleet):
    at = NOW + timedelta(minutes=9)
    for start in range(0, 500, 100):
        vms = range(1_000 + start, 1_100 + start)
        for vm in vms:
            later = NOW + timedelta(minutes=10, seconds=vm)
            fields = {"resources": (f"vm_{vm}",), "labels": SEARCH, "not_before": later}
            fleet.report(vm, fleet_record(vm, event_id=f"E-{vm}", **fields))
    fleet.report(0, fleet_record(0, event_id="mine", resources=("vm_0",), not_before=at))
    page = fleet.page("sam")
    assert (page.html.count('<tr id="event-'), "vm_0" in page.text) == (1, True)
    first = fleet.events(limit="21")
    assert first["total"] == 501
    assert [each["event"]["event_id"] for each in first["events"]] == [
        "mine",
        *(f"E-{vm}" for vm in range(1_000, 1_020)),
    ]
    assert "500 events" in fleet.page("eve").text
    assert "501 events" in fleet.page("ann").text


def test_unconfirmed_name_needs_an_explicit_confirmation(fleet):
    fleet.report(0, fleet_record(0, event_id="earlier"))
    fleet.report(1, fleet_record(1, event_id="earlier"))
    fleet.clock.advance(660)  # vm_1 is silent
    fleet.report(0, fleet_record(0))
    impostor = hostile()
    fleet.report(HOSTILE, replace(impostor, vm=replace(impostor.vm, name="vm_1")))
    fleet.poll(0)
    assert fleet.event("A")["unconfirmed"] == ["vm_1"]
    assert "vm_1 claims the name of another VM" in fleet.page("ann", "/agents?show=conflict").text
    assert fleet.decide("sam", "approve", "A", "vm_1").status_code == 403
    refused = fleet.decide("ann", "approve", "A")
    assert (refused.status_code, "No agent has confirmed that the event affects vm_1." in refused.text) == (409, True)
    assert fleet.decide("ann", "approve", "A", "vm_1").status_code == 303
    assert fleet.decide("sam", "hold", "A").status_code == 303


def test_claimed_label_grants_no_scope_with_an_inventory(fleet_of, tmp_path):
    inventory = tmp_path / "vms.csv"
    lines = [f"{vm_id_of(vm)},vm_{vm},West,team=payments" for vm in (0, 1)]
    inventory.write_text("\n".join(["vmId,name,resourceGroup,labels", *lines]), encoding="utf-8")
    with fleet_of(inventory={"file": str(inventory)}).running() as fleet:

        def is_loaded():
            fleet.report(0, fleet_record(0, labels={}))
            return any(each.startswith("labels.") for each in fleet.event("A")["groups"])

        until(is_loaded)
        assert "labels.team:payments" in fleet.event("A")["groups"]
        fleet.report(HOSTILE, fleet_record(HOSTILE, event_id="B", resources=("vm_66", "vm_0")))
        assert fleet.event("B")["groups"] == ["subscription:s"]
        assert "vm_66" not in fleet.page("sam").text


def test_only_the_vm_whose_command_covers_all_receives_the_approval(fleet):
    for vm in (0, 1):
        fleet.report(vm, fleet_record(vm))
        fleet.poll(vm, command=True)
    refused = fleet.decide("ann", "approve", "A")
    assert (refused.status_code, "has no command that covers all VMs" in refused.text) == (409, True)
    fleet.poll(1, command=True, command_covers_all=True)
    assert fleet.decide("ann", "approve", "A").status_code == 303
    assert (fleet.poll(0)["decisions"], len(fleet.poll(1)["decisions"])) == ([], 1)


@pytest.mark.parametrize("token", [None, AGENT_TOKEN], ids=["attested", "shared token"])
def test_approval_reaches_ten_honest_agents_despite_invented_agents(fleet, token):
    names = tuple(f"vm_{number}" for number in range(10))
    for vm in range(10):
        fleet.report(vm, fleet_record(vm, resources=names), token=token)
        fleet.poll(vm, token=token)
    for vm in range(100, 120):
        fleet.report(vm, fleet_record(vm, resources=(*names, f"vm_{vm}")), token=token)
        fleet.poll(vm, token=token, command=True, command_covers_all=True)
    assert fleet.decide("ann", "approve", "A").status_code == 303
    assert [len(fleet.poll(vm, token=token)["decisions"]) for vm in range(10)] == [1] * 10


def test_backlog_keeps_its_times_and_a_clock_ahead_does_not_outrank_later_streams(fleet):
    for vm in reversed(range(100)):
        fields = {"event_id": f"E-{vm}", "resources": (f"vm_{vm}",)}
        steps = ((1, Transition.SCHEDULED, 0), (2, Transition.STARTED, 900), (3, Transition.COMPLETED, 960))
        backlog = [
            fleet_record(vm, sequence=sequence, transition=transition, seconds=-7_200 + vm + later, **fields)
            for sequence, transition, later in steps
        ]
        fleet.report(vm, *backlog)
    found = fleet.events(state="all", limit="100")["events"]
    assert [each["event"]["event_id"] for each in found] == [f"E-{vm}" for vm in reversed(range(100))]
    times = [format_time(NOW + timedelta(seconds=-7_200 + vm)) for vm in reversed(range(100))]
    assert [each["first_observed_at"] for each in found] == times
    assert {vm["state"] for vm in fleet.event("E-7")["vms"]} == {"completed"}
    fleet.report(20, fleet_record(20, event_id="C", stream=432_000))
    fleet.clock.advance(600)
    fleet.report(20, fleet_record(20, event_id="C", stream=5, transition=Transition.STARTED))
    assert [vm["state"] for vm in fleet.event("C")["vms"]] == ["started"]


def test_approval_after_a_hold_with_a_clock_ahead_is_later_than_the_hold(fleet):
    fleet.report(0, fleet_record(0, resources=("vm_0",)))
    fleet.poll(0)
    fleet.clock.advance(300)
    assert fleet.decide("ann", "hold", "A").status_code == 303
    hold = fleet.claims(fleet.poll(0)["decisions"][0], ahead_seconds=300)
    fleet.clock.advance(-300)
    page = fleet.page("ann", f"/events/{fleet.event('A')['key']}")
    form, pressed = page.form_with("Withdraw")
    fleet.submit("ann", form.action, [*form.fields, *pressed])
    fleet.poll(0)
    assert fleet.decide("ann", "approve", "A").status_code == 303
    newest = [fleet.claims(each, ahead_seconds=300) for each in fleet.poll(0)["decisions"]]
    [approval] = [each for each in newest if each.verdict.value == "approve"]
    assert approval.issued_at > hold.issued_at
