"""Limits expensive work per address block, so that one client cannot delay the others.

An address block is an IPv4 /24 or an IPv6 /64. Blocks that have waiting work take turns. Preferred work has a separate
queue with the same limits, and runs before other work.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator

_IPV4_BITS, _IPV6_BITS = 24, 64
_Lane = OrderedDict[str, deque[asyncio.Future[None]]]


class QueueFull(Exception):  # a state, not an error of the portal
    """Too much work is waiting, either in total or for one address block."""


class AddressQueue:
    """Limits the work that runs or waits, both in total and for each address block."""

    def __init__(self, *, running: int, running_of_block: int, waiting: int, waiting_of_block: int) -> None:
        self._most_running, self._most_of_block = running, running_of_block
        self._most_waiting, self._most_waiting_of_block = waiting, waiting_of_block
        self._running: Counter[str] = Counter()
        self._preferred: _Lane = OrderedDict()
        self._others: _Lane = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, address: str, *, is_preferred: bool = False) -> AsyncIterator[None]:
        """Wait until work for *address* can run. Raise QueueFull if too much work is waiting."""
        block = block_of(address)
        await self._wait(block, self._preferred if is_preferred else self._others)
        try:
            yield
        finally:
            self._release(block)

    async def _wait(self, block: str, lane: _Lane) -> None:
        if self._can_run(block):
            self._running[block] += 1
            return
        waiting = sum(map(len, lane.values()))
        if waiting >= self._most_waiting or len(lane.get(block, ())) >= self._most_waiting_of_block:
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        lane.setdefault(block, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(block)
            raise

    def _release(self, block: str) -> None:
        self._running[block] -= 1
        if not self._running[block]:
            del self._running[block]
        for lane in (self._preferred, self._others):
            for each in list(lane):
                self._start(each, lane)

    def _start(self, block: str, lane: _Lane) -> None:
        queue = lane[block]
        while queue and (queue[0].cancelled() or self._can_run(block)):
            turn = queue.popleft()
            if not turn.cancelled():
                self._running[block] += 1
                turn.set_result(None)
                lane.move_to_end(block)
                break
        if not queue:
            del lane[block]

    def _can_run(self, block: str) -> bool:
        return self._running.total() < self._most_running and self._running[block] < self._most_of_block


def block_of(address: str) -> str:
    """Return the /24 of an IPv4 address, or the /64 of an IPv6 address."""
    return _network(address, _IPV4_BITS)


def client_of(address: str) -> str:
    """Return the network that identifies one client: an IPv4 /32 or an IPv6 /64."""
    return _network(address, 32)


def _network(address: str, ipv4_bits: int) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    found = mapped or found
    bits = ipv4_bits if found.version == 4 else _IPV6_BITS  # noqa: PLR2004  # IPv4
    return str(ipaddress.ip_network((found, bits), strict=False))
