"""One worker a sink: it sends that sink's rows, and nothing another sink does can delay it.

The worker decides what is sent when (`Schedule`), the `Sender` holds the deadline, the sink only sends. What became of
a record is written down while the next one is already on its way: a crash in between sends again with the same id,
which is promised (at least once), and a slow disk does not slow a backlog down.

An event's records go strictly in sequence: while one waits, the rest of its event waits; other events go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from random import random

from bridge.errors import DeliveryFailed, DeliveryRejected, OutboxError
from bridge.logs import Repeated
from bridge.metrics import SinkMetrics
from bridge.outbox import Outbox, Outcome, Owed
from bridge.record import parse_time
from bridge.rows import DELIVERED, PARKED
from bridge.schedule import Schedule, Turn
from bridge.sending import Sender
from bridge.sink import Sink, SinkConfig
from bridge.store import utc_now

logger = logging.getLogger(__name__)

_ROWS_AHEAD = 64
_EVENTS_AHEAD = 32
_MOST_UNSETTLED = 64
_REASON_CHARACTERS = 256
#: An idle worker looks by itself now and then, in case it was not told.
_LOOK_SECONDS = 60.0


class Worker:
    """Delivers to one sink, from `start` to `stop`."""

    def __init__(
        self,
        *,
        config: SinkConfig,
        sink_class: type[Sink],
        outbox: Outbox,
        metrics: SinkMetrics,
        now: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random,
    ) -> None:
        self.name = config.name
        self.config = config
        self._sink_class = sink_class
        self._outbox = outbox
        self._metrics = metrics
        self._now = now
        self._monotonic = monotonic
        self._sender = Sender(lambda: sink_class(config), name=config.name, timeout_seconds=config.timeout_seconds)
        self._schedule = Schedule(chance)
        self._report = Repeated(logger)
        self._news = threading.Event()
        self._was_nudged = False
        self._nudges = outbox.nudges(config.name).result()
        self._stop_at: float | None = None
        self._ahead: deque[Owed] = deque()
        self._singles: set[int] = set()
        self._unsettled: deque[tuple[Future[None], frozenset[int]]] = deque()
        self._unwritten: set[int] = set()
        self._seen = 0
        self._owes_urgent = False
        self._expired_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"delivery:{config.name}", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._news.set()
        self._thread.start()

    def notify(self) -> None:
        """Tell the worker that there may be new rows."""
        self._news.set()

    def nudge(self) -> None:
        """Tell the worker that a command has written to the outbox."""
        self._was_nudged = True
        self._news.set()

    def stop(self, *, grace_seconds: float) -> None:
        """Let the worker send what is due for *grace_seconds* more; returns at once, see `join`."""
        self._stop_at = self._monotonic() + grace_seconds
        self._news.set()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; return whether it came."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_time_to_stop():
            try:
                wait_seconds = self._turn()
            except Exception:
                logger.exception("The delivery worker failed; it goes on.", extra={"sink": self.name})
                wait_seconds = 1.0
            if wait_seconds > 0:
                if self._stop_at is not None:
                    break
                self._news.wait(min(wait_seconds, _LOOK_SECONDS))
        self._wait_until_settled(0)
        self._sender.close()

    def _is_time_to_stop(self) -> bool:
        return self._stop_at is not None and self._monotonic() >= self._stop_at

    def _turn(self) -> float:
        """Do one thing; return how many seconds there is nothing to do."""
        if self._news.is_set():
            self._news.clear()
            self._take_news()
        now = self._monotonic()
        batch = self._pick(self._schedule.turn(now, owes_urgent=self._owes_urgent), now)
        if batch:
            self._send(batch)
            return 0.0
        return self._schedule.next_at(owes_urgent=self._owes_urgent) - self._monotonic()

    def _take_news(self) -> None:
        self._ahead.clear()
        if self._was_nudged:
            self._was_nudged = False
            self._heed_nudges()
        if not self._schedule.is_troubled:
            return
        for row in self._outbox.due(self.name, limit=_ROWS_AHEAD, skip=self._in_flight(), after=self._seen).result():
            self._schedule.arrived(row.event_key)
            self._seen = max(self._seen, row.sequence)
            self._owes_urgent = self._owes_urgent or row.urgent

    def _heed_nudges(self) -> None:
        """Try everything at once when a person asked for this sink to be tried again."""
        before, self._nudges = self._nudges, self._outbox.nudges(self.name).result()
        if self._nudges != before:
            self._schedule.resume()

    # Choosing what to send.

    def _pick(self, turn: Turn, now: float) -> list[Owed]:
        if turn is Turn.WAIT:
            return []
        self._expire(now)
        if turn is Turn.ALL:
            return self._next_batch(now)
        only = None
        if turn is Turn.FRESH:
            only = [next(iter(self._schedule.fresh))]
            self._schedule.arrival_was_tried(only[0])
        rows = self._outbox.probe(self.name, skip=self._in_flight(), only=only).result()
        if not rows and turn is Turn.FRESH:
            return self._pick(self._schedule.turn(now, owes_urgent=self._owes_urgent), now)
        if not rows:
            self._schedule.resume()
        if turn is Turn.URGENT and rows and not rows[0].urgent:
            self._owes_urgent = False
            return []
        return rows

    def _next_batch(self, now: float) -> list[Owed]:
        if not self._ahead:
            per_event = self.config.max_batch if self._sink_class.batch_by_event else None
            rows = self._outbox.due(
                self.name,
                limit=_ROWS_AHEAD if per_event is None else _EVENTS_AHEAD,
                skip=self._in_flight(),
                blocked=self._schedule.blocked(now),
                per_event=per_event,
            ).result()
            self._ahead.extend(rows)
            if not rows:
                self._schedule.forget_past(now)
        batch: list[Owed] = []
        while self._ahead and self._may_join(self._ahead[0], batch):
            batch.append(self._ahead.popleft())
        return batch

    def _may_join(self, row: Owed, batch: list[Owed]) -> bool:
        if not batch:
            return True
        if len(batch) >= self.config.max_batch or row.sequence in self._singles or batch[0].sequence in self._singles:
            return False
        return not self._sink_class.batch_by_event or row.event_key == batch[0].event_key

    def _expire(self, now: float) -> None:
        if self.config.max_age_seconds is not None and now >= self._expired_at + 1.0:
            self._expired_at = now
            expired = self._outbox.expire(self.name, max_age_seconds=self.config.max_age_seconds).result()
            if expired:
                self._ahead.clear()
                logger.warning(
                    "Records were given up: they are older than max_age_seconds.",
                    extra={"sink": self.name, "expired": expired},
                )

    # Sending, and what became of it.

    def _send(self, batch: list[Owed]) -> None:
        self._seen = max(self._seen, self._outbox.last_sequence)
        started = self._monotonic()
        try:
            self._sender.send([row.record for row in batch])
        except DeliveryRejected as error:
            self._rejected(batch, error)
        except DeliveryFailed as error:
            self._failed(batch, error)
        except Exception as error:
            logger.debug("A sink raised something of its own.", exc_info=True)
            self._failed(batch, DeliveryFailed(f"{type(error).__name__}: {error}"))
        else:
            self._delivered(batch)
        self._metrics.sent(self._monotonic() - started)

    def _delivered(self, batch: list[Owed]) -> None:
        now = self._now()
        self._settle(batch, DELIVERED)
        for row in batch:
            self._metrics.delivered((now - parse_time(row.record.observed_at)).total_seconds())
        self._answered(batch)

    def _answered(self, batch: list[Owed]) -> None:
        for row in batch:
            self._schedule.answered(row.event_key)
        self._owes_urgent = False
        self._metrics.set_needs_attention(needed=False)
        self._report.recovered(self.name, "The sink takes records again.", sink=self.name)

    def _rejected(self, batch: list[Owed], error: DeliveryRejected) -> None:
        named = {getattr(record, "id", None) for record in error.records}
        refused = [row for row in batch if row.record.id in named]
        if not named and len(batch) == 1:
            refused = batch
        reason = str(error)[:_REASON_CHARACTERS]
        self._answered(batch)
        if refused:
            self._settle(refused, PARKED, reason)
            logger.error(
                "The sink refused records for good; they are parked. See `outbox list --state parked`.",
                extra={"sink": self.name, "records": [row.record.id for row in refused], "error": reason},
            )
        # Which of the others is to blame, if any, shows when each goes alone.
        self._singles.update(row.sequence for row in batch if row not in refused)
        self._ahead.clear()

    def _failed(self, batch: list[Owed], error: DeliveryFailed) -> None:
        reason = str(error)[:_REASON_CHARACTERS]
        self._settle(batch, None, reason)
        self._ahead.clear()
        self._metrics.retried(type(error.__cause__ or error).__name__)
        self._metrics.set_needs_attention(needed=error.needs_attention)
        level = logging.ERROR if error.needs_attention else logging.WARNING
        self._report.problem(self.name, level, f"Sending failed: {reason}", sink=self.name)
        self._reschedule(batch, error)

    def _reschedule(self, batch: list[Owed], error: DeliveryFailed) -> None:
        now, wall = self._monotonic(), self._now().timestamp()
        is_paused = False
        for event_key, rows in _by_event(batch):
            notices = [row.not_before - wall for row in rows if row.not_before is not None]
            is_paused |= self._schedule.failed(
                event_key,
                now,
                urgent=rows[0].urgent,
                seconds_to_not_before=min(notices, default=None),
                retry_after=error.retry_after,
                held=error.held,
            )
        self._owes_urgent, soonest = self._outbox.urgency(self.name).result()
        if is_paused:
            notice = None if soonest is None else soonest - wall
            self._schedule.pause(now, owes_urgent=self._owes_urgent, seconds_to_notice=notice)

    # Writing it down.

    def _settle(self, rows: Sequence[Owed], state: str | None, error: str | None = None) -> None:
        outcomes = [Outcome(sequence=row.sequence, state=state, error=error) for row in rows]
        sequences = frozenset(row.sequence for row in rows)
        if state is not None:
            self._singles -= sequences
        future = self._outbox.settle(self.name, outcomes)
        if state is None:
            future.result()
            return
        self._unsettled.append((future, sequences))
        self._wait_until_settled(_MOST_UNSETTLED)

    def _wait_until_settled(self, most: int) -> None:
        """Forget what is committed; wait until at most *most* commits are on their way."""
        while self._unsettled and (len(self._unsettled) > most or self._unsettled[0][0].done()):
            future, sequences = self._unsettled.popleft()
            try:
                future.result()
            except OutboxError as error:
                # Sent, but nobody will know: at least this agent does not send it over and over.
                self._unwritten |= sequences
                logger.error(  # noqa: TRY400  # the outbox has logged its traceback
                    "What became of records could not be written down; they come again after a restart.",
                    extra={"sink": self.name, "records": len(sequences), "error": str(error)},
                )

    def _in_flight(self) -> set[int]:
        self._wait_until_settled(_MOST_UNSETTLED)
        return self._unwritten.union(*(sequences for _, sequences in self._unsettled))


def _by_event(batch: Sequence[Owed]) -> list[tuple[str, list[Owed]]]:
    groups: dict[str, list[Owed]] = {}
    for row in batch:
        groups.setdefault(row.event_key, []).append(row)
    return list(groups.items())
