"""Fixtures for delivery tests: workers with a separate outbox, and an HTTP endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from delivery_kit import DeliveryKit
from outbox_kit import OutboxKit

from bridge.testing.http_peer import HttpPeer


@pytest.fixture
def bench(kit: OutboxKit) -> Iterator[DeliveryKit]:
    """Return a kit that makes sinks, records, and workers, and ends them with the test."""
    bench = DeliveryKit(kit)
    yield bench
    bench.close()


@pytest.fixture
def peer() -> Iterator[HttpPeer]:
    """Return an endpoint that accepts every record."""
    with HttpPeer() as peer:
        yield peer
