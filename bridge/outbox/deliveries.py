"""What the delivery engine reads from the outbox and writes back: functions over a connection, on its thread.

A delivery is one record for one sink. It is pending until the sink has accepted it (delivered), has refused it for good
(parked), or it was given up (expired, evicted, discarded). What each sink has accepted, delivered and still has to get
is its `SinkAccount`.

Start marks say which events a sink that disturbs people or workloads may have heard of: it must also be told their end.
Such a sink (`Sink.skips_what_is_over`) is not sent an event of which nothing has reached it when the end is already
known: nobody is paged, and nothing drained, for what is over. Skipping is only safe while surely nothing arrived, so
before each send the event is marked, in a commit of its own, and the mark is taken away only when the peer surely did
not take the record. A crash or a timeout leaves the mark: the end is sent then, of an event that perhaps never began.
Only what is over is skipped: what came back after its end is sent, and so is an end alone, for sinks that want nothing
but ends. From memory nothing is skipped: there not all marks are known.

Once the end is pending, of an event that began too, the rows before it that the sink does not need beside it
(`Sink.superseded_by_end`) are given up one by one.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import msgspec

from bridge.events.event import decode_document
from bridge.events.record import TransitionRecord, decode_record
from bridge.outbox import meta
from bridge.outbox.database import SQL, is_in_memory, used_bytes

Row = tuple[Any, ...]
#: The key of the digest of a sink's configuration, but for the sink's name.
_ACCEPTED_UNDER = "accepted_under:"
#: The key of how many records expired because their event was over, but for the sink's name.
_EVENT_OVER = "expired_event_over:"
#: How far a probe looks for the event tried least.
_MOST_PROBED = 2_000


class DeliveryState(str, Enum):
    """What became of one record at one sink; the words are stored."""

    PENDING = "pending"
    DELIVERED = "delivered"
    PARKED = "parked"
    EXPIRED = "expired"
    EVICTED = "evicted"
    DISCARDED = "discarded"


class PendingDelivery(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A record that one sink still has to get."""

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
        """Return the record; decoded where it is used, because the outbox's thread has others to serve."""
        return decode_record(self.body)


class NewDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """What of a new record decides when it is tried."""

    event_key: str
    urgent: bool
    not_before: float | None
    """Seconds since 1970."""


class DeliveryResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one record at one sink: delivered, parked, or None when it was tried in vain."""

    sequence: int
    state: DeliveryState | None
    error: str | None = None


class StartMark(msgspec.Struct, frozen=True, kw_only=True):
    """What `mark_started` found."""

    skipped: int = 0
    """How many rows were given up, because the event is over and never began; nothing is to be sent then."""
    is_new: bool = False
    """True when nothing of the event had been tried before: a sure failure of this try takes the mark away."""
    last_end: int | None = None
    """The sequence of the last end of the event that is pending; None when none is."""


class SinkAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What one sink has accepted, and what became of it: accepted is the sum of the other six counts."""

    accepted: int = 0
    delivered: int = 0
    pending: int = 0
    parked: int = 0
    expired: int = 0
    evicted: int = 0
    discarded: int = 0

    def count(self, state: DeliveryState) -> int:
        """Return how many records are in *state*."""
        return int(getattr(self, state.value))


class OutboxTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Every sink's account, and how full the outbox is, all from one commit."""

    sinks: dict[str, SinkAccount] = {}
    event_over: dict[str, int] = {}
    """By sink, how many of the expired were given up because their event was over; the others were too old."""
    oldest_pending_at: dict[str, float] = {}
    """By sink, when its oldest pending record was observed, in seconds since 1970."""
    used_bytes: int = 0
    stream_id: str | None = None

    def oldest_pending_seconds(self, sink: str, now: float) -> float:
        """Return how long the oldest pending record of *sink* has waited at *now*; 0 when none is pending."""
        return max(now - self.oldest_pending_at.get(sink, now), 0.0)


