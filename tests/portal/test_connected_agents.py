"""The connection state of agents: connected, reconnecting after a stop of a portal process, and disconnected."""

import asyncio
import json
from contextlib import closing
from functools import partial

import pytest
from closing import closing_each
from portal_databases import of_file

from bridge.portal.connected_agents import KEPT_SECONDS, AgentExchange, ConnectedAgents, Connection
from bridge.portal.store.database import StoreThreads
from bridge.testing import ManualClock

_HEADER = json.dumps({"version": "1.2.3", "kids": ["portal"], "required_approvals": 1})


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def agents(clock):
    return ConnectedAgents(clock.clock)


def poll(agents, *vms, index=0):
    """Poll once as each of *vms*, all at the same time."""
    for vm in vms:
        agents.begins(f"vm-{vm}", _HEADER, index=index)
    for vm in vms:
        agents.ends(f"vm-{vm}")


def disconnected(agents):
    return [key for key, seen in agents.all().items() if seen.connection is Connection.DISCONNECTED]


def state(agents, vm):
    seen = agents.of([f"vm-{vm}"]).get(f"vm-{vm}")
    return None if seen is None else seen.connection.value


def test_agent_disconnects_15_s_after_its_last_poll_and_is_kept_for_a_day(agents, clock):
    agents.begins("vm-held", "")
    poll(agents, 1, 2, index=7)
    clock.advance(14)
    agents.sweep()
    assert (state(agents, 1), disconnected(agents)) == ("connected", [])
    clock.advance(2)
    poll(agents, 2)
    agents.sweep()
    assert (state(agents, 1), state(agents, 2), disconnected(agents)) == ("disconnected", "connected", ["vm-1"])
    away = agents.of(["vm-1"])["vm-1"]
    assert (away.report.version, away.report.kids, away.received_index) == ("1.2.3", ("portal",), 7)
    clock.advance(KEPT_SECONDS)
    poll(agents, 2)
    agents.sweep()
    assert set(agents.all()) == {"vm-held", "vm-2"}
    assert state(agents, "held") == "connected"


def test_only_changes_are_stored(agents, clock):
    poll(agents, 1, 2)
    assert {each.vm_key for each in agents.take_unshared()} == {"vm-1", "vm-2"}
    for _ in range(10):
        poll(agents, 1, 2)
        clock.advance(10)
        agents.sweep()
    assert agents.take_unshared() == []
    poll(agents, 1, index=3)
    assert [(each.vm_key, each.received_index) for each in agents.take_unshared()] == [("vm-1", 3)]
    clock.advance(16)
    agents.sweep()
    assert {(each.vm_key, each.is_connected) for each in agents.take_unshared()} == {("vm-1", False), ("vm-2", False)}


class Process:
    """The agents of a portal process on *database*."""

    def __init__(self, database, clock):
        self.agents = ConnectedAgents(clock.clock)
        self.notified = 0
        self._threads = StoreThreads(database.store())
        self._exchange = AgentExchange(self._threads, self.agents, notify=self._note, clock=clock.clock)

    def _note(self):
        self.notified += 1

    def exchange(self):
        self.agents.sweep()
        asyncio.run(self._exchange.exchange())
        self.agents.sweep()

    def close(self):
        self._threads.close()


@pytest.fixture
def new_process(database, clock):
    with closing_each(partial(Process, database, clock)) as new:
        yield new


def test_agents_of_a_stopped_portal_are_reconnecting_for_60_s(new_process, clock):
    before = new_process()
    poll(before.agents, 1, 2)
    clock.advance(20)
    poll(before.agents, 2, 3)
    before.exchange()
    after = new_process()
    after.exchange()
    assert [state(after.agents, vm) for vm in (1, 2, 3)] == ["disconnected", "reconnecting", "reconnecting"]
    assert after.agents.of(["vm-2"])["vm-2"].why_not("portal") == "is reconnecting to the portal"
    after.agents.take_changes()
    poll(after.agents, 2)
    assert (state(after.agents, 2), after.agents.take_changes()) == ("connected", {"vm-2"})
    clock.advance(59)
    poll(after.agents, 2)
    after.exchange()
    assert (state(after.agents, 3), disconnected(after.agents)) == ("reconnecting", ["vm-1"])
    clock.advance(2)
    after.exchange()
    assert state(after.agents, 3) == "disconnected"
    assert "vm-3" in after.agents.take_changes()
    clock.advance(60)
    poll(after.agents, 2)
    after.exchange()
    assert sorted(disconnected(after.agents)) == ["vm-1", "vm-3"]
    clock.advance(KEPT_SECONDS)
    for _ in range(2):
        clock.advance(60)
        poll(after.agents, 2)
        after.exchange()
    assert set(after.agents.all()) == {"vm-2"}


def test_processes_see_the_agents_of_each_other(postgresql_database, clock):
    with closing(Process(postgresql_database, clock)) as one, closing(Process(postgresql_database, clock)) as other:
        poll(one.agents, 1)
        one.agents.begins("vm-held", _HEADER)
        for _ in range(2):
            one.exchange()
            other.exchange()
            clock.advance(1)
        assert (state(other.agents, 1), other.notified) == ("connected", 1)
        for _ in range(20):
            clock.advance(1)
            poll(one.agents, 1, 2)
            one.exchange()
            other.exchange()
        assert (state(other.agents, 1), state(other.agents, 2), other.notified) == ("connected", "connected", 2)
        poll(other.agents, 2)
        for _ in range(11):
            clock.advance(1)
            other.exchange()
        assert (state(other.agents, 1), state(other.agents, 2)) == ("reconnecting", "connected")
        for _ in range(120):
            clock.advance(1)
            poll(other.agents, 2)
            other.exchange()
        assert (state(other.agents, 1), state(other.agents, 2)) == ("disconnected", "connected")
        assert state(other.agents, "held") == "disconnected"
        for _ in range(3):  # a process that was paused or had no database
            one.exchange()
            other.exchange()
        assert (state(other.agents, 1), state(other.agents, "held")) == ("disconnected", "connected")


def test_agent_with_an_open_poll_stays_connected_after_it_leaves_another_process(postgresql_database, clock):
    with closing(Process(postgresql_database, clock)) as one, closing(Process(postgresql_database, clock)) as other:
        one.agents.begins("vm-1", _HEADER)
        for second in range(20):
            if second == 2:
                poll(other.agents, 1)
            clock.advance(1)
            other.exchange()
            one.exchange()
            assert state(one.agents, 1) == "connected"
        assert state(other.agents, 1) == "connected"


def test_agents_are_stored_after_a_failed_attempt(tmp_path, clock):
    agents = ConnectedAgents(clock.clock)
    poll(agents, 1)
    agents.share_again(agents.take_unshared())
    with of_file(tmp_path) as database, closing(StoreThreads(database.store())) as threads:
        exchange = AgentExchange(threads, agents, notify=lambda: None, clock=clock.clock)
        asyncio.run(exchange.exchange())
        count = "SELECT count(*) FROM agents"
        assert threads.store.read(lambda connection: connection.exec_driver_sql(count).scalar()) == 1
