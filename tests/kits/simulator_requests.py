"""Requests to a simulator."""

from __future__ import annotations

from typing import Any

import requests

from bridge.testing import Simulator

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"

METADATA = {"Metadata": "true"}


def get(
    session: requests.Session, simulator: Simulator, path: str = EVENTS, timeout: float = 5, **keys: Any
) -> requests.Response:
    """Return the response to a GET of *path*; redirects are not followed."""
    return session.get(simulator.endpoint + path, timeout=timeout, allow_redirects=False, **keys)


def approve(
    session: requests.Session, simulator: Simulator, *event_ids: str, path: str = EVENTS, **more: Any
) -> requests.Response:
    """Return the response to a StartRequests body for *event_ids*, with the additional keys *more*."""
    body = {"StartRequests": [{"EventId": event_id} for event_id in event_ids], **more}
    return session.post(simulator.endpoint + path, json=body, timeout=5)
