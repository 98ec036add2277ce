"""Connected agents: an agent that stops polling stays known for minutes, and other processes receive its header."""

import asyncio
import json

import pytest
from sqlalchemy import select

from bridge.portal import schema
from bridge.portal.connected_agents import FORGOTTEN_SECONDS, AgentExchange, ConnectedAgents
from bridge.portal.store.database import StoreThreads
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


def test_agent_that_polls_again_is_no_change(agents, clock):
    agents.begins("vm", _HEADER)
    assert [each.vm_key for each in agents.changes_to_share(is_everything=False)] == ["vm"]
    agents.ends("vm")
    clock.advance(30)
    agents.begins("vm", _HEADER)
    assert agents.changes_to_share(is_everything=False) == []
    agents.ends("vm")
    agents.begins("vm", _HEADER, index=7)
    assert [each.received_index for each in agents.changes_to_share(is_everything=False)] == [7]
    assert [each.vm_key for each in agents.changes_to_share(is_everything=True)] == ["vm"]


def test_processes_exchange_their_agents(postgresql_database, clock):
    def rows():
        return postgresql_database.store().read(
            lambda connection: set(connection.execute(select(schema.agents.c.vm_key)).scalars())
        )

    async def main():
        agents = [ConnectedAgents(clock.clock) for _ in range(2)]
        stores = [StoreThreads(postgresql_database.store()) for _ in range(2)]
        pair = [AgentExchange(store, each, clock=clock.clock) for store, each in zip(stores, agents, strict=True)]
        (here, there), (ours, theirs) = agents, pair

        async def after(seconds, *which):
            clock.advance(seconds)
            for each in which:
                await each.exchange()
            return {key: seen.is_connected for key, seen in there.all().items()}

        for vm in range(3):
            here.begins(f"vm-{vm}", _HEADER, index=vm)
        assert await after(1, ours, theirs) == dict.fromkeys(("vm-0", "vm-1", "vm-2"), True)
        assert there.all()["vm-2"].received_index == 2
        here.ends("vm-0")
        assert not (await after(20, ours, theirs))["vm-0"]
        await after(60, ours, theirs)
        assert await after(80, ours, theirs) == {"vm-0": False, "vm-1": True, "vm-2": True}
        assert await after(91, theirs) == {}
        assert (await after(1, ours, theirs))["vm-1"]
        clock.advance(FORGOTTEN_SECONDS)
        there.remove_old()
        await ours.exchange(removed=here.remove_old())
        await theirs.exchange()
        assert set(there.all()) == {"vm-1", "vm-2"} == rows() - {""}
        await after(1_500)
        await theirs.exchange(is_everything=True)
        assert rows() == {""}
        for each in stores:
            each.close()

    asyncio.run(main())
