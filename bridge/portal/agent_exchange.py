"""Shares the state of connected agents between portal processes through the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta

from bridge.clock import Clock
from bridge.logs import ThrottledLog
from bridge.portal.connected_agents import KEPT_SECONDS, ConnectedAgents
from bridge.portal.store.agents import changes_of_other_processes, delete_agents, store_agents
from bridge.portal.store.database import StoreThreads, StoreUnavailable

logger = logging.getLogger(__name__)

_ROUND_SECONDS = 0.5
_HEARTBEAT_SECONDS = 1.0
_CLEANUP_SECONDS = 60.0


class AgentExchange:
    """Stores the agents that poll this process, and loads the agents of other processes.

    After the exchange has read changes from other processes, it calls *notify*. If no agent connects or disconnects,
    the exchange writes only a heartbeat, and only if processes can share the database.
    """

    def __init__(
        self, store: StoreThreads, connected_agents: ConnectedAgents, *, notify: Callable[[], None], clock: Clock
    ) -> None:
        self._store = store
        self._connected_agents = connected_agents
        self._notify = notify
        self._clock = clock
        self._heartbeat = 0
        self._heartbeats: dict[str, int] = {}
        """The last known heartbeat of each other process."""
        self._stored_at = clock.monotonic()
        self._cleaned_at = -_CLEANUP_SECONDS
        self._log = ThrottledLog(logger, clock=clock)

    async def follow(self) -> None:
        """Call `exchange` twice a second until the task is canceled."""
        while True:
            try:
                await self.exchange()
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"The state of connected agents cannot be stored. {error}")
            else:
                self._log.recovered("store", "The database stores the state of connected agents again.")
            self._connected_agents.sweep()
            await asyncio.sleep(_ROUND_SECONDS)

    async def exchange(self) -> None:
        """Store the changes of this process, and read the changes of other processes."""
        agents, process = self._connected_agents, self._connected_agents.process
        is_shared, now = self._store.store.kind.is_shared, self._clock.monotonic()
        is_cleanup = now - self._cleaned_at >= _CLEANUP_SECONDS
        changes = agents.take_unshared()
        if changes or (is_shared and now - self._stored_at >= _HEARTBEAT_SECONDS):
            self._heartbeat = max(self._heartbeat + 1, int(1000 * self._clock.timestamp()))
            try:
                await self._store.write(store_agents, changes, process=process, heartbeat=self._heartbeat)
            except StoreUnavailable:
                agents.share_again(changes)
                raise
            self._stored_at = now
        if is_cleanup:
            before = self._clock.now() - timedelta(seconds=KEPT_SECONDS)
            await self._store.write(delete_agents, before=before)
            self._cleaned_at = now
        if is_shared or is_cleanup:
            heartbeats, found = await self._store.read(
                changes_of_other_processes, process=process, known=self._heartbeats
            )
            self._heartbeats |= heartbeats
            agents.receive(heartbeats, found)
            if found:
                self._notify()
