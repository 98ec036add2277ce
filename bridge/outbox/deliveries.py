"""What a delivery worker reads from the outbox, and writes back: functions over a store, on its thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import msgspec

from bridge.events.record import TransitionRecord, decode_record
from bridge.outbox.storage import SQL, Storage

DELIVERED, PARKED = "delivered", "parked"
Row = tuple[Any, ...]
#: How far a probe looks for the event tried least.
_MOST_PROBED = 2_000
STATES = ("accepted", "delivered", "pending", "parked", "expired", "evicted", "discarded")


class PendingDelivery(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A record that one sink is owed."""

    sequence: int
    event_key: str
    urgent: bool
    attempts: int
    not_before: float | None
    """Seconds since 1970."""
    body: str
    """The record as JSON, known to be sound."""

    @cached_property
    def record(self) -> TransitionRecord:
        """Return the record; read where it is used, because the outbox's thread has others to serve."""
        return decode_record(self.body)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one record at one sink: ``delivered``, ``parked``, or null when it was tried in vain."""

    sequence: int
    state: str | None
    error: str | None = None


def due(
    store: Storage,
    sink: str,
    limit: int,
    skip: frozenset[int],
    blocked: frozenset[str],
    *,
    after: int = 0,
    per_event: int | None = None,
) -> list[PendingDelivery]:
    """Return up to *limit* rows with a sequence above *after*, urgent events first, each event's in sequence.

    *per_event* is for sinks whose batches hold one event each: up to *limit* events, up to so many rows of each.
    """
    chosen: list[Row] = []
    events: set[str] = set()
    for row in store.connection.execute(SQL["due"], (sink, after)):
        if row[0] in skip or row[1] in blocked or (per_event is not None and row[1] in events):
            continue
        events.add(row[1])
        chosen.append(row)
        if len(chosen) == limit:
            break
    if per_event is not None:
        chosen = [row for head in chosen for row in islice(_rows_of(store, sink, head[1], skip), per_event)]
    return [_owed(store, row) for row in chosen]


def _rows_of(store: Storage, sink: str, event_key: str, skip: frozenset[int]) -> Iterator[Row]:
    rows = store.connection.execute(SQL["due_of_event"], (event_key, sink))
    return (row for row in rows if row[0] not in skip)


def probe(
    store: Storage, sink: str, skip: frozenset[int], blocked: frozenset[str], *, only: frozenset[str] | None = None
) -> list[PendingDelivery]:
    """Return the first record of the event to try next: urgent, then least often tried, then oldest; or nothing.

    By tries, so that an event that the sink never takes cannot keep every other from being the one that gets through.
    *only* limits the choice to these events.

    It looks at no more than the first 2,000 rows that may be tried: a paused sink with an urgent record is probed every
    2 s, and to walk a whole backlog each time would keep the one thread of the outbox, and a core, from all other work.
    What gets no turn by that: events behind 2,000 rows of others that the sink never takes, until news of them.
    """
    if only is None:
        rows: Iterator[Row] = (
            row
            for row in store.connection.execute(SQL["due"], (sink, 0))
            if row[0] not in skip and row[1] not in blocked
        )
    else:
        rows = (row for key in only - blocked for row in islice(_rows_of(store, sink, key, skip), 1))
    heads: dict[str, Row] = {}
    for row in islice(rows, _MOST_PROBED):
        heads.setdefault(row[1], row)
    if not heads:
        return []
    best = min(heads.values(), key=lambda row: (-row[4], row[2], row[0]))
    return [_owed(store, best)]


def _owed(store: Storage, row: Row) -> PendingDelivery:
    """Return *row* with its record; raise sqlite3.DatabaseError when that cannot be read: the file is damaged."""
    sequence, event_key, attempts, not_before, urgent, *body = row
    if not body:
        body = store.connection.execute(SQL["body"], (sequence,)).fetchone()
    text = body[0] if body else None
    if not text:
        raise sqlite3.DatabaseError(f"The outbox is malformed: record {sequence} cannot be read.")
    return PendingDelivery(
        sequence=sequence,
        event_key=event_key,
        urgent=bool(urgent),
        attempts=attempts,
        not_before=not_before,
        body=text,
    )


def settle(store: Storage, sink: str, outcomes: Sequence[Outcome], now: float) -> None:
    """Write *outcomes* down; a row that a person has discarded meanwhile stays as it is."""
    for (state, error), group in groupby(outcomes, key=lambda outcome: (outcome.state, outcome.error)):
        sequences = [outcome.sequence for outcome in group]
        if state is None:
            failures = [(error, now, sink, sequence) for sequence in sequences]
            store.connection.executemany(SQL["note_failure"], failures)
        else:
            # One statement, so that the interpreter's lock is free meanwhile for who is sending.
            numbers = msgspec.json.encode(sequences).decode()
            store.connection.execute(SQL["finish"], (state, error, 1, now, sink, numbers))


def expire(store: Storage, sink: str, now: float, max_age_seconds: float) -> int:
    """Give up on what is older than *max_age_seconds*; return how many rows."""
    return store.connection.execute(SQL["expire"], (now, sink, now - max_age_seconds)).rowcount


def urgency(store: Storage, sink: str, now: float) -> tuple[bool, float | None]:
    """Return whether an urgent row waits, and the soonest NotBefore still ahead."""
    urgent = store.connection.execute(SQL["has_urgent"], (sink,)).fetchone()
    (soonest,) = store.connection.execute(SQL["soonest_notice"], (sink, now)).fetchone()
    return bool(urgent and urgent[0]), soonest


def nudges(store: Storage, sink: str) -> int:
    """Return how often a person asked to try *sink* again."""
    row = store.connection.execute(SQL["nudges"], (sink,)).fetchone()
    return 0 if row is None else int(row[0])


def last_record(store: Storage, event_key: str) -> TransitionRecord | None:
    """Return the last record of an event that has its sinks, null when there is none."""
    row = store.connection.execute(SQL["last_of_event"], (event_key,)).fetchone()
    return None if row is None else decode_record(row[0])


def totals(store: Storage) -> dict[str, dict[str, int]]:
    """Return sink -> total by state, accepted included."""
    return {name: dict(zip(STATES, counts, strict=True)) for name, *counts in store.connection.execute(SQL["totals"])}


class OutboxTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the outbox holds, all from one commit."""

    totals: dict[str, dict[str, int]]
    """Sink -> total by state, accepted included."""
    oldest_pending: dict[str, float | None]
    """Sink -> when its oldest pending row was observed, in seconds since 1970."""
    used_bytes: int
    max_bytes: int
    in_memory: bool
    set_aside: int
    """How many databases were set aside since the start."""
    stream_id: str | None


def account(store: Storage) -> OutboxTotals:
    """Return what *store* holds."""
    held = totals(store)
    return OutboxTotals(
        totals=held,
        oldest_pending={name: oldest_pending(store, name) for name in held},
        used_bytes=store.used_bytes,
        max_bytes=store.max_bytes,
        in_memory=store.in_memory,
        set_aside=store.set_aside_count,
        stream_id=store.meta.get("stream_id"),
    )


def oldest_pending(store: Storage, sink: str) -> float | None:
    """Return when the oldest row that *sink* is owed was observed, in seconds since 1970."""
    (moment,) = store.connection.execute(SQL["oldest_pending"], (sink,)).fetchone()
    return None if moment is None else float(moment)
