"""Compares client addresses, and limits expensive work for each block of addresses.

If a request comes from a proxy in `proxy_addresses`, uvicorn's ProxyHeadersMiddleware takes the client's address from
the ``X-Forwarded-For`` header. It reads the header from right to left, and uses the first address that does not belong
to a proxy. The client could have forged all addresses to the left of this address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Iterable

from starlette.requests import Request


class Networks:
    """A set of addresses and networks."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(each) for each in networks]

    def __contains__(self, address: str) -> bool:
        found = _parsed(address)
        return found is not None and any(found in each for each in self._networks)


def address_of(request: Request) -> str:
    """Return the address of the client."""
    return request.client.host if request.client else ""


def block_of(address: str, *, ipv4_bits: int = 24) -> str:
    """Return the network of an IPv4 address with *ipv4_bits*, or the /64 of an IPv6 address."""
    found = _parsed(address)
    if found is None:
        return address
    bits = ipv4_bits if found.version == 4 else 64  # noqa: PLR2004
    return str(ipaddress.ip_network((found, bits), strict=False))


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return None
    return (found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None) or found


class QueueFull(Exception):  # a state, not an error of the portal
    """Too much work is waiting, either in total or for one address block."""


class AddressQueue:
    """Limits the work that runs or waits, both in total and for each address block.

    Each task first waits for a slot of its address block, and only then for one of the total slots. A block that sends
    many requests therefore cannot take all slots.
    """

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
