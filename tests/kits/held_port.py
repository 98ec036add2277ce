"""A reserved port that refuses connections until a server of the test listens on it.

A port that is found and released can be taken by another test, which then responds unexpectedly. The reserved port
stays bound without listening, so the system assigns it to no other process. A server with SO_REUSEADDR, such as the
servers of Python and of the agent, can still listen on the port.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a reserved port of 127.0.0.1 without a listener."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
