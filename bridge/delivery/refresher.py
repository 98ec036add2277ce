"""Selects the records to resend to destinations that lose their alerts.

Some destinations, such as Alertmanager, lose an alert when they restart or after a timeout. At an interval of
`refresh_seconds`, the agent resends the latest record of each active event to these destinations. A resent record keeps
its ID, and the agent retries it like any other pending record.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bridge.outbox.rows import DeliveryState
from bridge.outbox.state import State


def find_refreshes(state: State, sink: str, *, now: float, every_seconds: float) -> tuple[list[int], float]:
    """Return the sequences to send again, and the seconds until the next refresh."""
    due, next_seconds = [], every_seconds
    for event in state.events.rows.values():
        delivery = state.deliveries.rows.get((event.sinks.get(sink, 0), sink))
        is_newest = event.ended_at is None and event.key not in state.queues[sink].by_event
        if not is_newest or delivery is None or delivery.state is not DeliveryState.DELIVERED:
            continue
        age = now - delivery.changed_at
        if 0 <= age < every_seconds:
            next_seconds = min(next_seconds, every_seconds - age)
        else:  # a negative age means that the wall clock was set back
            due.append(delivery.sequence)
    return due, 0.0 if due else next_seconds


def send_again(state: State, sink: str, sequences: Sequence[int], *, now: float) -> None:
    """Make the delivered records with *sequences* pending again for *sink*."""
    for sequence in sequences:
        row = state.deliveries.rows.get((sequence, sink))
        if row is None or row.state is not DeliveryState.DELIVERED:
            continue
        state.put_delivery(
            msgspec.structs.replace(row, state=DeliveryState.PENDING, attempts=0, aged_from=now, changed_at=now)
        )
        state.count(sink, delivered=1)
