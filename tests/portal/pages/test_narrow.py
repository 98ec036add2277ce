"""The pages on a phone with a width of 390 pixels: no element is off the screen."""

import pytest
from browser_kit import Watched, chromium
from fleet_records import fleet_record
from page_kit import Office

from bridge.portal.fleet import key_of_event_id

A = key_of_event_id("A")
NAMES = ("web-0", "web-1", "web-2")
#: Elements that extend beyond the window, or that a scrolling box clips.
OFF_SCREEN = """() => [...document.querySelectorAll("main *")].filter((each) => {
  const box = each.getBoundingClientRect();
  return box.width > 1 && (box.right > innerWidth + 1 || each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 1
    && getComputedStyle(each).overflowX !== "visible" && !each.matches("input, select, .unseen"));
}).map((each) => each.outerHTML.slice(0, 120))"""

UNLABELLED = """() => [...document.querySelectorAll("tbody td:not([data-label])")].map((each) => each.outerHTML)"""


@pytest.fixture
def office(tmp_path):
    with Office(tmp_path) as office:
        records = (fleet_record(vm, resources=NAMES, description="Host will be updated.") for vm in range(3))
        office.portal.send(*records)
        office.poll(0, version="9.9", kids=["p1"])
        office.browser("ann").submit(f"/events/{A}", "hold", reason="the batch runs until the morning")
        yield office


def test_every_page_fits_and_labels_each_cell(office):
    with chromium() as browser:
        phone = {"viewport": {"width": 390, "height": 844}, "timezone_id": "America/New_York"}
        ann = Watched(browser, office.origin, **phone).sign_in("ann")
        found = {}
        lists = ("/", "/?state=completed", "/timeline", "/agents", "/audit")
        for path in (*lists, f"/events/{A}", f"/decide?verdict=hold&event={A}"):
            ann.go(path)
            found[path] = ann.page.evaluate(OFF_SCREEN)
            found[path] += ann.page.evaluate(UNLABELLED)
        ann.close()
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_holders_of_nine_events_fit_on_one_screen(office):
    for number in range(8):
        event = {"sequence": number + 2, "event_id": f"E{number}", "resources": NAMES}
        office.portal.send(*(fleet_record(vm, **event) for vm in range(3)))
        office.browser("ann").submit(f"/events/{key_of_event_id(f'E{number}')}", "hold", reason="the batch runs")
    with chromium() as browser:
        ann = Watched(browser, office.origin, viewport={"width": 390, "height": 844}).sign_in("ann")
        ann.go("/?decision=held")
        lines = ann.page.locator("tbody tr td.decision")
        texts = lines.all_inner_texts()
        last = lines.last.bounding_box()
        bar = ann.page.locator(".bulk").bounding_box()
        ann.close()
    assert texts == ["held by ann"] * 9
    assert last["y"] + last["height"] <= bar["y"]
