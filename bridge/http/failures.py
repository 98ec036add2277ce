"""The causes of a failed HTTP request, and whether a host is this machine.

requests wraps urllib3, which wraps the error of the socket. The innermost error is the useful one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield *error* and its chain of causes. urllib3 also keeps a cause in ``reason``."""
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
    """Return whether *host* is localhost or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def are_loopback_hosts(host_headers: Sequence[str]) -> bool:
    """Return whether each of *host_headers* names this machine. A request without the header is not from a browser.

    The owner of a domain can point its name to 127.0.0.1, and a browser then lets a page of this domain read responses
    of a local server (DNS rebinding). The header Host still has the name, so a local server refuses other names.
    """
    for value in host_headers:
        try:
            host = urlsplit(f"//{value}").hostname
        except ValueError:
            return False
        if not is_loopback((host or "").removesuffix(".")):
            return False
    return True
