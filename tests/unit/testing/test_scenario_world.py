import json
import math
import re
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime

import pytest

from bridge.testing import EventSpec, ManualClock, UnknownEvent, World, WrongRequest, WrongState

START = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.fixture
def world(clock):
    return World(["web_0", "web_1"], clock=clock)


def read(world, version="2020-07-01"):
    return json.loads(world.document(version))


def freeze(**keys):
    return EventSpec(**{"event_type": "Freeze", "duration_seconds": 5, "impact_seconds": 240, **keys})


def test_event_keeps_its_id_and_each_status_increases_the_incarnation(world, clock):
    assert read(world) == {"DocumentIncarnation": 1, "Events": []}
    event_id = world.add_event(freeze())
    scheduled = read(world)
    clock.advance(900)
    started = read(world)
    clock.advance(239)
    assert read(world) == started
    clock.advance(1)
    assert re.fullmatch(r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}", event_id)
    assert [document["DocumentIncarnation"] for document in (scheduled, started, read(world))] == [2, 3, 4]
    assert scheduled["Events"][0]["EventId"] == started["Events"][0]["EventId"] == event_id
    assert scheduled["Events"][0]["EventStatus"] == "Scheduled"
    assert started["Events"][0]["EventStatus"] == "Started"
    assert started["Events"][0]["NotBefore"] == ""
    assert read(world)["Events"] == []


def test_newest_api_version_has_every_field_in_azure_order(world):
    event_id = world.add_event(freeze(description="Host server is undergoing maintenance."))
    assert list(read(world)["Events"][0].items()) == [
        ("EventId", event_id),
        ("EventStatus", "Scheduled"),
        ("EventType", "Freeze"),
        ("ResourceType", "VirtualMachine"),
        ("Resources", ["web_0", "web_1"]),
        ("NotBefore", "Mon, 06 May 2030 07:23:09 GMT"),
        ("Description", "Host server is undergoing maintenance."),
        ("EventSource", "Platform"),
        ("DurationInSeconds", 5),
    ]


@pytest.mark.parametrize("speed", [1, 60, 90])
def test_not_before_follows_the_real_clock_at_any_speed(clock, speed):
    world = World(clock=clock, speed=speed)
    clock.advance(1)
    world.add_event(freeze(notice_seconds=900))
    shown = read(world)["Events"][0]["NotBefore"]
    assert parsedate_to_datetime(shown) == (START + timedelta(seconds=1 + 900 / speed)).replace(microsecond=0)
    clock.advance(900 / speed - 0.01)
    assert read(world)["Events"][0]["NotBefore"] == shown
    clock.advance(0.02)
    assert read(world)["Events"][0]["EventStatus"] == "Started"


def test_each_api_version_has_only_its_fields_and_types(world):
    for event_type in ("Freeze", "Preempt", "Terminate"):
        world.add_event(EventSpec(event_type=event_type, resources=("web_0",)))

    def types(version):
        return [event["EventType"] for event in read(world, version)["Events"]]

    assert types("2017-08-01") == ["Freeze"]
    assert types("2017-11-01") == ["Freeze", "Preempt"]
    assert types("2019-01-01") == ["Freeze", "Preempt", "Terminate"]
    oldest = read(world, "2017-03-01")["Events"][0]
    assert oldest["Resources"] == ["_web_0"]
    assert oldest["NotBefore"] == "2030-05-06T07:23:09Z"
    plain = {"EventId", "EventStatus", "EventType", "ResourceType", "Resources", "NotBefore"}
    assert set(read(world, "2019-01-01")["Events"][0]) == plain
    assert set(read(world, "2019-04-01")["Events"][0]) == plain | {"Description"}
    assert set(read(world, "2019-08-01")["Events"][0]) == plain | {"Description", "EventSource"}


