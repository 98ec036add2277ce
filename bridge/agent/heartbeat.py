"""Sends heartbeats, the periodic records that show that the agent is running.

Without heartbeats, a consumer cannot distinguish a stopped agent from one that observes no events. Heartbeats are off
by default (`heartbeat.interval_seconds` is 0). Only sinks with ``heartbeat = true`` receive heartbeats.

The agent sends one heartbeat immediately after the start, and then one per interval, even while polls fail.
`Agent.run_due` calls `send_heartbeat`.
"""

from __future__ import annotations

from bridge.outbox.outbox import Outbox
from bridge.polling.poller import Poller


def send_heartbeat(outbox: Outbox, poller: Poller) -> None:
    """Add a heartbeat record with the DocumentIncarnation of the last document."""
    outbox.append_heartbeat(incarnation=poller.incarnation)
