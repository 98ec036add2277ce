"""Connected agents: an agent that stops polling stays known for minutes, and other processes receive its header."""

import json

import pytest

from bridge.portal.connected_agents import FORGOTTEN_SECONDS, ConnectedAgents
from bridge.testing import ManualClock

_HEADER = json.dumps({"version": "1.2.3", "kids": ["portal"], "required_approvals": 1})


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def agents(clock):
    return ConnectedAgents(clock.clock)


def _asked(agents, vms):
    """Have each of *vms* ask once, all at the same time."""
    for vm in vms:
        agents.begins(f"vm-{vm}", _HEADER, index=vm)
    for vm in vms:
        agents.ends(f"vm-{vm}")


def test_agents_that_ask_no_more_are_forgotten_and_those_that_ask_are_not(agents, clock):
    agents.begins("held", "")
    _asked(agents, range(10_000))
    clock.advance(FORGOTTEN_SECONDS - 1)
    _asked(agents, [1])
    agents.remove_old()
    assert len(agents.all()) == 10_001
    clock.advance(2)
    agents.remove_old()
    assert set(agents.all()) == {"held", "vm-1"}


def test_what_an_agent_said_is_known_while_it_is_away_and_when_it_is_back(agents, clock):
    _asked(agents, range(3))
    here = agents.of(["vm-2"])["vm-2"]
    assert here.is_connected
    clock.advance(60)
    agents.remove_old()
    away = agents.of(["vm-2", "vm-9"])
    assert set(away) == {"vm-2"}
    assert not away["vm-2"].is_connected
    assert (away["vm-2"].version, away["vm-2"].kids, away["vm-2"].received_index) == ("1.2.3", ("portal",), 2)
    agents.begins("vm-2", "{}", index=7)
    for _ in range(2):
        back = agents.of(["vm-2"])["vm-2"]
        assert (back.is_connected, back.version, back.received_index) == (True, None, 7)
        agents.remove_old()
    agents.ends("vm-2")
    assert len(agents.all()) == 3


def test_poll_that_is_held_longer_than_agents_are_remembered_is_not_lost(agents, clock):
    agents.begins("held", _HEADER)
    clock.advance(2 * FORGOTTEN_SECONDS)
    agents.remove_old()
    agents.ends("held")
    assert agents.all()["held"].is_connected


def test_other_processes_are_told_of_agents_that_are_away_when_they_are_told_everything(agents, clock):
    _asked(agents, range(2))
    assert {each.vm_key for each in agents.changes_to_share(is_everything=False)} == {"vm-0", "vm-1"}
    clock.advance(60)
    agents.remove_old()
    assert agents.changes_to_share(is_everything=False) == []
    shared = agents.changes_to_share(is_everything=True)
    assert {each.vm_key for each in shared} == {"vm-0", "vm-1"}
    there = ConnectedAgents(clock.clock)
    there.receive(shared)
    assert there.all()["vm-1"].received_index == 1
    assert not there.all()["vm-1"].is_connected
