"""What stands behind an HTTP request: why it failed, and whether a host is this machine.

requests wraps urllib3, which wraps the error of the socket; what a person can act on is the innermost one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield *error*, what caused it, and so on; urllib3 keeps a cause in ``reason`` as well."""
    seen: set[int] = set()
    following: object = error
    while isinstance(following, BaseException) and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__ or getattr(following, "reason", None)


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost of the `causes` of *error*."""
    *_, innermost = causes(error)
    return innermost


def is_loopback(host: str) -> bool:
    """Return whether *host* is this machine by its own name for itself, or by a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def are_loopback_hosts(host_headers: Sequence[str]) -> bool:
    """Return whether each of *host_headers* names this machine; what no browser sends, none at all, does too.

    A browser lets a page read what the page's own host answers, and whoever owns that host's name may point it to
    127.0.0.1 (DNS rebinding). The name still stands in the header Host, so a server on loopback answers to no other.
    """
    for value in host_headers:
        try:
            host = urlsplit(f"//{value}").hostname
        except ValueError:
            return False
        if not is_loopback((host or "").removesuffix(".")):
            return False
    return True
