"""The endpoint to which the tests of HTTP sinks send records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge.testing.http_peer import HttpPeer


@pytest.fixture
def peer() -> Iterator[HttpPeer]:
    """Return an endpoint that accepts every record."""
    with HttpPeer() as peer:
        yield peer