def test_an_approved_event_starts_before_its_not_before(world, clock):
    event_id = world.add_event(freeze())
    clock.advance(10)
    world.approve([event_id.lower()], vm="web_1")
    assert read(world)["Events"][0]["EventStatus"] == "Started"
    world.approve([event_id], vm="web_0")
    assert [(item.vm, item.result) for item in world.approvals] == [("web_1", "approved"), ("web_0", "already_started")]
    assert world.approvals[0].at == START + timedelta(seconds=10)


def test_approval_takes_effect_late_or_at_not_before_or_never(world, clock):
    late = world.add_event(freeze(approval_delay_seconds=60))
    others = world.add_event(freeze(on_approval="wait"))
    never = world.add_event(freeze(on_approval="never"))
    world.approve([late, others, never], vm="web_0")
    world.approve([late], vm="web_1")
    assert world.approvals[-1].result == "already_approved"

    def started():
        return {event.event_id for event in world.events() if event.status == "Started"}

    assert started() == set()
    clock.advance(60)
    assert started() == {late}
    clock.advance(840)
    assert started() == {others}
    clock.advance(1_000_000)
    assert [event.event_id for event in world.events()] == [never]


def test_unknown_event_id_rejects_the_entire_approval(world):
    event_id = world.add_event(freeze())
    with pytest.raises(UnknownEvent, match="nobody"):
        world.approve([event_id, "nobody"], vm="web_0")
    assert [item.result for item in world.approvals] == ["unknown_event", "unknown_event"]
    assert read(world)["Events"][0]["EventStatus"] == "Scheduled"


def test_canceled_event_disappears_and_increases_the_incarnation(world, clock):
    event_id = world.add_event(freeze())
    clock.advance(30)
    world.cancel(event_id)
    assert read(world) == {"DocumentIncarnation": 3, "Events": []}
    clock.advance(10_000)
    assert world.incarnation == 3


def test_simultaneous_changes_increase_the_incarnation_once(world, clock):
    world.schedule(60, lambda: world.add_event(freeze()))
    world.schedule(60, lambda: world.add_event(EventSpec(event_type="Reboot")))
    clock.advance(60)
    assert world.incarnation == 2
    assert len(world.events()) == 2


def test_rarely_polled_world_applies_every_change_in_order(world, clock):
    changes = []
    world.listen(lambda change: changes.append((change.at_seconds, change.what)))
    world.schedule(60, lambda: world.add_event(freeze()))
    clock.advance(86_400)
    assert read(world) == {"DocumentIncarnation": 4, "Events": []}
    assert changes == [(60, "scheduled"), (960, "started"), (1200, "completed")]
    assert world.is_finished


def test_update_moves_not_before_and_can_change_the_type(world, clock):
    event_id = world.add_event(EventSpec(event_type="Reboot"))
    clock.advance(600)
    world.update(event_id, event_type="Freeze", notice_seconds=1800)
    event = read(world)["Events"][0]
    assert (event["EventId"], event["EventType"]) == (event_id, "Freeze")
    assert event["NotBefore"] == "Mon, 06 May 2030 07:48:09 GMT"
    clock.advance(1799)
    assert world.events()[0].status == "Scheduled"


def test_extra_fields_are_shown_as_they_are(world):
    world.add_event(freeze(extra={"Colour": {"deep": 1}, "EventStatus": "Completed"}))
    event = read(world)["Events"][0]
    assert event["Colour"] == {"deep": 1}
    assert event["EventStatus"] == "Completed"


def test_invalid_action_on_an_event_is_reported(world):
    event_id = world.add_event(freeze(event_id="AB"))
    with pytest.raises(WrongState, match="AB has the status Scheduled"):
        world.complete(event_id)
    world.start(event_id)
    with pytest.raises(WrongState):
        world.cancel(event_id)
    with pytest.raises(UnknownEvent, match="Its EventIds: AB"):
        world.start("CD")


@pytest.mark.parametrize("speed", [0, -1, math.inf, math.nan])
def test_invalid_speed_is_rejected(speed):
    with pytest.raises(WrongRequest, match="speed"):
        World(speed=speed)