def due(
    connection: sqlite3.Connection,
    sink: str,
    *,
    limit: int,
    skip: frozenset[int] = frozenset(),
    blocked: frozenset[str] = frozenset(),
    after: int = 0,
    per_event: int | None = None,
    most_characters: float = math.inf,
) -> list[PendingDelivery]:
    """Return up to *limit* rows pending for *sink*, urgent events first, each event's in sequence.

    Rows in *skip* (sequences), rows up to *after* (a sequence) and events in *blocked* (event keys) are left out.
    *per_event* is for sinks whose batches hold one event each: up to *limit* events, up to so many rows of each.
    What is returned ends with the row that brings its records to *most_characters*.
    """
    rows = _due_rows(connection, sink, skip=skip, blocked=blocked, after=after)
    chosen: Iterator[Row] = islice(rows, limit)
    if per_event is not None:
        # Read to its end before the rows of each event are.
        heads = list(islice(_first_of_each_event(rows), limit))
        chosen = (row for head in heads for row in islice(_rows_of(connection, sink, head[1], skip), per_event))
    found: list[PendingDelivery] = []
    characters = 0
    for row in chosen:
        found.append(_pending(connection, row))
        characters += len(found[-1].body)
        if characters >= most_characters:
            break
    return found


def new_events(
    connection: sqlite3.Connection, sink: str, *, limit: int, skip: frozenset[int], after: int
) -> list[NewDelivery]:
    """Return what is pending for *sink* since *after* (a sequence) and was never tried, without the records."""
    rows = islice(_due_rows(connection, sink, skip=skip, after=after), limit)
    return [
        NewDelivery(event_key=event_key, urgent=bool(urgent), not_before=not_before)
        for _, event_key, attempts, not_before, urgent in rows
        if attempts == 0
    ]


def _due_rows(
    connection: sqlite3.Connection,
    sink: str,
    *,
    skip: frozenset[int],
    blocked: frozenset[str] = frozenset(),
    after: int = 0,
) -> Iterator[Row]:
    rows = connection.execute(SQL["due"], (sink, after))
    return (row for row in rows if row[0] not in skip and row[1] not in blocked)


def _first_of_each_event(rows: Iterable[Row]) -> Iterator[Row]:
    events: set[str] = set()
    for row in rows:
        if row[1] not in events:
            events.add(row[1])
            yield row


def _rows_of(connection: sqlite3.Connection, sink: str, event_key: str, skip: frozenset[int]) -> Iterator[Row]:
    rows = connection.execute(SQL["due_of_event"], (event_key, sink))
    return (row for row in rows if row[0] not in skip)


def probe(
    connection: sqlite3.Connection,
    sink: str,
    *,
    skip: frozenset[int] = frozenset(),
    blocked: frozenset[str] = frozenset(),
    only: frozenset[str] | None = None,
) -> list[PendingDelivery]:
    """Return the first record of the event to try next: urgent, then least often tried, then oldest; or nothing.

    By tries, so that an event that the sink never takes cannot keep every other from being the one that gets through.
    *only* limits the choice to these events.

    It looks at no more than the first 2,000 rows that may be tried: a paused sink with an urgent record is probed every
    2 s, and to walk a whole backlog each time would keep the one thread of the outbox, and a core, from all other work.
    What gets no turn by that: events behind 2,000 rows of others that the sink never takes, until news of them.
    """
    if only is None:
        rows = _due_rows(connection, sink, skip=skip, blocked=blocked)
    else:
        rows = (row for key in only - blocked for row in islice(_rows_of(connection, sink, key, skip), 1))
    heads: dict[str, Row] = {}
    for row in islice(rows, _MOST_PROBED):
        heads.setdefault(row[1], row)
    if not heads:
        return []
    best = min(heads.values(), key=lambda row: (-row[4], row[2], row[0]))
    return [_pending(connection, best)]


def _pending(connection: sqlite3.Connection, row: Row) -> PendingDelivery:
    """Return *row* with its record; raise sqlite3.DatabaseError when that cannot be read: the file is damaged."""
    sequence, event_key, attempts, not_before, urgent, *body = row
    if not body:
        body = connection.execute(SQL["body"], (sequence,)).fetchone()
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


def record_results(
    connection: sqlite3.Connection,
    sink: str,
    results: Sequence[DeliveryResult],
    *,
    now: float,
    accepted_under: str | None = None,
) -> None:
    """Write *results* down; a row that a person has discarded meanwhile stays as it is.

    *accepted_under* is the digest of the configuration under which the destination took something for the first time.
    """
    if accepted_under is not None:
        connection.execute(SQL["put_meta"], (f"{_ACCEPTED_UNDER}{sink}", accepted_under))
    for (state, error), group in groupby(results, key=lambda result: (result.state, result.error)):
        sequences = [result.sequence for result in group]
        if state is None:
            failures = [(error, now, sink, sequence) for sequence in sequences]
            connection.executemany(SQL["note_failure"], failures)
        else:
            # One statement, so that the interpreter's lock is free meanwhile for the thread that sends.
            numbers = msgspec.json.encode(sequences).decode()
            finished = connection.execute(SQL["finish"], (state.value, error, 1, now, sink, numbers)).rowcount
            if state is DeliveryState.EXPIRED:  # what is too old expires by `expire`
                _count_event_over(connection, sink, finished)


