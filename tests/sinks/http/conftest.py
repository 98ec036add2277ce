"""Fixtures for the tests of the HTTP endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from closing import closing_each
from endpoint_outcome import PATIENCE_SECONDS
from slow_peer import SlowPeer

from bridge.testing.http_peer import HttpPeer
from sinks.http.config import HttpConfig
from sinks.http.endpoint import Endpoint


@pytest.fixture
def url(peer: HttpPeer) -> str:
    """Return the URL of the peer."""
    return f"http://{peer.address.authority}"


@pytest.fixture
def start_peer() -> Iterator[Any]:
    """Return a function that starts a peer with the given behavior."""
    with closing_each(SlowPeer) as start:
        yield start


@pytest.fixture
def endpoint() -> Iterator[Any]:
    def endpoint_of(url: str, **keys: Any) -> Endpoint:
        secrets = keys.pop("secrets", ())
        return Endpoint(url, HttpConfig(**{"timeout_seconds": PATIENCE_SECONDS, **keys}), secrets=lambda: secrets)

    with closing_each(endpoint_of) as make:
        yield make
