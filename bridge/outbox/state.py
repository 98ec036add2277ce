"""Keeps the agent's tables in memory, with indexes and a list of unsaved rows.

All threads share one `State`, protected by the lock in `bridge.outbox.outbox`. The functions in this module do not take
the lock, read a clock, or do I/O, so tests can call them directly.

A record stays in memory while it is pending or parked, or while it describes the current state of an active event. All
other records are history, which is kept only in the outbox file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Generic, TypeVar

import msgspec

from bridge.events.event import Document, VmIdentity, decode_document
from bridge.outbox.rows import (
    NEEDED,
    Delivery,
    DeliveryState,
    EventRow,
    EventVersion,
    MetaRow,
    PendingApproval,
    RecordRow,
    SinkRow,
    StoredDecision,
)

K = TypeVar("K")
R = TypeVar("R")


class _Table(Generic[K, R]):
    """The rows of one table by key, and the rows that changed since the last save."""

    def __init__(self, key_of: Callable[[R], K]) -> None:
        self._key_of = key_of
        self.rows: dict[K, R] = {}
        self._changed: dict[K, R | None] = {}

    def put(self, row: R) -> None:
        key = self._key_of(row)
        self.rows[key] = self._changed[key] = row

    def delete(self, key: K) -> None:
        if self.rows.pop(key, None) is not None:
            self._changed[key] = None

    def load(self, rows: Iterable[R]) -> None:
        self.rows = {self._key_of(row): row for row in rows}
        self._changed = {}

    def take(self) -> dict[K, R | None]:
        """Return the changes since the last call. The value None marks a deleted row."""
        changed, self._changed = self._changed, {}
        return changed


class Changes(msgspec.Struct, kw_only=True):
    """The rows that the next save writes."""

    through: int = 0
    """The sequence of the newest record in these changes."""
    tables: dict[str, dict[Any, Any]] = {}
    """The rows of each table by key. The value None marks a deleted row."""
    new_file_because: str | None = None
    """Why the next save must write the complete state to a new file, or None if it need not."""

    def add(self, newer: Changes) -> None:
        """Add the changes in *newer*. A row in *newer* replaces an older row with the same key."""
        self.through = newer.through
        self.require_new_file(newer.new_file_because)
        for name, rows in newer.tables.items() if self.new_file_because is None else ():
            self.tables.setdefault(name, {}).update(rows)

    def require_new_file(self, reason: str | None) -> None:
        """Make the next save write the complete state to a new file.

        If an earlier call already gave a reason, that reason is kept.
        """
        self.new_file_because = self.new_file_because or reason
        if self.new_file_because is not None:
            self.tables = {}


class SinkQueue:
    """The pending and parked rows of a sink, ordered by sequence."""

    def __init__(self) -> None:
        self.pending: dict[int, Delivery] = {}
        self.urgent: dict[int, Delivery] = {}
        """The pending rows of urgent events. The sink sends these rows first."""
        self.by_event: dict[str, dict[int, Delivery]] = {}
        self.parked: dict[int, Delivery] = {}

    def update(self, row: Delivery) -> None:
        """Add, replace, or remove *row*, depending on its state."""
        is_pending = row.state is DeliveryState.PENDING
        of_event = self.by_event.setdefault(row.event_key, {})
        _update(self.pending, row, belongs=is_pending)
        _update(self.urgent, row, belongs=is_pending and row.urgent)
        _update(of_event, row, belongs=is_pending)
        _update(self.parked, row, belongs=row.state is DeliveryState.PARKED)
        if not of_event:
            del self.by_event[row.event_key]

    def of_event(self, event_key: str) -> Iterable[Delivery]:
        """Return the pending rows of an event, ordered by sequence."""
        return self.by_event.get(event_key, {}).values()


def _update(rows: dict[int, Delivery], row: Delivery, *, belongs: bool) -> None:
    is_last = not rows or next(reversed(rows)) < row.sequence
    if not belongs:
        rows.pop(row.sequence, None)
    elif is_last or row.sequence in rows:
        rows[row.sequence] = row
    else:  # the row returns to its place between newer rows
        in_order = sorted({**rows, row.sequence: row}.items())
        rows.clear()
        rows.update(in_order)


class DueRows:
    """The rows that a sink can send now. They are valid only while `Outbox.select` runs."""

    def __init__(self, queue: SinkQueue, *, after: float, through: int) -> None:
        self._queue, self._after, self._through = queue, after, through

    def __iter__(self) -> Iterator[Delivery]:
        """Yield the urgent rows first, and then all other rows. Each group is ordered by sequence."""
        queue = self._queue
        normal = (row for row in queue.pending.values() if not row.urgent)
        return (row for row in chain(queue.urgent.values(), normal) if self._after < row.sequence <= self._through)

    def of_event(self, event_key: str) -> Iterator[Delivery]:
        """Return the due rows of an event, ordered by sequence."""
        return (row for row in self._queue.of_event(event_key) if self._after < row.sequence <= self._through)


class State:
    """All tables of the agent in memory."""

    def __init__(self) -> None:
        self.meta: _Table[str, MetaRow] = _Table(lambda row: row.key)
        self.events: _Table[str, EventRow] = _Table(lambda row: row.key)
        self.records: _Table[int, RecordRow] = _Table(lambda row: row.sequence)
        self.deliveries: _Table[tuple[int, str], Delivery] = _Table(lambda row: (row.sequence, row.sink))
        self.sinks: _Table[str, SinkRow] = _Table(lambda row: row.name)
        self.decisions: _Table[int, StoredDecision] = _Table(lambda row: row.arrival)
        self.approvals: _Table[EventVersion, PendingApproval] = _Table(lambda row: row.key)
        self.tables: dict[str, _Table[Any, Any]] = {
            name: table for name, table in vars(self).items() if isinstance(table, _Table)
        }
        self.queues: defaultdict[str, SinkQueue] = defaultdict(SinkQueue)
        self.needed_bytes = 0
        """The size of the bodies of all pending and parked records, in bytes."""
        self.loaded_through = 0
        """The last sequence that the agent's previous run used."""
        self._new_file_because: str | None = None

    def reset(self, reason: str) -> None:
        """Delete the complete state. The next save writes a new file and logs *reason*."""
        State.__init__(self)
        self._new_file_because = reason

    def load(self, rows: Mapping[str, Iterable[Any]]) -> None:
        """Load the rows of an outbox file.

        The method skips deliveries whose record is not in *rows*. Such a record is damaged or already history.
        """
        for name, table in self.tables.items():
            table.load(rows.get(name, ()))
        for key, delivery in list(self.deliveries.rows.items()):
            record = self.records.rows.get(delivery.sequence)
            if record is None:
                del self.deliveries.rows[key]
            else:
                shared = {"event_key": record.event_key, "body": record.body}
                self.deliveries.rows[key] = whole = msgspec.structs.replace(delivery, **shared)
                self.queues[delivery.sink].update(whole)
        self.needed_bytes = sum(len(row.body) for row in self.records.rows.values() if self._is_needed(row))
        for name in self.sinks.rows.keys() | self.queues.keys():  # rows of a damaged file can be missing
            row, queue = self.sinks.rows.get(name) or SinkRow(name=name), self.queues[name]
            counted = msgspec.structs.replace(row, pending=len(queue.pending), parked=len(queue.parked))
            if counted != row:
                self.sinks.put(counted)
        newest = max(self.records.rows, default=0)
        if self.next_sequence <= newest:
            self.put("next_sequence", str(newest + 1))
        self.loaded_through = self.next_sequence - 1

    def take_changes(self) -> Changes:
        """Return all changes since the last call."""
        tables = {name: table.take() for name, table in self.tables.items()}
        reason, self._new_file_because = self._new_file_because, None
        return Changes(through=self.next_sequence - 1, tables=tables, new_file_because=reason)

    def take_everything(self) -> Changes:
        """Return all rows for a new file."""
        self.take_changes()
        tables = {name: dict(table.rows) for name, table in self.tables.items()}
        return Changes(through=self.next_sequence - 1, tables=tables)

    def get(self, key: str) -> str | None:
        """Return a value of the `meta` table, or None."""
        row = self.meta.rows.get(key)
        return None if row is None else row.value

    def put(self, key: str, value: str | None) -> None:
        """Store a value in the `meta` table. If *value* is None, delete the row."""
        if value is None:
            self.meta.delete(key)
        elif self.get(key) != value:
            self.meta.put(MetaRow(key=key, value=value))

    @property
    def document(self) -> Document | None:
        """Return the tracked document, or None before the first document."""
        text = self.get("document")
        return None if text is None else decode_document(text)

    @property
    def vm(self) -> VmIdentity | None:
        """Return the identity of the machine that owns the state, or None if it was never known."""
        text = self.get("vm")
        return None if text is None else msgspec.json.decode(text, type=VmIdentity)

    @property
    def next_sequence(self) -> int:
        """Return the sequence of the next record."""
        return int(self.get("next_sequence") or 1)

    def put_delivery(self, row: Delivery) -> None:
        """Add or replace a delivery, and update the delivery counts of its sink."""
        record = self.records.rows.get(row.sequence)
        before = self.deliveries.rows.get((row.sequence, row.sink))
        self.needed_bytes -= self._needed_bytes(record)
        self.deliveries.put(row)
        self.queues[row.sink].update(row)
        self.needed_bytes += self._needed_bytes(record)
        if before is None:
            self.count(row.sink, **{row.state.value: 1})
        elif before.state is not row.state:
            self.count(row.sink, **{before.state.value: -1, row.state.value: 1})
        self.settle(row.sequence)

    def put_event(self, row: EventRow) -> None:
        """Add or replace an event, and remove its superseded records from memory."""
        before = self.events.rows.get(row.key)
        self.events.put(row)
        for sequence in sorted(before.references - row.references) if before is not None else ():
            self.settle(sequence)

    def settle(self, sequence: int) -> None:
        """Remove a record from memory if no sink and no active event needs it."""
        row = self.records.rows.get(sequence)
        if row is None or self._is_needed(row):
            return
        event = self.events.rows.get(row.event_key)
        if event is not None and sequence in event.references:
            return
        for delivery in self.deliveries_of(sequence):
            del self.deliveries.rows[sequence, delivery.sink]
        del self.records.rows[sequence]

    def deliveries_of(self, sequence: int) -> list[Delivery]:
        """Return the deliveries of a record."""
        rows = self.deliveries.rows
        return [rows[sequence, sink] for sink in self.queues if (sequence, sink) in rows]

    def _is_needed(self, row: RecordRow) -> bool:
        return any(delivery.state in NEEDED for delivery in self.deliveries_of(row.sequence))

    def _needed_bytes(self, row: RecordRow | None) -> int:
        return len(row.body) if row is not None and self._is_needed(row) else 0

    def count(self, sink: str, **changes: int) -> None:
        """Add *changes* to a sink's counts, which start at 0."""
        row = self.sinks.rows.get(sink) or SinkRow(name=sink)
        values = {name: getattr(row, name) + change for name, change in changes.items()}
        self.sinks.put(msgspec.structs.replace(row, **values))
