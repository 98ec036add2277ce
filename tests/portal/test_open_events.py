"""The lines of the first page: single events, and waves of events of one type, region, and hour."""

from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record
from fold_kit import add
from msgspec.structs import replace

from bridge.clock import format_time
from bridge.portal.fleet import key_of_event_id
from bridge.portal.schema import events
from bridge.portal.store.events import EventFilter
from bridge.portal.store.open_events import collapsed, count_open, list_lines

AT = format_time(NOW)
WAVE = "Freeze|westeurope|2026-11-20T11"


def announced(vm, event_id=None, *, region="westeurope", minutes=15, **fields):
    """Return a record of *vm* about an event that starts *minutes* after `NOW`."""
    record = fleet_record(
        vm,
        event_id=event_id or f"E-{vm}",
        **{"resources": (f"vm_{vm}",), "not_before": NOW + timedelta(minutes=minutes), **fields},
    )
    return replace(record, vm=replace(record.vm, location=region))


def lines(store, wanted=EventFilter(), **paging):  # noqa: B008  # the filter is frozen
    """Return the page, and for each line the EventId and the number of events of its wave."""
    page = store.read(list_lines, wanted, now=AT, **paging)
    return page, [(each.event.event.event_id, each.wave and each.wave.events) for each in page.lines]


@pytest.fixture
def wave(store):
    """A wave of five events, the first in 20 minutes, with other events before and after that time."""
    add(store, *(announced(vm, minutes=20 + vm) for vm in range(5)), at=AT)
    add(store, announced(5, region="eastus"), announced(6, event_type="Reboot", minutes=18), at=AT)
    add(store, announced(7, minutes=75), announced(8, region="eastus", minutes=22), at=AT)
    return store


def test_five_events_of_one_type_region_and_hour_share_a_line(wave):
    page, found = lines(wave)
    assert found == [("E-5", None), ("E-6", None), ("E-0", 5), ("E-8", None), ("E-7", None)]
    assert (page.total, page.events) == (5, 9)
    shown = next(each.wave for each in page.lines if each.wave)
    assert (shown.key, shown.vms, shown.decisions) == (WAVE, 5, {"undecided": 5})
    assert lines(wave, EventFilter(wave=WAVE))[1] == [(f"E-{vm}", None) for vm in range(5)]


def test_event_that_starts_or_moves_to_another_hour_leaves_the_wave(wave):
    add(wave, announced(0, sequence=2, seconds=5, event_status="Started"), at=AT)
    assert (None, 4) not in lines(wave)[1]
    assert {each for _, each in lines(wave)[1]} == {None}
    add(wave, announced(9, minutes=30), at=AT)
    assert ("E-1", 5) in lines(wave)[1]
    add(wave, announced(9, minutes=90, sequence=2, seconds=5, not_before_raw="later"), at=AT)
    assert {each for _, each in lines(wave)[1]} == {None}


def test_started_events_without_a_notbefore_have_separate_lines(store):
    started = {"event_status": "Started", "not_before": None, "not_before_raw": ""}
    add(store, *(announced(vm, **started) for vm in range(5)), at=AT)
    assert sorted(lines(store)[1]) == [(f"E-{vm}", None) for vm in range(5)]


def test_recommendation_does_not_count_as_undecided(store):
    add(store, announced(0, event_type="SpotRebalanceRecommendation", minutes=5), announced(1, minutes=5), at=AT)
    counts = store.read(count_open, EventFilter(), now=AT)
    assert (counts["total"], counts["undecided"], counts["undecided_soon"]) == (2, 1, 1)


def test_filter_and_scope_apply_before_events_are_counted_as_a_wave(wave):
    few = EventFilter(text="vm_1")
    assert lines(wave, few)[1] == [("E-1", None)]
    add(wave, *(announced(vm, minutes=20 + vm, labels={"team": "search"}) for vm in range(20, 25)), at=AT)
    assert ("E-0", 10) in lines(wave)[1]
    assert lines(wave, EventFilter(scope=("labels.team:search",)))[1] == [("E-20", 5)]


def test_hostile_vm_neither_creates_nor_changes_a_wave(wave):
    before = lines(wave)[1]
    for number in range(200):
        add(wave, announced(66, f"invented-{number}", sequence=number + 1, minutes=21), at=AT)
    assert lines(wave)[1] == before
    assert [each.count for each in wave.read(collapsed, EventFilter(), now=AT)] == [200]
    other = {"event_type": "Re\0boot", "event_status": "Started", "resources": ("vm_66",)}
    add(wave, *(announced(66, f"E-{vm}", stream=1, sequence=vm + 1, **other) for vm in range(5)), at=AT)
    assert lines(wave)[1] == before


def test_nul_in_type_and_region_does_not_prevent_a_wave(store):
    add(store, *(announced(vm, region="we\0st", event_type="Fr\0eeze") for vm in range(5)), at=AT)
    [line] = lines(store)[0].lines
    assert line.wave.events == 5
    assert lines(store, EventFilter(wave=line.wave.key))[0].total == 5


def test_approved_events_come_first_and_leave_their_wave_unless_an_agent_refused(wave):
    add(wave, announced(9, minutes=30), at=AT)
    approve(wave, "E-2")
    approve(wave, "E-7")
    approve(wave, "E-6", is_refused=True)
    approved, others = [("E-2", None), ("E-7", None)], [("E-5", None), ("E-6", None), ("E-0", 5), ("E-8", None)]
    page, found = lines(wave, limit=1)
    assert found + lines(wave, cursor=page.cursor)[1] == approved + others


def approve(store, event_id, *, is_refused=False):
    approved = {"decision": "approved", "decision_digest": events.c.digest, "decision_until": "9999"}
    change = events.update().where(events.c.event_key == key_of_event_id(event_id))
    store.write(lambda connection: connection.execute(change.values(**approved, is_refused=is_refused)))


def test_programs_receive_each_event_once_in_the_order_of_notbefore_while_one_is_approved(wave):
    for_programs = {"has_waves": False, "approved_first": False}
    expected = lines(wave, **for_programs)[1]
    page, found = lines(wave, limit=3, **for_programs)
    approve(wave, expected[5][0])
    assert found + lines(wave, cursor=page.cursor, **for_programs)[1] == expected


def test_pagination_returns_each_line_once(wave):
    found, cursor, first = [], None, []
    while cursor is not None or not found:
        page, part = lines(wave, limit=2, cursor=cursor)
        found, cursor, first = found + part, page.cursor, [*first, page.first]
        assert page.total == 5
    assert found == lines(wave)[1]
    assert first == [1, 3, 5]
    assert key_of_event_id("E-5") in (lines(wave, limit=1)[0].cursor or "")
