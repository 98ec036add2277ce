"""The first page without a script: one line for each event, filters in the URL, and counts."""

import re
from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record, vm_id_of
from page_kit import PEOPLE, Office, Page

from bridge.events.record import Transition
from bridge.portal.fleet import key_of_event_id

A, B = key_of_event_id("A"), key_of_event_id("B")
NAMES = ("vm_0", "vm_1", "vm_4")
ABLE = {"version": "9.9", "kids": ["p1"]}


@pytest.fixture
def office(tmp_path):
    with Office(tmp_path, people={"required_approvals": 2}) as office:
        reboot = {"event_type": "Reboot", "duration_seconds": None, "labels": {"team": "search"}}
        office.portal.send(
            *(fleet_record(vm, resources=NAMES, not_before=NOW + timedelta(minutes=20)) for vm in (0, 1, 4)),
            fleet_record(2, event_id="B", resources=("vm_2",), not_before=NOW + timedelta(minutes=8), **reboot),
            fleet_record(3, event_id="C", resources=("vm_3",), transition=Transition.STARTED),
        )
        office.poll(0, **ABLE)
        yield office


def lines(page):
    """Return the EventKeys of the announced events on *page*, in order."""
    return re.findall('id="event-([0-9a-f]{32})"', page.html.partition('id="below"')[0])


def test_line_contains_the_start_the_event_and_the_decision(office):
    office.browser("ann").submit(f"/events/{B}", "hold")
    office.browser("bob").submit(f"/events/{A}", "approve")
    page = office.browser("vic").page("/")
    assert lines(page) == [B, A]
    assert "7m 00s Reboot, minutes down vm_2 West held by ann Azure still starts it at 11:08" in page.text
    assert "19m 00s Freeze, 5 s pause vm_0, vm_1 +1 West approved by bob, 1 of 2 Azure starts it at 11:20" in page.text
    assert "started Freeze, 5 s pause vm_3 West Azure has started it" in page.text
    assert 'class="countdown is-soon"' in page.html


def test_approved_event_is_first_and_states_that_it_starts_earlier(office):
    for name in ("ann", "bob"):
        office.browser(name).submit(f"/events/{A}", "approve")
    page = office.browser("vic").page("/")
    assert lines(page) == [A, B]
    assert "1 approved" in page.text
    assert "any time Freeze, 5 s pause vm_0, vm_1 +1 West approved by" in page.text
    assert "starts early, or at 11:20" in page.text


def test_counts_are_links_to_the_filtered_list(office):
    office.browser("ann").submit(f"/events/{B}", "hold")
    vic = office.browser("vic")
    page = vic.page("/")
    decided = "0 approved 1 held 0 waiting for a second approver 0 refused"
    assert f"2 announced 1 undecided 1 under 10 min {decided} 1 started" in page.text
    links = {
        found["href"]: lines(vic.page(found["href"]))
        for tag, found in page.tags
        if tag == "a" and (found["href"] or "").startswith("/?")
    }
    assert links == {
        "/?decision=undecided": [A],
        "/?soon=1": [B],
        "/?decision=approved": [],
        "/?decision=held": [B],
        "/?decision=waiting": [],
        "/?decision=refused": [],
        "/?state=started": [key_of_event_id("C")],
    }


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("q=VM_2", [B]),
        ("q=vm_", [B, A]),
        ("type=Freeze", [A]),
        ("group=labels.team:search", [B]),
        ("group=resource_group:west&type=Reboot", [B]),
        ("subscription=s&soon=1", [B]),
        ("region=nowhere", []),
        ("state=completed", []),
    ],
)
def test_filters_are_in_the_url_and_stay_selected(office, query, found):
    page = office.browser("vic").page(f"/?{query}")
    assert lines(page) == found
    assert "clear" in page.text
    chosen = {each["value"] for tag, each in page.tags if tag == "option" and "selected" in each}
    typed = {each["value"] for tag, each in page.tags if tag == "input" and each.get("name") in {"q", "soon"}} - {""}
    assert chosen | typed == {part.partition("=")[2] for part in query.split("&")}


@pytest.mark.parametrize("query", ["group=nonsense", "state=x", "decision=x", "cursor=x", "cursor=1~2026~" + "0" * 32])
def test_invalid_filter_is_rejected(office, query):
    assert office.browser("vic").get(f"/?{query}").status_code == 400


