"""Serves the page of all VMs and their agents."""

from __future__ import annotations

from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.store.database import StoreThreads
from bridge.portal.store.vms import VmFilter, count_vms
from bridge.portal.users import Person


async def count_disconnected(store: StoreThreads, connected_agents: ConnectedAgents, person: Person) -> int:
    """Return the number of disconnected agents that *person* can see.

    The agents polled within the last day, and are neither connected nor reconnecting. For a person without a scope,
    the function does not use the database.
    """
    keys = connected_agents.disconnected()
    if not person.scope or not keys:
        return len(keys)
    return await store.read(count_vms, VmFilter(scope=person.scope, vm_keys=keys))
