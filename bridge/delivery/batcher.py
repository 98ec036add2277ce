"""The batcher: finds the rows of one sink that go into its next request, as the retry schedule allows.

An event's records go strictly in sequence: while one waits, the rest of its event waits; other events go on. Rows are
read ahead, because a read waits for the commit that is under way, and the next ones are prefetched while the last of
them are being sent. While there is nothing to send, the outbox is asked to read what comes in the transaction that adds
it (`await_new_rows`), so that a record is sent two wake-ups of a thread sooner. What was read ahead is dropped whenever
something happens that could change the order: a new record, a failure, a delay that ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future

from bridge.delivery.results import ResultWriter
from bridge.delivery.retry_schedule import RetrySchedule, SendMode
from bridge.outbox import deliveries
from bridge.outbox.deliveries import PendingDelivery
from bridge.outbox.outbox import Outbox
from bridge.sink import SinkConfig

_ROWS_AHEAD = 64
_EVENTS_AHEAD = 32
#: About the bytes of records that one read brings, and one row more: a document may be of megabytes.
_CHARACTERS_AHEAD = 1024 * 1024
#: Reading keeps the outbox's thread from the poll; a batch may be smaller than `max_batch`.
_MOST_ROWS = 1_000
#: The next rows are prefetched when so much of what was read is left: one part of so many.
_REFILL_SHARE = 4
#: While the new records of one document are tried out of turn, the probes wait.
_MOST_NEW_RECORDS = 64


class Batcher:
    """Chooses batches for the sink with *config*; *batch_by_event*: a batch never mixes events."""

    def __init__(
        self,
        *,
        outbox: Outbox,
        results: ResultWriter,
        schedule: RetrySchedule,
        config: SinkConfig,
        batch_by_event: bool,
    ) -> None:
        self._outbox = outbox
        self._results = results
        self._schedule = schedule
        self._sink = config.name
        self._max_batch = min(config.max_batch, _MOST_ROWS)
        self._batch_by_event = batch_by_event
        self._per_event = self._max_batch if batch_by_event else None
        events = min(_EVENTS_AHEAD, max(1, 2 * _MOST_ROWS // self._max_batch))
        self._limit = events if batch_by_event else max(_ROWS_AHEAD, self._max_batch)
        self._ahead: deque[PendingDelivery] = deque()
        self._ahead_until = float("-inf")
        self._is_last_read = False
        """The outbox has no other row that may be sent before `_ahead_until`, unless something happens."""
        self._refill_below = 0
        self._prefetched: Future[list[PendingDelivery]] | None = None
        self._prefetched_until = float("-inf")
        self._awaited: Future[tuple[list[PendingDelivery], int]] | None = None
        self._alone: set[int] = set()
        self._noted_sequence = self._newest_sequence = outbox.records.last_sequence

    def next(self, now: float) -> tuple[SendMode, list[PendingDelivery]]:
        """Return the rows to send in one request, and in which mode; WAIT and nothing when none are due."""
        while (mode := self._schedule.mode(now)) is not SendMode.WAIT:
            batch = self._next_batch(now) if mode is SendMode.ALL else self._probe(mode, now)
            if batch:
                self._awaited = None  # what it leaves out is what was done with before
                return mode, batch
            self._schedule.nothing_pending(mode, now)
            if mode is SendMode.ALL:
                self._alone.clear()
                break
        return SendMode.WAIT, []

    def following(self) -> list[PendingDelivery]:
        """Return the rows that `next` will probably return after those of its last call, without taking them."""
        rows: list[PendingDelivery] = []
        failing = self._schedule.failing_events
        for row in self._ahead:
            if not self._may_join(row, rows, failing):
                break
            rows.append(row)
        return rows

    def drop_prefetch(self) -> None:
        """Drop what was read ahead."""
        self._ahead.clear()
        self._is_last_read = False
        self._prefetched = None

    def send_alone(self, sequences: Iterable[int]) -> None:
        """Put each of *sequences* into a batch of its own: a batch with them was rejected."""
        self._alone.update(sequences)
        self.drop_prefetch()

    def await_new_rows(self) -> None:
        """Have the next rows read as they are added: nothing is pending that may be sent.

        No row may be done with from here until they are used, or it would be sent again: `next` forgets them with each
        batch that it returns.
        """
        self._awaited = None
        if not self._schedule.is_troubled:
            self._awaited = self._outbox.read_when_added(
                self._sink,
                deliveries.due,
                self._sink,
                limit=self._limit,
                skip=self._results.unwritten,
                per_event=self._per_event,
                most_characters=_CHARACTERS_AHEAD,
            )

    def note_new_records(self, now: float, *, wall: float, by_command: bool = False) -> None:
        """Tell the schedule which records arrived since the last call; at most 64 of them are tried out of turn.

        *wall* is *now* by the wall clock, in seconds since 1970. *by_command*: another program may have changed what is
        pending.
        """
        self.drop_prefetch()
        awaited, self._awaited = self._awaited, None
        # One call behind: the newest sequence is known before its commit, and what is not committed cannot be read.
        after, self._noted_sequence = self._noted_sequence, self._newest_sequence
        self._newest_sequence = self._outbox.records.last_sequence
        if self._newest_sequence < after:
            after = self._noted_sequence = 0  # the outbox was started over, for another machine
            self._results.forget()
            awaited = None
        if not self._schedule.is_troubled:
            if awaited is not None and not by_command:
                self._take_awaited(awaited, now)
            return
        new_rows = self._outbox.read(
            deliveries.new_events, self._sink, limit=_MOST_NEW_RECORDS, skip=self._results.unwritten, after=after
        )
        for row in new_rows.result():
            ahead = None if row.not_before is None else row.not_before - wall
            self._schedule.record_arrived(row.event_key, now, urgent=row.urgent, seconds_to_not_before=ahead)

    def _take_awaited(self, awaited: Future[tuple[list[PendingDelivery], int]], now: float) -> None:
        """Take what was read as it was added, unless it was not, or more was added since."""
        if not awaited.done() or awaited.exception() is not None or self._schedule.last_send_failed:
            return
        rows, additions = awaited.result()
        if additions == self._outbox.additions:
            self._fill(rows, self._schedule.next_expiry(now))

    def _probe(self, mode: SendMode, now: float) -> list[PendingDelivery]:
        only: frozenset[str] | None = None
        blocked: Collection[str] = ()
        if mode is SendMode.FRESH:
            only = frozenset([self._schedule.take_fresh()])
        elif mode is SendMode.URGENT:
            blocked = self._schedule.urgent_blocked(now)
        else:
            blocked = self._schedule.urgent_failing
        rows = self._outbox.read(
            deliveries.probe, self._sink, skip=self._results.unwritten, blocked=frozenset(blocked), only=only
        ).result()
        return [] if mode is SendMode.URGENT and rows and not rows[0].urgent else rows

    def _next_batch(self, now: float) -> list[PendingDelivery]:
        is_exhausted = self._is_last_read and not self._ahead and now < self._ahead_until
        if is_exhausted:
            self._is_last_read = False  # true once: an idle worker reads now and then, in case it was not notified
        elif not self._ahead or now >= self._ahead_until:
            self._read_ahead(now)
        if self._prefetched is None and 0 < len(self._ahead) <= self._refill_below:
            self._prefetch(now)
        batch: list[PendingDelivery] = []
        failing = self._schedule.failing_events
        while self._ahead and self._may_join(self._ahead[0], batch, failing):
            batch.append(self._ahead.popleft())
        return batch

    def _prefetch(self, now: float) -> None:
        """Ask for the rows behind those at hand, so that they are there when these are sent."""
        at_hand = {row.sequence for row in self._ahead}
        self._prefetched_until = self._schedule.next_expiry(now)
        self._prefetched = self._read_due(self._schedule.blocked(now), at_hand)

    def _take_prefetched(self, now: float) -> None:
        prefetched, self._prefetched = self._prefetched, None
        is_late = now >= self._ahead_until or now >= self._prefetched_until
        if prefetched is not None and not is_late and not self._schedule.last_send_failed:
            self._fill(prefetched.result(), self._prefetched_until)

    def _fill(self, rows: list[PendingDelivery], until: float) -> None:
        self._ahead.extend(rows)
        self._ahead_until = until
        per_event = Counter(row.event_key for row in rows) if self._batch_by_event else None
        found = len(rows) if per_event is None else len(per_event)
        # Fewer than asked for: nothing is behind them, but for the rest of an event of which a whole batch was read.
        has_all_events = found < self._limit and sum(len(row.body) for row in rows) < _CHARACTERS_AHEAD
        self._refill_below = 0 if has_all_events else len(rows) // _REFILL_SHARE
        self._is_last_read = has_all_events and (
            per_event is None or max(per_event.values(), default=0) < self._max_batch
        )

    def _read_ahead(self, now: float) -> None:
        self._ahead.clear()
        self._take_prefetched(now)
        if self._ahead:
            return
        if self._schedule.last_send_failed:
            self._ahead.extend(self._read_due(self._schedule.failing_events).result())
            self._ahead_until, self._is_last_read, self._refill_below = now, False, 0
        if not self._ahead:
            self._fill(self._read_due(self._schedule.blocked(now)).result(), self._schedule.next_expiry(now))

    def _read_due(self, blocked: Collection[str], at_hand: Collection[int] = ()) -> Future[list[PendingDelivery]]:
        return self._outbox.read(
            deliveries.due,
            self._sink,
            limit=self._limit,
            skip=self._results.unwritten.union(at_hand),
            blocked=frozenset(blocked),
            per_event=self._per_event,
            most_characters=_CHARACTERS_AHEAD,
        )

    def _may_join(self, row: PendingDelivery, batch: list[PendingDelivery], failing: Collection[str]) -> bool:
        """Return whether *row* goes into the request of *batch*; what is rejected or failing goes alone.

        One record of a failing event: neither another event's failure nor the size of a batch may count against it.
        """
        if not batch:
            return True
        first = batch[0]
        if len(batch) >= self._max_batch or (self._batch_by_event and row.event_key != first.event_key):
            return False
        if self._alone and (row.sequence in self._alone or first.sequence in self._alone):
            return False
        return not failing or (row.event_key not in failing and first.event_key not in failing)
