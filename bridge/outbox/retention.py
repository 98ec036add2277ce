"""Evicts records from a full outbox, and deletes old events. These functions do no I/O.

The agent evicts parked records first, because it does not retry them. It then evicts pending records, and urgent
records last. Within each group, it evicts the oldest records first. It never evicts records of the newest document or
records that it is currently sending.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from bridge.outbox import deliveries
from bridge.outbox.rows import NEEDED, DeliveryState, RecordRow
from bridge.outbox.state import State

REMEMBER_SECONDS = 7 * 86_400.0


def make_room(state: State, excess_bytes: int, *, newest: int, sending: Collection[int], now: float) -> int:
    """Evict undelivered records to free *excess_bytes*. Return the number of evictions."""
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
    queues = list(state.queues.values())
    parked = {sequence for queue in queues for sequence in queue.parked}
    pending = {sequence for queue in queues for sequence in queue.pending}
    urgent = {sequence for queue in queues for sequence in queue.urgent}
    for sequence in (*sorted(parked - pending), *sorted(pending - urgent), *sorted(urgent)):
        if sequence in state.records.rows:
            yield state.records.rows[sequence]


def forget_old(state: State, now: float) -> None:
    """Delete events that ended over 7 days ago, with their approvals and decisions."""
    before = now - REMEMBER_SECONDS
    for event in list(state.events.rows.values()):
        if event.ended_at is not None and event.ended_at < before:
            state.events.delete(event.key)
    announced = () if state.document is None else state.document.events
    events = {*state.events.rows, *(event.event_id for event in announced)}
    for decision in list(state.decisions.rows.values()):
        if decision.expires_at < before and decision.event_id not in events:
            state.decisions.delete(decision.arrival)
    for approval in list(state.approvals.rows.values()):
        if approval.changed_at < before and approval.event_id not in events:
            state.approvals.delete(approval.key)
