"""Selects the rows of one sink that go into its next request. Pure functions over the due rows.

The records of an event go strictly in sequence. While the first record of an event waits, the other records of this
event wait, and the records of other events continue. Records of Preempt and Terminate events (urgent) go first, because
`bridge.outbox.state.DueRows` returns their rows first.
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
    """True: a batch never mixes events."""
    alone: set[int] = set()
    """The sequences that are sent in a batch of their own, because a batch with them was rejected."""


def next_batch(
    rows: DueRows,
    schedule: RetrySchedule,
    now: float,
    *,
    batching: Batching,
    fresh_event: str | None = None,
    after: Collection[Delivery] = (),
) -> list[Delivery]:
    """Return the rows for the next request, or for the request after the rows in *after*; [] for none.

    *fresh_event* is the event to try in FRESH mode, which `RetrySchedule.take_fresh` returned.
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
    # A failing event goes alone: neither the failure of another event nor the size of a batch may count against it.
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
    """Return the first row of the event to try next: urgent, then with the fewest attempts, then the oldest.

    The number of attempts matters because an event that the sink never accepts must not use every probe. Only the first
    2,000 rows are compared, because a paused sink with an urgent record is probed every 2 s.
    """
    heads: dict[str, Delivery] = {}
    for row in islice((row for row in rows if row.event_key not in blocked), _MOST_PROBED):
        heads.setdefault(row.event_key, row)
    if not heads:
        return []
    return [min(heads.values(), key=lambda row: (not row.urgent, row.attempts, row.sequence))]


def new_rows(rows: Iterable[Delivery], after: int) -> tuple[list[Delivery], int]:
    """Return the rows with a sequence above *after* that were never tried, and the newest sequence."""
    newest, found = after, []
    for row in rows:
        if row.sequence > after:
            newest = max(newest, row.sequence)
            if row.attempts == 0:
                found.append(row)
    return found, newest
