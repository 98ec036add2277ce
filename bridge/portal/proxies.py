"""Whose request it is: the peer's, or, where that is a proxy of the settings, the client's that the proxy tells of.

A proxy puts the address of its client at the end of ``X-Forwarded-For``. What stands before it came with the request,
and anybody may have written it. So the header counts only from a proxy, and is read from its end, as far as proxies go.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping

_HEADER = "x-forwarded-for"
#: More proxies do not stand one behind the other.
_MOST_PROXIES = 16
#: Some proxies give the port too.
_WITH_PORT = re.compile(r"\[([^\[\]]+)\](?::\d+)?|([^:]+):\d+")


class Proxies:
    """The proxies of the settings."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(_address_in(each) or each for each in addresses)

    def __contains__(self, address: str) -> bool:
        """Return whether a proxy has that address, however it is spelt."""
        return (_address_in(address) or address) in self._addresses

    def client_of(self, headers: Mapping[str, str], peer: str) -> str:
        """Return the address that a request with *headers* came from, which the one of *peer* brought here."""
        client = peer
        for said in reversed(headers.get(_HEADER, "").rsplit(",", _MOST_PROXIES)[-_MOST_PROXIES:]):
            address = _address_in(said)
            if client not in self or address is None:
                break
            client = address
        return client


def _address_in(text: str) -> str | None:
    """Return the address that *text* is, in one form; None: it is none."""
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
