"""The audit page: one row for each decision, filters, pages, the export, and the entries that a scope allows."""

import csv
import io
import json

import pytest
from fleet_records import NOW, fleet_record
from fold_kit import add
from page_kit import PEOPLE, Office

from bridge.clock import format_time
from bridge.portal.audit import Entry
from bridge.portal.fleet import key_of_event_id
from bridge.portal.store.audit import AuditFilter, add_entries, entries

A, B = key_of_event_id("A"), key_of_event_id("B")
USERS = (*PEOPLE, ("sam", "approver", "labels.team:search"), ("olga", "operator", ""))


@pytest.fixture
def office(tmp_path):
    with Office(tmp_path, users=USERS) as office:
        office.portal.send(
            fleet_record(0),
            fleet_record(1),
            fleet_record(2, event_id="B", resources=("vm_2",), labels={"team": "search"}),
        )
        yield office


def rows(page):
    return page.html.count('<td data-label="Time">')


def links(page, rel):
    return [found["href"] for tag, found in page.tags if tag == "a" and found.get("rel") == rel]


def test_each_decision_is_one_row_with_its_number_of_vms(office):
    office.poll(0, kids=["p1"])
    office.poll(1, kids=["p1"])
    ann = office.browser("ann")
    ann.submit(f"/events/{A}", "hold", reason="not now")
    page = ann.page("/audit")
    assert rows(page) == 1
    assert "ann held Freeze of vm_0, vm_1 2 not now" in page.text
    assert "1-1 of 1, decisions only" in page.text
    assert "signed in" in ann.page("/audit?show=all").text


def test_filters_are_in_the_url_and_apply_to_the_export(office):
    ann, bob = office.browser("ann"), office.browser("bob")
    ann.submit(f"/events/{A}", "hold")
    bob.submit(f"/events/{B}", "hold", reason="=1+1")
    assert rows(ann.page("/audit")) == 2
    assert "bob held" in ann.page("/audit?person=bob").text
    for query in (
        "person=bob",
        "person=%EF%BC%A2ob",
        "event=B",
        f"event={B}",
        "person=bob&since=2026-11-20&until=2026-11-20",
    ):
        assert rows(ann.page(f"/audit?{query}")) == 1
        exported = [json.loads(line) for line in ann.get(f"/audit/export.jsonl?{query}").text.splitlines()]
        assert [(each["actor"], each["action"]) for each in exported] == [("bob", "held")]
    for query in ("person=eve", "since=2026-11-21", "until=2026-11-19"):
        assert rows(ann.page(f"/audit?{query}")) == 0
    answer = ann.get("/audit/export.csv?show=all")
    assert answer.headers["Content-Type"].startswith("text/csv")
    table = list(csv.DictReader(io.StringIO(answer.text)))
    assert [each["action"] for each in table] == ["started", "signed_in", "signed_in", "held", "held"]
    for address in ("/audit?show=x", "/audit?since=x", "/audit?until=9999-12-31", "/audit?before=x"):
        assert ann.get(address).status_code == 400
    assert ann.get("/audit/export.pdf").status_code == 404


def test_pages_show_older_entries_and_the_total(office):
    ann = office.browser("ann")
    for _ in range(30):
        ann.submit(f"/events/{A}", "hold", reason="r")
        ann.submit(f"/events/{A}", "Withdraw")
    page = ann.page("/audit?person=ann")
    assert "1-50 of 60" in page.text
    [older] = links(page, "next")
    assert "person=ann" in older
    assert "51-60 of 60" in ann.page(older).text
    assert links(ann.page(older), "next") == []


def test_scope_limits_the_rows_the_count_and_the_export(office):
    ann, sam = office.browser("ann"), office.browser("sam")
    ann.submit(f"/events/{A}", "hold")
    ann.submit(f"/events/{B}", "hold")
    page = sam.page("/audit?show=all")
    assert "1-2 of 2" in page.text  # the hold of B, and the sign-in of sam
    assert "vm_0" not in page.html
    exported = [json.loads(line) for line in sam.get("/audit/export.jsonl?show=all").text.splitlines()]
    assert [(each["actor"], each["action"]) for each in exported] == [("sam", "signed_in"), ("ann", "held")]


def test_operator_can_read_every_page_but_cannot_decide(office):
    olga = office.browser("olga")
    assert (
        "Operators manage users on the command line: scheduled-events-bridge portal users" in olga.page("/audit").text
    )
    for path in ("/", "/timeline", "/agents", f"/events/{A}"):
        assert not any(text.startswith(("Approve", "Hold")) for text in olga.page(path).buttons)
    refused = olga.get(f"/decide?verdict=hold&event={A}")
    assert (refused.status_code, "You are an operator. Only an approver can decide." in refused.text) == (403, True)


def test_entry_of_many_events_needs_a_scope_for_all_events(store):
    add(store, fleet_record(0), fleet_record(2, event_id="B", resources=("vm_2",), labels={"team": "search"}))

    def entry(*keys):
        return Entry(actor="ann", action="held", subject="", details={"events": [{"event_key": key} for key in keys]})

    store.write(add_entries, [entry(A, B), entry(B), entry(A)], at=format_time(NOW))

    def found(**wanted):
        return [each.entry for each in store.read(entries, AuditFilter(**wanted), after=0)]

    assert (found(), found(event_key=A), found(event_key=B)) == ([1, 2, 3], [1, 3], [1, 2])
    assert found(scope=("labels.team:search",)) == [2]
    assert found(scope=("labels.team:search", "labels.team:payments")) == [1, 2, 3]
