"""A peer that never responds, for the tests of deadlines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge.testing.peers import silent_listener


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Return a port that accepts connections and never responds."""
    with silent_listener() as (address, _):
        yield address.port
