"""Selects the records for the next request to a sink. Urgent records come first.

The agent sends Preempt and Terminate records before all others, because Azure gives only 30 seconds of notice before a
Preempt. `bridge.outbox.state.DueRows` therefore returns their rows first. The records of one event are sent strictly in
the order of their sequence. While the first record of an event waits for a retry, the other records of this event also
wait, and the records of other events continue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

import msgspec

from bridge.delivery.retry_schedule import RetrySchedule, SendMode
from bridge.outbox.rows import Delivery
from bridge.outbox.state import DueRows

_MOST_PROBED = 2_000


class Batching(msgspec.Struct, kw_only=True):
    """The limits of a batch."""

    max_batch: int
    by_event: bool
    """True if each batch contains records of only one event."""
    alone: set[int] = set()
    """The sequences of the records from a rejected batch. The agent sends these records one by one."""


def next_batch(
    rows: DueRows,
    schedule: RetrySchedule,
    now: float,
    *,
    batching: Batching,
    fresh_event: str | None = None,
    after: Collection[Delivery] = (),
) -> list[Delivery]:
    """Return the rows for the next request, or [] if no row is due.

    *after* contains the rows of the previous request, which are left out. If *fresh_event* is set, it is the key of an
    event, and the request contains only the first row of this event.
    """
    if fresh_event is not None:
        return list(rows.of_event(fresh_event))[:1]
    mode = schedule.mode(now)
    if mode is SendMode.ALL:
        return _batch(rows, schedule, now, batching=batching, taken={row.sequence for row in after})
    if mode is SendMode.URGENT:
        return [row for row in _probe(rows, schedule.urgent_blocked(now)) if row.urgent]
    return [] if mode is SendMode.WAIT else _probe(rows, schedule.urgent_failing)


def _batch(
    rows: DueRows, schedule: RetrySchedule, now: float, *, batching: Batching, taken: set[int]
) -> list[Delivery]:
    failing = schedule.failing_events
    blocked = schedule.blocked(now) if failing else ()
    first = _first(rows, failing, taken) if schedule.last_send_failed else None
    first = first or _first(rows, blocked, taken)
    if first is None:
        return []
    # Send a failing event alone, so that its next result does not depend on other events.
    if batching.max_batch == 1 or first.sequence in batching.alone or first.event_key in failing:
        return [first]
    batch = [first]
    taken.add(first.sequence)
    for row in rows.of_event(first.event_key) if batching.by_event else rows:
        if row.sequence in taken or row.event_key in blocked:
            continue
        if row.sequence in batching.alone or row.event_key in failing or len(batch) == batching.max_batch:
            break
        batch.append(row)
    return batch


def _first(rows: Iterable[Delivery], blocked: Collection[str], taken: Collection[int]) -> Delivery | None:
    return next((row for row in rows if row.event_key not in blocked and row.sequence not in taken), None)


def _probe(rows: Iterable[Delivery], blocked: Collection[str]) -> list[Delivery]:
    """Return the row for the next probe: urgent first, then fewest attempts, then oldest.

    The function prefers rows with fewer attempts, so that an event that always fails does not block the other events.
    To stay fast, it considers only the first 2,000 rows.
    """
    heads: dict[str, Delivery] = {}
    for row in islice((row for row in rows if row.event_key not in blocked), _MOST_PROBED):
        heads.setdefault(row.event_key, row)
    if not heads:
        return []
    return [min(heads.values(), key=lambda row: (not row.urgent, row.attempts, row.sequence))]


def new_rows(rows: Iterable[Delivery], *, after: int) -> list[Delivery]:
    """Return the untried rows with a sequence above *after*."""
    return [row for row in rows if row.sequence > after and row.attempts == 0]
