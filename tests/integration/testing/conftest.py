"""A simulator with a manual clock, and a session."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

import pytest
import requests
from simulator_requests import METADATA

from bridge.testing import ManualClock, Simulator


@pytest.fixture
def session() -> Iterator[requests.Session]:
    """A session that sends the metadata header."""
    with requests.Session() as session:
        session.trust_env = False
        session.headers.update(METADATA)
        yield session


@pytest.fixture
def clock() -> ManualClock:
    """A clock that a test advances."""
    return ManualClock(datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc))


@pytest.fixture
def simulator(clock: ManualClock) -> Iterator[Simulator]:
    """A simulator of one VM without a rate limit."""
    with Simulator(vms=["web_3"], clock=clock, rate_limit=False) as simulator:
        yield simulator
