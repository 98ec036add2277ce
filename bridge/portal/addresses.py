"""Groups and compares the addresses of clients.

A proxy in `proxy_addresses` adds the address of its client to the ``X-Forwarded-For`` header. Therefore, if a request
comes from such a proxy, ProxyHeadersMiddleware of uvicorn reads the header from its end, and uses the first address
that is not the address of a proxy. A client can forge all addresses before it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.requests import Request

_IPV4_BITS, _IPV6_BITS = 24, 64


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


def block_of(address: str) -> str:
    """Return the /24 of an IPv4 address, or the /64 of an IPv6 address."""
    return _network(address, _IPV4_BITS)


def client_of(address: str) -> str:
    """Return the network that identifies one client: an IPv4 /32 or an IPv6 /64."""
    return _network(address, 32)


def _network(address: str, ipv4_bits: int) -> str:
    found = _parsed(address)
    if found is None:
        return address
    bits = ipv4_bits if isinstance(found, ipaddress.IPv4Address) else _IPV6_BITS
    return str(ipaddress.ip_network((found, bits), strict=False))


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return None
    return (found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None) or found
