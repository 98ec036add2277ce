import json

import pytest

from bridge.errors import ScenarioError
from bridge.events.event import EVENT_TYPES
from bridge.testing import ManualClock, World, load_scenario, parse_scenario, scenario_names


def statuses(name, *, vms=("web_0", "web_1"), step_seconds=10.0):
    """Play a scenario and poll every *step_seconds*. Return each change of the document, in order."""
    scenario = load_scenario(name)
    clock = ManualClock()
    world = World(vms, clock=clock)
    scenario.play(world)
    seen = []
    while not world.is_finished:
        clock.advance(step_seconds)
        events = json.loads(world.document())["Events"]
        shown = [(event["EventType"], event["EventStatus"], event["DurationInSeconds"]) for event in events]
        if not seen or seen[-1] != shown:
            seen.append(shown)
    return seen


@pytest.mark.parametrize("name", scenario_names())
def test_demo_of_each_built_in_scenario_ends_within_twenty_seconds(name):
    scenario = load_scenario(name)
    clock = ManualClock()
    world = World(clock=clock, speed=scenario.demo_speed)
    scenario.play(world)
    clock.advance(20)
    assert scenario.description
    assert world.is_finished


def test_every_azure_event_type_has_a_scenario():
    shown = {
        state[0]
        for name in scenario_names()
        if name != "predicted-failure"  # it takes a week, and another scenario covers Redeploy
        for states in statuses(name, step_seconds=30)
        for state in states
    }
    assert shown == set(EVENT_TYPES)


def test_live_migration_is_a_freeze_of_five_seconds():
    assert statuses("live-migration") == [
        [],
        [("Freeze", "Scheduled", 5)],
        [("Freeze", "Started", 5)],
        [],
    ]


def test_a_hardware_failure_is_never_shown_as_scheduled():
    assert statuses("hardware-failure") == [[], [("Reboot", "Started", -1)], []]


def test_a_canceled_maintenance_is_never_shown_as_started():
    assert statuses("canceled") == [[], [("Freeze", "Scheduled", 5)], []]


def test_a_predicted_failure_is_announced_a_week_ahead():
    scenario = load_scenario("predicted-failure")
    clock = ManualClock()
    world = World(clock=clock)
    scenario.play(world)
    clock.advance(60_000)
    (event,) = world.events()
    assert event.spec.event_type == "Redeploy"
    assert event.not_before_seconds - world.seconds() == 7 * 86_400


def test_placeholders_are_replaced_with_vms_of_the_simulator():
    clock = ManualClock()
    world = World(["web_1", "web_2"], clock=clock)
    load_scenario("several-at-once").play(world)
    clock.advance(60)
    assert [event.resources for event in world.events()] == [("web_1", "web_2"), ("web_1",), ("web_10",)]
    assert world.incarnation == 2


def test_step_on_a_completed_event_is_skipped_and_reported():
    clock = ManualClock()
    world = World(clock=clock)
    told = []
    world.listen(lambda change: told.append(change.what))
    load_scenario("canceled").play(world)
    clock.advance(61)
    world.approve([world.events()[0].event_id], vm="vm")
    clock.advance(1000)
    assert world.is_finished
    assert [what for what in told if "skipped" in what]


def test_custom_file_can_use_every_action(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        description = "mine"
        [[steps]]
        at = 1
        add = "a"
        event_type = "Freeze"
        notice_seconds = 100
        impact_seconds = 1e9
        [[steps]]
        at = 2
        update = "a"
        duration_seconds = 7
        [[steps]]
        at = 3
        approve = "a"
        [[steps]]
        at = 5
        complete = "a"
        [[steps]]
        at = 6
        fault = "status"
        status = 429
        retry_after_seconds = 2
        count = 3
        target = "token"
        [[steps]]
        at = 8
        reset_incarnation = 1
        """,
        encoding="utf-8",
    )
    scenario = load_scenario(path)
    clock = ManualClock()
    world = World(clock=clock)
    told = []
    world.listen(lambda change: told.append(change.what))
    scenario.play(world)
    clock.advance(6)
    world.advance()
    assert [(fault.status, fault.count) for fault in world.faults.waiting()] == [(429, 3)]
    clock.advance(10)
    assert json.loads(world.document()) == {"DocumentIncarnation": 1, "Events": []}
    assert told[:5] == ["scheduled", "updated", "approved", "started", "completed"]
    assert scenario.name == "mine"


def test_all_errors_are_reported_with_step_and_nearest_name():
    text = """
        descripton = "x"
        [[steps]]
        at = "soon"
        add = "a"
        event_tpye = "Freeze"
        [[steps]]
        at = 1
        cancle = "a"
        [[steps]]
        at = 2
        cancel = "b"
        start = "a"
        [[steps]]
        fault = "statsu"
        [[steps]]
        at = 4
        complete = "c"
        [[steps]]
        at = 5
        add = "d"
        event_type = "Freeze"
        on_approval = "strat"
        [[steps]]
        at = 6
        add = "e"
        event_type = "Freeze"
        resources = ["{vmm}"]
        [[steps]]
        at = 7
        update = "e"
    """
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, name="mine")
    lines = str(caught.value).splitlines()
    for wanted in (
        "steps[0].at (scenario 'mine') is 'soon', but must be a number",
        "steps[0].event_type (scenario 'mine') is missing",
        "Unknown key `steps[0].event_tpye` (scenario 'mine')",
        "Did you mean 'event_type'?",
        "steps[1] (scenario 'mine'): a step has exactly one verb, but this step has none. Did you mean 'cancel'?",
        "steps[2] (scenario 'mine'): a step has exactly one verb, but this step has start, cancel",
        "steps[3].at (scenario 'mine') is missing",
        "steps[3].fault (scenario 'mine') is 'statsu', but must be one of",
        "Did you mean 'status'?",
        "steps[6].resources (scenario 'mine'): '{vmm}' is invalid",
        "steps[5].on_approval (scenario 'mine') is 'strat', but must be 'never' or 'start' or 'wait'",
        "Did you mean 'start'?",
        "steps[7] (scenario 'mine'): an update changes at least one field",
        "Unknown key `descripton` (scenario 'mine')",
        "Did you mean 'description'?",
    ):
        assert [line for line in lines if wanted in line], wanted


def test_event_name_must_be_added_first_and_only_once():
    text = """
        [[steps]]
        at = 4
        complete = "c"
        [[steps]]
        at = 1
        add = "d"
        event_type = "Freeze"
        [[steps]]
        at = 2
        add = "d"
        event_type = "Freeze"
    """
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, name="mine")
    assert str(caught.value).splitlines() == [
        "steps[2].add (scenario 'mine'): two events have the name 'd'. Give each event a unique name.",
        "steps[0] (scenario 'mine'): no earlier step adds the event 'c'.",
    ]


def test_unknown_name_suggests_the_nearest_name():
    with pytest.raises(ScenarioError, match="Did you mean 'live-migration'"):
        load_scenario("live-migraton")


@pytest.mark.parametrize("content", [b"steps = [", b"\xff\xfe"])
def test_file_that_is_not_toml_or_not_text_is_a_scenario_error(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError, match="broken"):
        load_scenario(path)
