"""Rules: the matching rule of an event, the scope of its command, and the order of the VMs."""

import pytest

from bridge.approval.rules import act_delay_seconds, first_match
from bridge.config.approval import RuleSettings
from bridge.testing.records import sample_event

ME, OTHER = "WestNO_0", "WestNO_1"


def rule(name="r", **fields):
    return RuleSettings(name=name, **{"action": "approve"} | fields)


def matches(one, vm_name=ME, **fields):
    return first_match((one,), sample_event(**fields), vm_name=vm_name) is one


@pytest.mark.parametrize(
    ("filters", "event", "expected"),
    [
        ({"event_types": ("Freeze",)}, {"event_type": "Freeze"}, True),
        ({"event_types": ("Freeze", "Reboot")}, {"event_type": "Reboot"}, True),
        ({"event_types": ("Freeze",)}, {"event_type": "Reboot"}, False),
        ({"event_types": ("Freeze",)}, {"event_type": "freeze"}, False),
        ({"event_types": ("Freeze",)}, {"event_type": None}, False),
        ({"event_sources": ("User",)}, {"event_source": "User"}, True),
        ({"event_sources": ("User",)}, {"event_source": "Platform"}, False),
        ({"event_sources": ("User",)}, {"event_source": None}, False),
        ({"event_types": ("Freeze",), "event_sources": ("User",)}, {"event_type": "Freeze"}, False),
        ({}, {"event_type": None, "event_source": None, "duration_seconds": None}, True),
    ],
)
def test_filters_compare_exactly_and_unknown_values_never_match(filters, event, expected):
    assert matches(rule(**filters), **{"event_source": "Platform"} | event) is expected


@pytest.mark.parametrize(
    ("bounds", "duration", "expected"),
    [
        ({"max_duration_seconds": 8}, 0, True),
        ({"max_duration_seconds": 8}, 8, True),
        ({"max_duration_seconds": 8}, 9, False),
        ({"max_duration_seconds": 8}, None, False),
        ({"min_duration_seconds": 0}, None, False),
        ({"min_duration_seconds": 5}, 5, True),
        ({"min_duration_seconds": 5}, 4, False),
        ({"min_duration_seconds": 5, "max_duration_seconds": 8}, 6, True),
        ({"min_duration_seconds": 5, "max_duration_seconds": 8}, 9, False),
        ({}, None, True),
    ],
)
def test_duration_bounds_are_inclusive_and_unknown_duration_never_matches(bounds, duration, expected):
    assert matches(rule(**bounds), duration_seconds=duration) is expected


@pytest.mark.parametrize(
    ("wanted", "resources", "expected"),
    [
        ("only_me", (ME,), True),
        ("only_me", ("_westno_0", ME), True),
        ("only_me", (ME, OTHER), False),
        ("only_me", (OTHER,), False),
        ("includes_me", (OTHER, ME), True),
        ("includes_me", ("WESTNO_0",), True),
        ("includes_me", ("WestNO_01",), False),
        ("includes_me", (OTHER,), False),
        ("any", (OTHER,), True),
    ],
)
def test_resources_are_compared_by_full_name(wanted, resources, expected):
    assert matches(rule(resources=wanted), resources=resources) is expected


@pytest.mark.parametrize("wanted", ["only_me", "includes_me", "any"])
@pytest.mark.parametrize(("resources", "vm_name"), [((), ME), (None, ME), ((ME,), None), ((ME,), "")])
def test_no_rule_approves_while_the_affected_vm_is_unknown(wanted, resources, vm_name):
    approving = rule(resources=wanted, act="each")
    event = sample_event(resources=resources)
    assert first_match((approving,), event, vm_name=vm_name) is None
    assert act_delay_seconds(approving, event, vm_name=vm_name, fallback_seconds=30) is None


@pytest.mark.parametrize(("resources", "vm_name"), [((), ME), (None, ME), ((ME,), None)])
def test_hold_rule_for_any_vm_matches_while_the_affected_vm_is_unknown(resources, vm_name):
    assert matches(rule(action="hold", resources="any"), vm_name, resources=resources)
    assert not matches(rule(action="hold"), vm_name, resources=resources)


@pytest.mark.parametrize(
    ("covers_all", "resources", "expected"),
    [(False, (ME,), True), (False, (ME, OTHER), False), (True, (ME, OTHER), True), (True, (), False)],
)
def test_rule_with_command_matches_other_vms_only_if_it_covers_all(covers_all, resources, expected):
    draining = rule(command=("/bin/drain",), command_covers_all=covers_all)
    event = sample_event(resources=resources)
    assert (first_match((draining,), event, vm_name=ME) is draining) is expected


def test_a_rule_with_a_command_does_not_match_while_the_vm_is_unknown():
    assert not matches(rule(command=("/bin/drain",), command_covers_all=True), None, resources=(ME,))


@pytest.mark.parametrize(
    ("act", "vm_name", "expected"),
    [
        ("leader", "a", 0),
        ("leader", "B", 30),
        ("leader", "_c", 60),
        ("leader", "d", None),
        ("leader", None, None),
        ("each", "c", 0),
        ("each", "d", 0),
    ],
)
def test_delay_depends_on_act_and_the_position_in_resources(act, vm_name, expected):
    event = sample_event(resources=("a", "_A", "b", "c", "b"))
    delay = act_delay_seconds(rule(act=act, resources="any"), event, vm_name=vm_name, fallback_seconds=30)
    assert delay == expected
