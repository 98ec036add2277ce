"""What the tests of delivery get: workers over an outbox of their own, a sink that pages people, an HTTP endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from delivery_kit import DeliveryKit, Pager
from outbox_kit import OutboxKit

from bridge.testing.http_peer import HttpPeer
from bridge.testing.sinks import Box


@pytest.fixture
def bench(kit: OutboxKit) -> Iterator[DeliveryKit]:
    """Return what makes sinks, records and workers; all of it ends with the test."""
    bench = DeliveryKit(kit)
    yield bench
    bench.close()


@pytest.fixture
def pager(bench: DeliveryKit) -> Box:
    """Return the box of the sink `s`, which pages people."""
    return bench.sink(sink_class=Pager)


@pytest.fixture
def peer() -> Iterator[HttpPeer]:
    """Return an endpoint that accepts everything."""
    with HttpPeer() as peer:
        yield peer
