"""A port that is a test's own: it refuses connections until a server of the test listens there.

A port that was found and let go may be another test's a moment later, which then answers where nobody was to. This one
stays bound without listening: the system gives it to nobody, and a server that sets SO_REUSEADDR, as those of Python
and of the agent do, can still listen there.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that nobody listens on, and keep it from everybody else."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
