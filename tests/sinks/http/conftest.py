"""Fixtures for the tests of the HTTP endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from endpoint_peers import PATIENCE_SECONDS, Peer, RawPeer

from sinks.http.config import HttpConfig
from sinks.http.endpoint import Endpoint


@pytest.fixture
def peer() -> Iterator[Peer]:
    each = Peer()
    yield each
    each.close()


@pytest.fixture
def raw_peer() -> Iterator[Any]:
    peers: list[RawPeer] = []

    def start(behaviour: Any) -> RawPeer:
        peers.append(RawPeer(behaviour))
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
