"""Heartbeats: periodic records with a null event, which show that the agent runs.

Without heartbeats, a consumer cannot distinguish a dead agent from a quiet period. The agent adds a heartbeat every
`heartbeat.interval_seconds`, which is 0 (off) by default. Only sinks with ``heartbeat = true`` receive heartbeats.
"""

from __future__ import annotations

from bridge.outbox.outbox import Outbox
from bridge.polling.poller import Poller


def send_heartbeat(outbox: Outbox, poller: Poller) -> None:
    """Add a heartbeat with the incarnation of the last document. The workers send the heartbeat."""
    outbox.append_heartbeat(incarnation=poller.incarnation)