def test_filter_never_shows_an_event_outside_the_scope(tmp_path):
    with Office(tmp_path, users=(*PEOPLE, ("sam", "approver", "labels.team:search"))) as office:
        office.portal.send(fleet_record(0, resources=("vm_0",)))
        office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",), labels={"team": "search"}))
        sam = office.browser("sam")
        for query in ("", "?q=vm_", "?group=labels.team:payments", f"?vm={vm_id_of(0)}", "?state=scheduled"):
            page = sam.page(f"/{query}")
            assert A not in page.html
            assert "payments" not in page.html or "payments" in query


def test_pages_of_the_list_show_the_total_and_link_to_each_other(tmp_path):
    with Office(tmp_path) as office:
        records = [
            fleet_record(
                vm, event_id=f"E{vm}", resources=(f"vm_{vm}",), not_before=NOW + timedelta(minutes=5 + 16 * vm)
            )
            for vm in range(120)
        ]
        office.portal.send(*records)
        vic = office.browser("vic")
        seen, path = [], "/"
        for text in ("1-50 of 120", "51-100 of 120", "101-120 of 120"):
            page = vic.page(path)
            assert text in page.text
            seen += lines(page)
            following = [found["href"] for tag, found in page.tags if tag == "a" and found.get("rel") == "next"]
            path = following[0] if following else ""
        assert seen == [key_of_event_id(f"E{vm}") for vm in range(120)]
        assert path == ""


def test_unknown_address_returns_a_page_only_to_browsers(office):
    vic = office.browser("vic")
    answer = vic.get("/nothing", headers={"Accept": "text/html"})
    assert (answer.status_code, "This address does not exist." in answer.text) == (404, True)
    assert "Sign out" in answer.text
    assert "Sign out" not in office.browser().get("/nothing", headers={"Accept": "text/html"}).text
    for path in ("/nothing", "/api/v1/nothing"):
        assert vic.get(path, headers={"Accept": "*/*"}).json() == {"error": "This address does not exist."}


def test_pages_are_compressed_and_each_has_another_csrf_token(office):
    ann = office.browser("ann")
    pages = [ann.get(f"/events/{A}", headers={"Accept-Encoding": "gzip"}) for _ in range(2)]
    assert {page.headers["Content-Encoding"] for page in pages} == {"gzip"}
    tokens = {dict(Page(page.text).forms[0].fields)["csrf"] for page in pages}
    assert len(tokens) == 2
    for token in tokens:
        assert ann.post("/decide", {"csrf": token}).status_code == 400
    events = office.portal.get("/events")
    assert "Content-Encoding" not in events.headers


def test_wave_is_one_line_and_can_be_held_with_other_events(tmp_path):
    with Office(tmp_path) as office:
        starts = {vm: NOW + timedelta(minutes=14 if vm == 3 else 15) for vm in range(6)}
        wave = [
            fleet_record(vm, event_id=f"E{vm}", resources=(f"vm_{vm}",), not_before=at) for vm, at in starts.items()
        ]
        office.portal.send(*wave, fleet_record(8, event_id="B", resources=("vm_8",), event_type="Reboot"))
        ann = office.browser("ann")
        page = ann.page("/")
        assert len(lines(page)) == 2
        assert "6 x Freeze, pause 6 VMs, first vm_3 6 undecided" in page.text
        assert "1-2 of 2 lines, 7 events" in page.text
        [href] = {found["href"] for tag, found in page.tags if tag == "a" and "wave=" in (found.get("href") or "")}
        assert set(lines(ann.page(href))) == {key_of_event_id(f"E{vm}") for vm in range(6)}
        chosen = href.removeprefix("/?")
        approving = ann.page(f"/decide?verdict=approve&event={B}&{chosen}").text
        assert "Left out: you can only approve single events, not a wave." in approving
        answer = ann.submit(f"/decide?verdict=hold&event={B}&{chosen}", "hold", reason="month end")
        assert Page(answer.text).text.count("Accepted") == 7
        assert "6 held" in ann.page("/").text
        held = ann.page("/?decision=held")
        assert len(lines(held)) == 7
        assert "To withdraw a hold, open the event." in held.text
        assert "Approve…" in ann.page("/").text
        assert "Approve…" not in held.text  # the portal would refuse it
