"""What stands behind a failed HTTP request: the chain of its causes, and whether its host is this machine.

requests wraps urllib3, which wraps the error of the socket; what a person can act on is the innermost one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator


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
