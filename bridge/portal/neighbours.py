"""Agents that ask another process of the portal: behind a load balancer nobody knows where an agent's poll is held.

Who decides at one process must know whether an agent would follow, and pages show every agent. So each process tells
the database, within a second, which agents ask here, and reads which ask elsewhere. A process that was killed tells no
more: what it held counts as gone after a while, unless the agent has come to another before, as it does at once.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from datetime import timedelta

from bridge.clock import Clock, format_time
from bridge.logs import ThrottledLog
from bridge.portal.connections import FORGOTTEN_SECONDS, HELD_SECONDS, Connections
from bridge.portal.store.agents import agents_elsewhere, forget_agents, tell_agents
from bridge.portal.store.database import StoreThreads, StoreUnavailable

logger = logging.getLogger(__name__)

_ROUND_SECONDS = 1.0
#: Every so many rounds what is still so is told again, and what is old goes.
_ROUNDS = int(HELD_SECONDS / 3)


class Neighbours:
    """Keeps *connections* and the database in step, where several processes may share it."""

    def __init__(self, store: StoreThreads, connections: Connections, *, clock: Clock) -> None:
        self._store = store
        self._connections = connections
        self._clock = clock
        self._process = uuid.uuid4().hex
        self._log = ThrottledLog(logger, clock=clock)

    async def follow(self) -> None:
        """Tell and hear each second, until it is cancelled."""
        rounds = 0
        while self._store.is_shared:
            try:
                await self.exchange(is_everything=rounds % _ROUNDS == 0)
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"Agents of other processes are not known. {error}")
                rounds = -1  # and then everything is told
            else:
                self._log.recovered("store", "Agents of other processes are known again.")
            rounds += 1
            await asyncio.sleep(_ROUND_SECONDS)
        await asyncio.Event().wait()  # nobody to tell; a task that follows has no end of its own

    async def exchange(self, *, is_everything: bool) -> None:
        """Tell what has changed here, or everything, and hear what is told elsewhere."""
        told = self._connections.told(is_everything=is_everything)
        if told:
            await self._store.write(tell_agents, told, process=self._process)
        if is_everything:
            await self._store.write(forget_agents, before=self._ago(2 * FORGOTTEN_SECONDS))
        elsewhere = await self._store.read(agents_elsewhere, process=self._process, since=self._ago(FORGOTTEN_SECONDS))
        await asyncio.to_thread(self._connections.hear, elsewhere)  # of thousands it takes a while

    def _ago(self, seconds: float) -> str:
        return format_time(self._clock.now() - timedelta(seconds=seconds))
