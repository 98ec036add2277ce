"""Which of one sink's rows are sent next: the schedule's turn, answered from the outbox.

An event's records go strictly in sequence: while one waits, the rest of its event waits; other events go on. Rows are
read ahead, because a read waits for the commit that is under way, and the next ones are asked for while the last of
them are being sent. What was read or asked for is dropped whenever something happens that could change the order:
news, a failure, a delay that ends.
"""

from __future__ import annotations

from collections import deque
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
#: Reading keeps the outbox's thread from the poll; a batch may be smaller than `max_batch`.
_MOST_ROWS = 1_000
#: The next rows are asked for when so much of what was read is left: one part of so many.
_LOW_SHARE = 4
#: While one document's news is tried out of turn, the probes wait.
_MOST_NEWS = 64


class Batcher:
    """Chooses batches for the sink with *config*; *batch_by_event*: a batch never mixes events."""

    def __init__(
        self, *, outbox: Outbox, ledger: ResultWriter, schedule: RetrySchedule, config: SinkConfig, batch_by_event: bool
    ) -> None:
        self._outbox = outbox
        self._ledger = ledger
        self._schedule = schedule
        self._sink = config.name
        self._max_batch = min(config.max_batch, _MOST_ROWS)
        self._batch_by_event = batch_by_event
        events = min(_EVENTS_AHEAD, max(1, 2 * _MOST_ROWS // self._max_batch))
        self._limit = events if batch_by_event else max(_ROWS_AHEAD, self._max_batch)
        self._ahead: deque[PendingDelivery] = deque()
        self._ahead_until = float("-inf")
        self._low = 0
        self._coming: Future[list[PendingDelivery]] | None = None
        self._coming_until = float("-inf")
        self._alone: set[int] = set()
        self._news_after = self._newest = outbox.records.last_sequence

    def next(self, now: float) -> tuple[SendMode, list[PendingDelivery]]:
        """Return the rows to send in one request, and in whose turn; WAIT and nothing when none are due."""
        while (turn := self._schedule.turn(now)) is not SendMode.WAIT:
            batch = self._next_batch(now) if turn is SendMode.ALL else self._probe(turn, now)
            if batch:
                return turn, batch
            self._schedule.found_nothing(turn, now)
            if turn is SendMode.ALL:
                self._alone.clear()
                break
        return SendMode.WAIT, []

    def look_again(self) -> None:
        """Forget what was read ahead."""
        self._ahead.clear()
        self._coming = None

    def send_alone(self, sequences: Iterable[int]) -> None:
        """Put each of *sequences* into a batch of its own: a batch with them was rejected."""
        self._alone.update(sequences)
        self.look_again()

    def take_news(self, now: float) -> None:
        """Tell the schedule what arrived since the last news; at most 64 of it is tried out of turn."""
        self.look_again()
        # One news behind: the newest sequence is known before its commit, and what is not committed cannot be read.
        after, self._news_after = self._news_after, self._newest
        self._newest = self._outbox.records.last_sequence
        if self._newest < after:
            after = self._news_after = 0  # the outbox was started over, for another machine
            self._ledger.forget()
        if not self._schedule.is_troubled:
            return
        news = self._outbox.read(deliveries.due, self._sink, limit=_MOST_NEWS, skip=self._ledger.unwritten, after=after)
        for row in news.result():
            if row.attempts == 0:
                self._schedule.arrived(row.event_key, now, urgent=row.urgent)

    def _probe(self, turn: SendMode, now: float) -> list[PendingDelivery]:
        only: frozenset[str] | None = None
        blocked: Collection[str] = ()
        if turn is SendMode.FRESH:
            only = frozenset([self._schedule.take_fresh()])
        elif turn is SendMode.URGENT:
            blocked = self._schedule.urgent_blocked(now)
        else:
            blocked = self._schedule.urgent_suspects
        rows = self._outbox.read(
            deliveries.probe, self._sink, skip=self._ledger.unwritten, blocked=frozenset(blocked), only=only
        ).result()
        return [] if turn is SendMode.URGENT and rows and not rows[0].urgent else rows

    def _next_batch(self, now: float) -> list[PendingDelivery]:
        if not self._ahead or now >= self._ahead_until:
            self._read_ahead(now)
        if self._coming is None and 0 < len(self._ahead) <= self._low:
            self._ask_ahead(now)
        batch: list[PendingDelivery] = []
        while self._ahead and self._may_join(self._ahead[0], batch):
            batch.append(self._ahead.popleft())
        return batch

    def _ask_ahead(self, now: float) -> None:
        """Ask for the rows behind those at hand, to be there when these are sent."""
        at_hand = {row.sequence for row in self._ahead}
        self._coming_until = self._schedule.next_expiry(now)
        self._coming = self._ask(self._schedule.blocked(now), at_hand)

    def _take_coming(self, now: float) -> None:
        coming, self._coming = self._coming, None
        if coming is None or now >= self._ahead_until or now >= self._coming_until or self._schedule.is_doubtful:
            return
        self._fill(coming.result(), self._coming_until)

    def _fill(self, rows: list[PendingDelivery], until: float) -> None:
        self._ahead.extend(rows)
        self._ahead_until = until
        # Fewer than asked for: nothing is behind them, and nothing is to be asked for while they are sent.
        found = len({row.event_key for row in rows}) if self._batch_by_event else len(rows)
        self._low = len(rows) // _LOW_SHARE if found >= self._limit else 0

    def _read_ahead(self, now: float) -> None:
        self._ahead.clear()
        self._take_coming(now)
        if self._ahead:
            return
        if self._schedule.is_doubtful:
            self._ahead.extend(self._ask(self._schedule.suspects).result())
            self._ahead_until, self._low = now, 0
        if not self._ahead:
            self._fill(self._ask(self._schedule.blocked(now)).result(), self._schedule.next_expiry(now))

    def _ask(self, blocked: Collection[str], at_hand: Collection[int] = ()) -> Future[list[PendingDelivery]]:
        return self._outbox.read(
            deliveries.due,
            self._sink,
            limit=self._limit,
            skip=self._ledger.unwritten.union(at_hand),
            blocked=frozenset(blocked),
            per_event=self._max_batch if self._batch_by_event else None,
        )

    def _may_join(self, row: PendingDelivery, batch: list[PendingDelivery]) -> bool:
        if not batch:
            return True
        if len(batch) >= self._max_batch or self._goes_alone(row) or self._goes_alone(batch[0]):
            return False
        return not self._batch_by_event or row.event_key == batch[0].event_key

    def _goes_alone(self, row: PendingDelivery) -> bool:
        # One record of a suspect, so that neither another event's failure nor the size of a batch is held against it.
        return row.sequence in self._alone or row.event_key in self._schedule.suspects
