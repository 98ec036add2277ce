"""Tracks the delivery of each record to each sink, in the `State` in memory.

A delivery is pending until the sink confirms the record (delivered) or permanently rejects it (parked). The agent can
also abandon a delivery (expired or evicted), and an operator can discard it (discarded).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any

import msgspec

from bridge.events.record import TransitionRecord
from bridge.outbox import approvals
from bridge.outbox.rows import NEEDED, DecisionStage, Delivery, DeliveryState, RecordRow, SinkRow
from bridge.outbox.state import State


class OutboxTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of all sinks' delivery counts and of the total size of undelivered records."""

    sinks: dict[str, SinkRow] = {}
    oldest_pending_at: dict[str, float] = {}
    """The smallest `Delivery.aged_from` of the pending records of each sink."""
    needed_bytes: int = 0
    stream_id: str | None = None

    def oldest_pending_seconds(self, sink: str, now: float) -> float:
        """Return the age of the oldest pending record of *sink*, or 0. *now* is a Unix time."""
        return max(now - self.oldest_pending_at.get(sink, now), 0.0)


def record_results(
    state: State,
    sink: str,
    sequences: Iterable[int],
    to: DeliveryState,
    *,
    now: float,
    error: str | None = None,
    accepted_under: str | None = None,
) -> None:
    """Store the result of a send. Records that are no longer pending are not changed.

    If the send failed, *to* is `DeliveryState.PENDING`. *accepted_under* is the digest of the settings that worked.
    """
    row = state.sinks.rows.get(sink)
    if accepted_under is not None and row is not None and row.accepted_under != accepted_under:
        state.sinks.put(msgspec.structs.replace(row, accepted_under=accepted_under))
    # An error can quote a response with lone surrogates, which UTF-8 cannot encode.
    error = None if error is None else error.encode(errors="replace").decode()
    for sequence in sequences:
        delivery = state.deliveries.rows.get((sequence, sink))
        if delivery is not None and delivery.state is DeliveryState.PENDING:
            change_state(state, delivery, to, now=now, error=error, attempts=1)


def expire(state: State, sink: str, *, now: float, older_than: float) -> int:
    """Expire the pending records of *sink* whose `aged_from` is before *older_than*.

    Returns the number of expired records.
    """
    old = [row for row in state.queues[sink].pending.values() if row.aged_from < older_than]
    for row in old:
        change_state(state, row, DeliveryState.EXPIRED, now=now)
    return len(old)


def retry(
    state: State,
    sink: str | None,
    *,
    record_id: str | None = None,
    sequences: Collection[int] | None = None,
    now: float,
) -> int:
    """Make the parked records of *sink* pending again, and return their number.

    If *sink* is None, the function retries the parked records of all sinks. The age of each record restarts at zero.

    If *sequences* is given, the function retries only these records, and they keep their age. The agent passes
    *sequences* when it finds that the endpoint, not the records, caused the rejections.
    """
    rows = needed_records(state, sink, [DeliveryState.PARKED], record_id=record_id)
    rows = rows if sequences is None else [row for row in rows if row.sequence in sequences]
    for row in rows:
        pending = msgspec.structs.replace(
            row,
            state=DeliveryState.PENDING,
            urgent=row.urgent or any(each.urgent for each in state.queues[row.sink].of_event(row.event_key)),
            changed_at=now,
            aged_from=now if sequences is None else row.aged_from,
            error=None,
        )
        state.put_delivery(pending)
    return len(rows)


def find_refreshes(state: State, sink: str, *, now: float, every_seconds: float) -> tuple[list[int], float]:
    """Return the sequences to send again, and the seconds until the next refresh.

    Some destinations, such as Alertmanager, lose alerts when they restart, or drop them after a timeout. The agent
    therefore sends the latest record of each active event again at intervals of *every_seconds*.
    """
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


def send_again(state: State, sink: str, sequences: Iterable[int], *, now: float) -> None:
    """Make the delivered records in *sequences* pending again. They keep their IDs."""
    for sequence in sequences:
        row = state.deliveries.rows.get((sequence, sink))
        if row is None or row.state is not DeliveryState.DELIVERED:
            continue
        state.put_delivery(
            msgspec.structs.replace(row, state=DeliveryState.PENDING, attempts=0, aged_from=now, changed_at=now)
        )
        state.count(sink, delivered=1)


def discard(state: State, sink: str, *, states: Collection[DeliveryState], record_id: str | None, now: float) -> int:
    """Discard undelivered records of *sink*, and return how many were discarded.

    Only records in one of *states* are discarded. If *record_id* is given, only the record with this ID is discarded.
    """
    rows = needed_records(state, sink, states, record_id=record_id)
    for row in rows:
        change_state(state, row, DeliveryState.DISCARDED, now=now)
    return len(rows)


