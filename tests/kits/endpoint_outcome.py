"""The outcome of a POST through the endpoint of the HTTP sinks."""

from __future__ import annotations

from bridge.sink import DeliveryFailed, DeliveryRejected
from sinks.http.endpoint import Endpoint

DEADLINE = 1.0

#: Timeout for a peer that responds.
PATIENCE_SECONDS = 30.0


def outcome(endpoint: Endpoint) -> tuple[str, frozenset[str]]:
    """Send a POST, and return its outcome and the flags of its error."""
    try:
        endpoint.post(b"{}", {"Content-Type": "application/json"})
    except DeliveryRejected:
        return "parked", frozenset()
    except DeliveryFailed as error:
        said = {name for name in ("needs_attention", "gone") if getattr(error, name)}
        return "failed", frozenset(said | ({"retry_after"} if error.retry_after is not None else set()))
    return "delivered", frozenset()
