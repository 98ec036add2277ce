"""The API for readers: events by pages and filters, one event, the audit, and the export."""

import json
import tracemalloc

import msgspec
import pytest
import requests
from fleet_records import fleet_record
from portal_kit import AGENT_TOKEN, READER_TOKEN, RunningPortal

from bridge.approval.digest import digest
from bridge.events.record import Transition
from bridge.portal.audit import Entry
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import Store

NASTY = "<script>alert(1)</script>\x07\u202e\r\nSet-Cookie: a=b"
PATHS = ("/events", "/events/A", "/events/A/records", "/agents", "/audit", "/export.jsonl")


@pytest.fixture(scope="module")
def portal(tmp_path_factory):
    with RunningPortal(tmp_path_factory.mktemp("portal")) as running:
        running.send(
            *(fleet_record(vm, event_id=f"E-{vm}", seconds=vm, labels={"team": f"t{vm % 2}"}) for vm in range(10)),
            fleet_record(20, event_id="over", transition=Transition.COMPLETED, seconds=20, labels={}),
            fleet_record(21, event_id="with/a slash", seconds=21, labels={}),
            fleet_record(
                22, event_id="nasty", seconds=22, labels={NASTY: NASTY}, description=NASTY, resources=(NASTY,)
            ),
        )
        yield running


def test_agents_endpoint_returns_the_reported_agent_state(portal):
    stranger = "00000000-0000-4000-8000-00000000abcd"
    said = {"version": "9.9", "kids": ["ops"], "required_approvals": 2, "dry_run": True, "disabled": False}
    asked = requests.get(
        f"{portal.url}/vms/{stranger}/decisions?index=0&wait=1",
        headers={"Authorization": f"Bearer {AGENT_TOKEN}", "Scheduled-Events-Agent": json.dumps(said)},
        timeout=20,
    )
    assert asked.status_code == 200
    found = {each["vm_key"]: each for each in portal.get("/agents").json()["agents"]}
    assert len(found) == 14
    assert found[stranger] == {
        "vm_key": stranger,
        "record": None,
        "agent": {
            **said,
            "command": None,
            "command_covers_all": None,
            "is_connected": True,
            "is_reconnecting": False,
            "is_attested": False,
            "received_index": 0,
        },
    }
    ours = found[fleet_record(1).vm.vm_id.lower()]
    assert (ours["agent"], ours["record"]["labels"]) == (None, {"team": "t1"})
    assert ours["record"]["vm"]["name"] == fleet_record(1).vm.name


def ids(answer):
    assert answer.status_code == 200, answer.text
    return [event["event"]["event_id"] for event in answer.json()["events"]]


def test_past_events_are_listed_newest_first_with_their_total(portal):
    answer = portal.get("/events", state="all")
    assert ids(answer) == ["nasty", "with/a slash", "over", *(f"E-{vm}" for vm in reversed(range(10)))]
    assert answer.json()["total"] == 13


def test_pagination_returns_each_event_once(portal):
    seen, cursor = [], None
    for _ in range(20):
        answer = portal.get("/events", limit="3", state="all", **({} if cursor is None else {"cursor": cursor}))
        seen += ids(answer)
        cursor = answer.json()["cursor"]
        if cursor is None:
            break
    assert seen == ids(portal.get("/events", state="all"))
    assert len(seen) == len(set(seen)) == 13


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"state": "over"}, 1),
        ({"group": "labels.team:t1"}, 5),
        ({"group": "resource_group:WEST"}, 12),
        ({"group": "labels.team:t"}, 0),
        ({"group": "labels.team:%"}, 0),
        ({"state": "all", "group": "labels.none:x"}, 0),
    ],
)
def test_events_are_filtered(portal, query, count):
    assert len(ids(portal.get("/events", **query))) == count


@pytest.mark.parametrize(
    "query",
    [
        {"state": "closed"},
        {"group": "team"},
        {"group": "labels.a\nb:c"},
        {"cursor": "x"},
        {"cursor": "WzEsMl0="},
        {"limit": "0"},
        {"limit": "501"},
        {"limit": "ten"},
        {"limit": "\u0661"},
        {"limit": "9" * 5000},
    ],
)
def test_invalid_query_is_rejected(portal, query):
    assert portal.get("/events", **query).status_code == 400


def test_event_is_found_by_its_key_and_by_its_event_id(portal):
    by_id = portal.get("/events/E-3").json()
    assert portal.get(f"/events/{by_id['event']['key']}").json() == by_id
    event = by_id["event"]
    assert event["digest"] == digest(fleet_record(3, event_id="E-3").event)
    assert event["unconfirmed"] == ["vm_0", "vm_1"]
    assert event["undecidable_because"] is None


def test_records_of_an_event_are_json_lines_and_a_vm_has_its_newest_record(tmp_path):
    newest = fleet_record(0, event_id="two words", sequence=2, seconds=1, transition=Transition.STARTED)
    records = [fleet_record(0, event_id="two words"), newest, fleet_record(1, event_id="two words")]
    with RunningPortal(tmp_path) as portal:
        portal.send(*records)
        lines = portal.get("/events/two words/records").text.splitlines()
        assert {json.loads(line)["id"] for line in lines} == {record.id for record in records}
        [line] = portal.get("/events/two words/records", vm_id=newest.vm.vm_id.upper()).text.splitlines()
        assert json.loads(line)["id"] == newest.id
        assert portal.get("/events/two words/records", vm_id="another").status_code == 404
        assert portal.get("/events/none/records").status_code == 404


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [None, "wrong", AGENT_TOKEN])
def test_requests_without_the_reader_token_are_rejected(portal, path, token):
    answer = portal.get(path, token=token)
    assert answer.status_code == 401
    assert set(answer.json()) == {"error"}


@pytest.mark.parametrize("path", PATHS)
def test_api_is_closed_without_a_configured_reader_token(tmp_path, path):
    with RunningPortal(tmp_path, readers={"token_file": None, "token_env": None}) as portal:
        for token in (None, "", "None"):
            assert portal.get(path, token=token).status_code == 403


def test_audit_entries_are_returned_after_a_number(portal):
    found = portal.get("/audit").json()
    assert [entry["action"] for entry in found["entries"]] == ["started"]
    assert portal.get("/audit", after=str(found["last"])).json() == {"entries": [], "last": found["last"]}


def test_export_streams_one_entry_per_line_in_constant_memory(tmp_path):
    store = Store.of_file(tmp_path / "portal.db")
    store.migrate()
    entry = Entry(actor="ada", action="approved", subject="e", details={"reason": "x" * 400})
    for _ in range(4):
        store.write(add_entries, [entry] * 1_000, at="2026-11-20T11:00:30.000Z")
    store.close()
    with RunningPortal(tmp_path) as portal:
        tracemalloc.start()
        reader = {"Authorization": f"Bearer {READER_TOKEN}"}
        with requests.get(f"{portal.url}/export.jsonl", headers=reader, stream=True, timeout=60) as answer:
            assert answer.status_code == 200
            numbers = [json.loads(line)["entry"] for line in answer.iter_lines()]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert numbers == list(range(1, 4_002))
    assert peak < 15 * len(msgspec.json.encode(entry)) * 1_000