def expire_outdated(state: State, sinks: Iterable[str], event_keys: Collection[str]) -> None:
    """Expire the events' pending records that a newer record replaces.

    *sinks* need only the current state of an event (`current_state_only`).
    """
    for sink, key in product(sinks, event_keys):
        event = state.events.rows.get(key)
        newest = 0 if event is None else event.last_state_sequence or 0
        if (newest, sink) not in state.deliveries.rows:
            continue
        for row in list(state.queues[sink].of_event(key)):
            if row.sequence < newest:
                state.count(sink, event_over=1)
                replaced_at = state.records.rows[newest].observed_at
                error = "A newer record of the event replaced it."
                change_state(state, row, DeliveryState.EXPIRED, now=replaced_at, error=error)


def move(state: State, old: str, new: str, *, now: float, current_state_only: Collection[str] = ()) -> int:
    """Move all undelivered records from the sink *old* to *new*.

    If the event of a moved record is still open, *new* also receives the event's later records, unless the
    `transitions` filter of *new* excludes them. Returns the number of moved records.
    """
    moved = 0
    for row in needed_records(state, old):
        if (row.sequence, new) not in state.deliveries.rows:
            state.put_delivery(msgspec.structs.replace(row, sink=new, attempts=0, error=None, changed_at=now))
            moved += 1
            event = state.events.rows.get(row.event_key)
            is_state = state.records.rows[row.sequence].record.approval is None
            if event is not None and event.ended_at is None and is_state:
                told = {**event.sinks, new: max(row.sequence, event.sinks.get(new, 0))}
                state.put_event(msgspec.structs.replace(event, sinks=told))
        change_state(state, row, DeliveryState.DISCARDED, now=now)
    expire_outdated(state, {new}.intersection(current_state_only), list(state.events.rows))
    return moved


def totals(state: State) -> OutboxTotals:
    """Return the totals of all sinks."""
    return OutboxTotals(
        sinks=dict(state.sinks.rows),
        oldest_pending_at={
            name: min(row.aged_from for row in queue.pending.values())
            for name, queue in state.queues.items()
            if queue.pending
        },
        needed_bytes=state.needed_bytes,
        stream_id=state.get("stream_id"),
    )


def make_event_urgent(state: State, event_key: str) -> None:
    """Mark all pending records of an event as urgent, so that sinks send them in order."""
    for queue in state.queues.values():
        for row in list(queue.of_event(event_key)):
            if not row.urgent:
                state.put_delivery(msgspec.structs.replace(row, urgent=True))


def new_delivery(record: RecordRow, decoded: TransitionRecord, sink: str) -> Delivery:
    """Return the pending delivery of *record* for *sink*."""
    event = decoded.event
    return Delivery(
        sink=sink,
        sequence=record.sequence,
        state=DeliveryState.PENDING,
        event_key=record.event_key,
        urgent=decoded.is_urgent,
        not_before=None if event is None or event.not_before is None else event.not_before.timestamp(),
        aged_from=record.observed_at,
        changed_at=record.observed_at,
        body=record.body,
    )


def change_state(
    state: State, row: Delivery, to: DeliveryState, *, now: float, error: str | None = None, attempts: int = 0
) -> None:
    """Store a delivery's new state, and add *attempts* to its attempt count."""
    state.put_delivery(
        msgspec.structs.replace(row, state=to, error=error, changed_at=now, attempts=row.attempts + attempts)
    )


def needed_records(
    state: State, sink: str | None, states: Collection[DeliveryState] = NEEDED, *, record_id: str | None = None
) -> list[Delivery]:
    """Return the rows in *states*, ordered by sink and sequence. None matches all rows."""
    queues = state.queues.values() if sink is None else [state.queues[sink]]
    rows = [row for queue in queues for row in (*queue.pending.values(), *queue.parked.values()) if row.state in states]
    if record_id is not None:
        rows = [row for row in rows if state.records.rows[row.sequence].id == record_id]
    return sorted(rows, key=lambda row: (row.sink, row.sequence))


def import_rows(state: State, rows: Mapping[str, Iterable[Any]], known: Collection[tuple[str, int]]) -> int:
    """Import undelivered records and holds from the rows of another outbox file.

    Records that are in *known* are skipped. Returns the number of imported records.
    """
    other = State()
    other.load(rows)
    present = {*known, *(_place(row) for row in state.records.rows.values())}
    undelivered = {delivery.sequence for delivery in needed_records(other, None)}
    new = [row for row in map(other.records.rows.__getitem__, undelivered) if _place(row) not in present]
    first = min([0, *state.records.rows]) - len(new)  # imported records sort before all other records
    for place, row in enumerate(sorted(new, key=_place), first):
        state.records.put(msgspec.structs.replace(row, sequence=place))
        for delivery in other.deliveries_of(row.sequence):
            if delivery.state in NEEDED:
                state.put_delivery(msgspec.structs.replace(delivery, sequence=place))
    holds = [row for row in approvals.open_decisions(other) if row.state is DecisionStage.ON_HOLD]
    approvals.keep_decisions(state, holds)
    return len(new)


def _place(row: RecordRow) -> tuple[str, int]:
    record = row.record
    return record.stream_id, record.sequence
