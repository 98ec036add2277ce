"""The timeline: its period, the bars of single events and of many, and the notice and the impact of each event."""

from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record
from fold_kit import add
from page_kit import PEOPLE, Office

from bridge.clock import format_time
from bridge.events.record import Transition
from bridge.portal.fleet import key_of_event_id
from bridge.portal.store.events import EventFilter
from bridge.portal.store.timeline import spans_between
from bridge.portal.timeline_page import Period, bars_of

A = key_of_event_id("A")


@pytest.fixture
def office(tmp_path):
    users = (*PEOPLE, ("sam", "approver", "labels.team:search"))
    with Office(tmp_path, users=users) as office:
        yield office


def bars(page):
    """Return the link of each bar."""
    return [found["href"] for tag, found in page.tags if tag == "a" and "type-" in (found.get("class") or "")]


def ended(vm, event_id, *, hours, minutes=30):
    """Return the records of an event that was announced *hours* ago, and took *minutes* until its end."""
    common = {"event_id": event_id, "resources": (f"vm_{vm}",)}
    began = -3_600 * hours
    return [
        fleet_record(vm, seconds=began, **common),
        fleet_record(vm, sequence=2, seconds=began + 900, transition=Transition.STARTED, **common),
        fleet_record(vm, sequence=3, seconds=began + 60 * minutes, transition=Transition.COMPLETED, **common),
    ]


def test_default_period_is_the_past_day_and_the_next_week(office):
    office.portal.send(fleet_record(0), *ended(1, "B", hours=20), *ended(2, "C", hours=30))
    page = office.browser("vic").page("/timeline")
    assert "2026-11-19 11:01:00 UTC to 2026-11-27 11:01:00 UTC : 2 events." in page.text.replace("UTC:", "UTC :")
    assert "Freeze of vm_0, vm_1: announced 2026-11-20T11:00:00.000Z, start 2026-11-20T11:15:00.000Z" in page.text
    assert bars(page) == [f"/events/{key_of_event_id('B')}", f"/events/{A}"]
    older = office.browser("vic").page("/timeline?from=2026-11-19T03:00Z&hours=6")
    assert bars(older) == [f"/events/{key_of_event_id('C')}"]
    assert "start 2026-11-19T05:15:00.000Z, end 2026-11-19T05:30:00.000Z" in older.text
    assert "No event matches" in office.browser("vic").page("/timeline?from=2026-11-22T03:00Z&hours=6").text


def test_label_that_the_right_edge_would_cut_off_is_omitted(office):
    office.portal.send(fleet_record(0))
    text = office.browser("vic").page("/timeline?from=2026-11-20T00:00Z&hours=49").text

    assert "21 Nov" in text
    assert "22 Nov" not in text


def test_events_of_one_hour_are_one_bar_that_opens_the_hour(office):
    office.portal.send(*(fleet_record(vm, event_id=f"E{vm}", resources=(f"vm_{vm}",)) for vm in range(3)))
    vic = office.browser("vic")
    page = vic.page("/timeline")
    assert "3 x Freeze, up to 3 VMs" in page.text
    [closer] = bars(page)
    assert "hours=6" in closer
    assert len(bars(vic.page(closer))) == 3
    assert bars(vic.page("/timeline?type=Reboot")) == []
    assert bars(vic.page("/timeline?q=VM_1")) == [f"/events/{key_of_event_id('E1')}"]


def test_count_is_stated_when_more_events_match(office):
    office.portal.send(*(fleet_record(vm, event_id=f"E{vm}", resources=(f"vm_{vm}",)) for vm in range(210)))
    page = office.browser("vic").page("/timeline?hours=6")
    assert "showing 200 of 210 events, latest first." in page.text
    assert len(bars(page)) == 200
    assert ": 0 events." in office.browser("sam").page("/timeline?hours=6").text


@pytest.mark.parametrize("query", ["from=x", "hours=0", "hours=99999", "from=2026-11-20", "from=9999-12-31T23:59Z"])
def test_invalid_period_is_rejected(office, query):
    assert office.browser("vic").get(f"/timeline?{query}").status_code == 400


def test_notice_and_impact_are_the_parts_of_a_bar(store):
    canceled = fleet_record(2, event_id="C", resources=("vm_2",), transition=Transition.CANCELED, seconds=60)
    add(store, *ended(1, "B", hours=3, minutes=60), fleet_record(0), canceled)
    period = Period(since=NOW - timedelta(hours=4), hours=8)
    spans, _ = store.read(
        spans_between,
        EventFilter(),
        since=format_time(period.since),
        until=format_time(period.until),
        now=format_time(NOW),
        characters=None,
        limit=10,
    )
    found = {bar.span.event.event.event_id: bar for bar in bars_of(spans, period, now=NOW)}
    hour = 1_400 / 8
    assert (found["B"].x, found["B"].width) == (hour, hour)
    assert (found["B"].impact_x, found["B"].impact_width) == pytest.approx((1.25 * hour, 0.75 * hour), abs=1)
    assert (found["A"].x, found["A"].impact_x) == (4 * hour, pytest.approx(4.25 * hour, abs=3))
    assert found["C"].span.starts_at is None
