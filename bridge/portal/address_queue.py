"""Limits expensive work per address block, so that one client cannot delay the others.

An address block is an IPv4 /24 or an IPv6 /64. A task first waits until its block runs fewer tasks than a block may
run. Then it waits until the total is below the total limit. Therefore, a block that sends many requests cannot use up
the total limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from bridge.portal.addresses import block_of


class QueueFull(Exception):  # a state, not an error of the portal
    """Too much work is waiting, either in total or for one address block."""


class AddressQueue:
    """Limits the work that runs or waits, both in total and for each address block."""

    def __init__(self, *, running: int, running_of_block: int, waiting: int, waiting_of_block: int) -> None:
        self._most, self._most_of_block = running + waiting, running_of_block + waiting_of_block
        self._running_of_block = running_of_block
        self._total = asyncio.Semaphore(running)
        self._blocks: dict[str, asyncio.Semaphore] = {}
        self._entered: Counter[str] = Counter()
        """The number of running and waiting tasks of each block."""

    @contextlib.asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Wait until work for *address* can run. Raise QueueFull if too much work is waiting."""
        block = block_of(address)
        if self._entered.total() >= self._most or self._entered[block] >= self._most_of_block:
            raise QueueFull
        self._entered[block] += 1
        try:
            async with self._blocks.setdefault(block, asyncio.Semaphore(self._running_of_block)), self._total:
                yield
        finally:
            self._entered[block] -= 1
            if not self._entered[block]:
                del self._entered[block], self._blocks[block]
