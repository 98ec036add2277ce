"""Finds the address of a client behind configured proxies.

Each proxy appends the address of its client to the ``X-Forwarded-For`` header. The client can forge all earlier
addresses, so the portal reads the header only if the request comes from a configured proxy, and uses the last address
that does not belong to a configured proxy.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping

_HEADER = "x-forwarded-for"
_MOST_PROXIES = 16
_WITH_PORT = re.compile(r"\[([^\[\]]+)\](?::\d+)?|([^:]+):\d+")


class Proxies:
    """The configured proxies."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(each) for each in addresses]

    def __contains__(self, address: str) -> bool:
        found = _address_in(address)
        return found is not None and any(ipaddress.ip_address(found) in each for each in self._networks)

    def client_of(self, headers: Mapping[str, str], peer: str) -> str:
        """Return the client's address for a request with *headers* that arrived from *peer*."""
        client = peer
        for said in reversed(headers.get(_HEADER, "").rsplit(",", _MOST_PROXIES)[-_MOST_PROXIES:]):
            address = _address_in(said)
            if client not in self or address is None:
                break
            client = address
        return client


def _address_in(text: str) -> str | None:
    text = text.strip()
    found = _WITH_PORT.fullmatch(text)
    if found is not None:
        text = found[1] or found[2]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