def note_delivered(connection: sqlite3.Connection, sink: str, sequence: int, *, now: float) -> None:
    """Count one record as delivered to *sink*, if it is pending there."""
    delivered = DeliveryResult(sequence=sequence, state=DeliveryState.DELIVERED)
    record_results(connection, sink, [delivered], now=now)


def expire(connection: sqlite3.Connection, sink: str, *, now: float, max_age_seconds: float) -> int:
    """Give up on what is older than *max_age_seconds*; return how many rows."""
    return connection.execute(SQL["expire"], (now, sink, now - max_age_seconds)).rowcount


def shift_ages(connection: sqlite3.Connection, seconds: float) -> None:
    """Move the times from which pending rows age by *seconds*: the clock that they are compared with moves too."""
    connection.execute(SQL["shift_ages"], (seconds,))


def urgency(connection: sqlite3.Connection, sink: str, *, now: float) -> tuple[bool, float | None]:
    """Return whether an urgent row is pending, and the soonest NotBefore still ahead (seconds since 1970)."""
    urgent = connection.execute(SQL["has_urgent"], (sink,)).fetchone()
    (soonest,) = connection.execute(SQL["soonest_notice"], (sink, now)).fetchone()
    return bool(urgent and urgent[0]), soonest


def soonest_notices(
    connection: sqlite3.Connection, sink: str, *, now: float, events: Iterable[str]
) -> dict[str, float]:
    """Return event key -> its soonest NotBefore still ahead, for those of *events* that have one.

    Any record counts that the event has pending: a record waits for those before it.
    """
    found = {key: connection.execute(SQL["soonest_notice_of_event"], (key, sink, now)).fetchone()[0] for key in events}
    return {key: not_before for key, not_before in found.items() if not_before is not None}


def retry_requests(connection: sqlite3.Connection, sink: str) -> int:
    """Return how often a person asked to try *sink* again."""
    row = connection.execute(SQL["retry_requests"], (sink,)).fetchone()
    return 0 if row is None else int(row[0])


def retry(connection: sqlite3.Connection, sink: str | None, *, record_id: str | None, now: float) -> int:
    """Make parked rows pending again, and ask for a try at once; return how many rows. A *sink* of None: every sink.

    With *record_id* only that record is tried again.
    """
    names = [sink] if sink is not None else [name for (name,) in connection.execute(SQL["known_sinks"])]
    count = 0
    for name in names:
        moved = connection.execute(SQL["retry"], {"sink": name, "id": record_id, "now": now}).rowcount
        count += moved
        if moved or sink is not None or record_id is None:
            connection.execute(SQL["request_retry"], (name,))
    # A record that comes back joins its event, which may have become urgent meanwhile.
    connection.execute(SQL["align_urgency"])
    return count


def unpark(connection: sqlite3.Connection, sink: str, sequences: Collection[int], *, now: float) -> None:
    """Make rows pending again that were parked in error: they keep their age, and their place in their event."""
    connection.execute(SQL["unpark"], (now, sink, msgspec.json.encode(list(sequences)).decode()))
    connection.execute(SQL["align_urgency"])


def configuration_accepted(connection: sqlite3.Connection, sink: str) -> str | None:
    """Return the digest of the configuration under which the destination of *sink* took something last."""
    return meta.get(connection, f"{_ACCEPTED_UNDER}{sink}")


def discard(connection: sqlite3.Connection, sink: str, *, state: str | None, record_id: str | None, now: float) -> int:
    """Give up on what is pending and parked for *sink*, or in one *state*, or one record; return how many rows."""
    arguments = {"sink": sink, "state": state, "id": record_id, "now": now}
    return connection.execute(SQL["discard"], arguments).rowcount


def last_record(connection: sqlite3.Connection, event_key: str) -> TransitionRecord | None:
    """Return the last record of an event that has its sinks, None when there is none."""
    row = connection.execute(SQL["last_of_event"], (event_key,)).fetchone()
    return None if row is None else decode_record(row[0])


