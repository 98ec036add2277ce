"""Retention: the records to remove at a limit. Pure functions over `State`.

At a limit, parked records are evicted first, because they wait for a person, then the oldest pending records, and
urgent records last. The records of the newest document and the records that are being sent stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from bridge.outbox import deliveries
from bridge.outbox.rows import NEEDED, DeliveryState, RecordRow
from bridge.outbox.state import State


def make_room(state: State, excess_bytes: int, *, newest: int, sending: Collection[int], now: float) -> int:
    """Evict records with at least *excess_bytes* of bodies; return the number of evicted deliveries.

    Records from the sequence *newest* on and those in *sending* stay.
    """
    target = state.needed_bytes - excess_bytes
    evicted = 0
    for row in _in_order(state):
        if state.needed_bytes <= target:
            break
        if row.sequence >= newest or row.sequence in sending:
            continue
        for delivery in state.deliveries_of(row.sequence):
            if delivery.state in NEEDED:
                deliveries.change_state(state, delivery, DeliveryState.EVICTED, now=now)
                evicted += 1
    return evicted


def _in_order(state: State) -> Iterator[RecordRow]:
    parked: set[int] = set()
    pending: set[int] = set()
    urgent: set[int] = set()
    for queue in state.queues.values():
        parked.update(queue.parked)
        pending.update(queue.pending)
        urgent.update(queue.urgent)
    for sequences in (parked - pending, pending - urgent, urgent):
        for sequence in sorted(sequences):
            if sequence in state.records.rows:
                yield state.records.rows[sequence]
