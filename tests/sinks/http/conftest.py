"""Fixtures for the tests of the HTTP endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
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
    peers: list[SlowPeer] = []

    def start(behaviour: Any) -> SlowPeer:
        peers.append(SlowPeer(behaviour))
        return peers[-1]

    yield start
    for each in peers:
        each.close()


@pytest.fixture
def endpoint() -> Iterator[Any]:
    made: list[Endpoint] = []

    def make(url: str, **keys: Any) -> Endpoint:
        secrets = keys.pop("secrets", ())
        made.append(Endpoint(url, HttpConfig(**{"timeout_seconds": PATIENCE_SECONDS, **keys}), secrets=lambda: secrets))
        return made[-1]

    yield make
    for each in made:
        each.close()