def accounts(connection: sqlite3.Connection) -> dict[str, SinkAccount]:
    """Return sink -> its account, sinks that are no longer configured included."""
    rows = connection.execute(SQL["totals"]).fetchall()
    return {
        name: SinkAccount(**dict(zip(SinkAccount.__struct_fields__, counts, strict=True))) for name, *counts in rows
    }


def oldest_pending(connection: sqlite3.Connection) -> dict[str, float]:
    """Return sink -> when its oldest pending record was observed, for each sink that has one."""
    sinks = [sink for (sink,) in connection.execute(SQL["known_sinks"])]
    found = {sink: connection.execute(SQL["oldest_pending"], (sink,)).fetchone()[0] for sink in sinks}
    return {sink: moment for sink, moment in found.items() if moment is not None}


def event_over(connection: sqlite3.Connection, expired: Mapping[str, int]) -> dict[str, int]:
    """Return sink -> how many of its *expired* records were given up because their event was over."""
    found = {sink: meta.get(connection, f"{_EVENT_OVER}{sink}") or "" for sink in expired}
    return {sink: min(int(text), expired[sink]) if text.isdecimal() else 0 for sink, text in found.items()}


def _count_event_over(connection: sqlite3.Connection, sink: str, records: int) -> None:
    before = meta.get(connection, f"{_EVENT_OVER}{sink}") or ""
    meta.put(connection, f"{_EVENT_OVER}{sink}", str((int(before) if before.isdecimal() else 0) + records))


def totals(connection: sqlite3.Connection) -> OutboxTotals:
    """Return every sink's account, and how full the outbox is."""
    sinks = accounts(connection)
    return OutboxTotals(
        sinks=sinks,
        event_over=event_over(connection, {name: account.expired for name, account in sinks.items()}),
        oldest_pending_at=oldest_pending(connection),
        used_bytes=used_bytes(connection),
        stream_id=meta.get(connection, "stream_id"),
    )


def supersede(connection: sqlite3.Connection, sink: str, event_key: str, *, now: float) -> None:
    """Give up what *sink* is owed of the event: it was told later news of it, which this would undo."""
    last = connection.execute(SQL["last_record"]).fetchone()[0] or 0
    skipped = connection.execute(SQL["expire_event"], (now, event_key, sink, last)).rowcount
    _count_event_over(connection, sink, skipped)


def mark_started(connection: sqlite3.Connection, sink: str, event_key: str, *, now: float) -> StartMark:
    """Mark that *sink* is about to be sent something of the event, or give the event up because it is over."""
    end = None if is_in_memory(connection) else _end_of_what_never_began(connection, sink, event_key)
    if end is not None:
        skipped = connection.execute(SQL["expire_event"], (now, event_key, sink, end)).rowcount
        _count_event_over(connection, sink, skipped)
        return StartMark(skipped=skipped)
    marked = connection.execute(SQL["add_start_mark"], (sink, event_key)).rowcount
    (last_end,) = connection.execute(SQL["last_pending_end"], (event_key, sink)).fetchone()
    return StartMark(is_new=marked == 1, last_end=last_end)


def clear_started(connection: sqlite3.Connection, sink: str, event_key: str) -> None:
    """Take the mark away: nothing of the event reached *sink*, or it knows the end."""
    connection.execute(SQL["drop_start_mark"], (sink, event_key))


def clean_start_marks(connection: sqlite3.Connection) -> None:
    """Take away the marks of events that are neither active nor pending."""
    text = meta.get(connection, "document")
    active = {event.key for event in decode_document(text).events} if text is not None else set()
    for sink, event_key in connection.execute(SQL["idle_start_marks"]).fetchall():
        if event_key not in active:
            clear_started(connection, sink, event_key)


def _end_of_what_never_began(connection: sqlite3.Connection, sink: str, event_key: str) -> int | None:
    """Return the sequence up to which the event is over, its end included; None when it began or is not over.

    An event may come back after an end that was inferred: what follows its last end is news.
    """
    if connection.execute(SQL["is_started"], (sink, event_key, sink, event_key)).fetchone():
        return None
    last_end, began = None, False
    for sequence, body in connection.execute(SQL["pending_bodies"], (event_key, sink)):
        if not decode_record(body).transition.is_ending:
            began = True
        elif began:
            last_end = sequence
    return last_end
