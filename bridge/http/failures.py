"""Finds the cause of a failed HTTP request, and detects loopback hosts.

The `requests` library wraps urllib3 exceptions, which in turn wrap socket errors. The innermost exception has the most
useful message.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield *error* and its causes, including the ``reason`` of urllib3 errors."""
    seen: set[int] = set()
    following: object = error
    while isinstance(following, BaseException) and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__ or getattr(following, "reason", None)


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost cause of *error*."""
    *_, innermost = causes(error)
    return innermost


def is_loopback(host: str) -> bool:
    """Return whether *host* is localhost or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def are_loopback_hosts(host_headers: Sequence[str]) -> bool:
    """Return whether each Host header in *host_headers* names this machine.

    A local server uses this check against DNS rebinding. In this attack, the owner of a domain points its name to
    127.0.0.1, and a web page of this domain can then read the responses of local servers. The Host header of these
    requests still contains the name of the domain. A request without a Host header does not come from a browser, so it
    is allowed.
    """
    for value in host_headers:
        try:
            host = urlsplit(f"//{value}").hostname
        except ValueError:
            return False
        if not is_loopback((host or "").removesuffix(".")):
            return False
    return True
