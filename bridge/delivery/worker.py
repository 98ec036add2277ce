"""The delivery worker sends the pending records of one sink.

Each sink has one worker, so a slow sink does not delay the other sinks. `RetrySchedule` decides when the worker sends,
`next_batch` selects the records, and `Sender` enforces the deadline. The worker saves the results, and reports failures
in the log and in metrics.

The delivery loop runs on the sink's thread (`SinkThread`), while the worker's own thread enforces the deadline of each
call. If a call hangs, the worker's thread handles the failure and restarts the loop on a new thread. The two threads
never use the worker's state at the same time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from bridge.clock import REAL_CLOCK, Clock, parse_time
from bridge.config.settings import SinkSettings
from bridge.delivery.batcher import Batching, new_rows, next_batch
from bridge.delivery.refusals import Refusals, configuration_digest
from bridge.delivery.retry_schedule import FailedEvent, RetrySchedule, SendMode
from bridge.delivery.sender import Sender, SinkThread
from bridge.errors import DeliveryFailed, DeliveryRejected
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import SinkMetrics
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import Delivery, DeliveryState
from bridge.outbox.state import DueRows, State
from bridge.sink import AttestedTokens, Sink
from bridge.system.threads import LoopWatch

logger = logging.getLogger(__name__)

_REASON_CHARACTERS = 256
_IDLE_WAIT_SECONDS = 60.0
_FAULT_SECONDS = 1.0
_NO_DOCUMENT_SECONDS = 1.0
_SPREAD_SHARE = 0.1
#: The most events with new records that the worker tries before the next probe.
_MOST_NEW_EVENTS = 64
_NEVER = float("inf")
_ENDPOINT_REFUSES = (
    "The endpoint has accepted nothing since the configuration changed, or it rejects different events in a row. "
    "Therefore, nothing is parked. Check the URL and the credentials. To park these records anyway, set park_statuses."
)


class DeliveryWorker:
    """Sends records to one sink until `stop` is called.

    *attested* provides the access tokens that an ops portal issues for this VM.
    """

    def __init__(
        self,
        settings: SinkSettings,
        *,
        outbox: Outbox,
        metrics: SinkMetrics,
        clock: Clock = REAL_CLOCK,
        has_seen_document: Callable[[], bool] = lambda: True,
        attested: AttestedTokens | None = None,
    ) -> None:
        config, sink_class = settings.config, settings.sink_class
        self.settings, self.config, self.name = settings, config, config.name
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self.loop_watch = LoopWatch(clock)
        self._sender = Sender(
            partial(settings.build, attested),
            name=config.name,
            timeout_seconds=config.timeout_seconds,
            configuration=partial(configuration_digest, settings),
        )
        self._schedule = RetrySchedule(clock.random)
        self._batching = Batching(max_batch=config.max_batch, by_event=sink_class.batch_by_event)
        self._batch_size = 0
        self._prepares_next = sink_class.prepare_next is not Sink.prepare_next
        self._needs_warm_up = sink_class.warm_up is not Sink.warm_up
        self._has_seen_document = has_seen_document
        every_seconds = sink_class.refresh_seconds(config)
        # All VMs of a fleet get an event in the same second, but their refreshes must not coincide.
        self._refresh_seconds = None if every_seconds is None else every_seconds * (1 - _SPREAD_SHARE * clock.random())
        totals = outbox.read(deliveries.totals).sinks.get(config.name)
        self._refusals = Refusals(accepted_under=None if totals is None else totals.accepted_under)
        self._report = ThrottledLog(logger, clock=clock)
        self._woken = threading.Event()
        self._is_resumed = False
        self._seen_through = 0
        """The sequence of the newest record that the schedule knows. Used only while sends fail."""
        self._expired_at = float("-inf")
        self._send_began_at = 0.0
        self._in_flight: tuple[list[Delivery], SendMode] | None = None
        self._stop_at: float | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"delivery:{config.name}", daemon=True)

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def notify(self) -> None:
        """Wake the worker, because new rows might exist."""
        self._woken.set()

    def resume(self) -> None:
        """End the sink's pause, even one caused by status 410."""
        self._is_resumed = True
        self._woken.set()

    def stop(self, *, grace_seconds: float) -> None:
        """Let the worker continue for *grace_seconds*. This method returns immediately."""
        self._stop_at = self._clock.monotonic() + grace_seconds
        self._woken.set()

    def cut(self) -> None:
        """Cancel the current send, and do not start another one. The records stay pending."""
        self._sender.cut()

    def join(self, timeout_seconds: float) -> bool:
        """Wait up to *timeout_seconds*. Return whether the worker has ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # On the worker's own thread.

    def _run(self) -> None:
        while not self._is_over and not self._is_time_to_stop():
            try:
                self._sender.run(self._deliver)
            except DeliveryFailed as error:
                self._no_result(error)
        self.loop_watch.idle()
        self._sender.close()

    def _no_result(self, error: DeliveryFailed) -> None:
        if self._in_flight is not None:
            batch, mode = self._in_flight
            self._end_send()
            try:
                self._failed(batch, mode, error)
            except Exception as fault:  # noqa: BLE001  # logged with its traceback, once
                self._report_fault(fault)
        elif self._stop_at is None:
            self._note_failure(error)
            self.loop_watch.expect_within(_FAULT_SECONDS)
            self._woken.wait(_FAULT_SECONDS)
        else:
            self._is_over = True
        self._woken.set()

    def _is_time_to_stop(self) -> bool:
        return self._stop_at is not None and self._clock.monotonic() >= self._stop_at

    def _report_fault(self, error: Exception) -> None:
        message = f"The delivery worker failed and continues. {type(error).__name__}: {error}"
        kind = repr(type(error))
        self._report.problem("worker", logging.ERROR, message, kind=kind, exc_info=error, sink=self.name)

    # The loop, on the thread of the sink.

    def _deliver(self, thread: SinkThread) -> None:
        while not self._is_time_to_stop():
            self.loop_watch.expect_call_within(self.config.timeout_seconds)
            try:
                wait_seconds = self._run_once(thread)
            except Exception as error:  # noqa: BLE001  # logged with its traceback, once
                self._report_fault(error)
                wait_seconds = _FAULT_SECONDS
            if wait_seconds > 0:
                if self._stop_at is not None and self._outbox.seconds_to_due() == _NEVER:
                    break
                self.loop_watch.expect_within(wait_seconds)
                self._woken.wait(wait_seconds)
        self._is_over = True

    def _run_once(self, thread: SinkThread) -> float:
        """Send one batch, and return the seconds to wait."""
        now = self._clock.monotonic()
        is_woken = self._woken.is_set()
        self._woken.clear()
        if self._is_resumed:
            self._is_resumed = False
            self._schedule.resume()
        self._expire(now)
        if is_woken and self._schedule.is_troubled:
            self._note_new_rows(now)
        mode, batch, following = self._select(now)
        if batch:
            self._send(thread, batch, following, mode)
            return 0.0
        task_seconds = min(self._refresh(), self._warm_up(thread))
        self._clear_attention_if_idle()
        retry_seconds = self._schedule.next_at() - self._clock.monotonic()
        return min(retry_seconds, _IDLE_WAIT_SECONDS, task_seconds, self._outbox.seconds_to_due())

    def _note_new_rows(self, now: float) -> None:
        """Report up to 64 new records to the schedule."""
        found = self._outbox.select(self.name, partial(new_rows, after=self._seen_through))
        self._seen_through = max((row.sequence for row in found), default=self._seen_through)
        wall = self._clock.timestamp()
        for row in found[:_MOST_NEW_EVENTS]:
            ahead = None if row.not_before is None else row.not_before - wall
            self._schedule.record_arrived(row.event_key, now, urgent=row.urgent, seconds_to_not_before=ahead)

    def _select(self, now: float) -> tuple[SendMode, list[Delivery], list[Delivery]]:
        """Return the mode, the rows of the next request, and the rows of the request after it."""
        while (mode := self._schedule.mode(now)) is not SendMode.WAIT:
            fresh_event = self._schedule.take_fresh() if mode is SendMode.FRESH else None
            choose = partial(self._choose, now=now, mode=mode, fresh_event=fresh_event)
            rows = self._outbox.select(self.name, choose)
            if rows:
                return mode, rows[: self._batch_size], rows[self._batch_size :]
            self._schedule.nothing_pending(mode, now)
            if mode is SendMode.ALL:
                self._batching.alone.clear()
                break
        return SendMode.WAIT, [], []

    def _choose(self, rows: DueRows, *, now: float, mode: SendMode, fresh_event: str | None) -> list[Delivery]:
        """Return the rows of the next request. Some sinks also need those of the request after it."""
        batch = next_batch(rows, self._schedule, now, batching=self._batching, fresh_event=fresh_event)
        self._batch_size = len(batch)
        if not batch or not self._prepares_next or mode is not SendMode.ALL:
            return batch
        return batch + next_batch(rows, self._schedule, now, batching=self._batching, after=batch)

    def _expire(self, now: float) -> None:
        max_age = self.config.max_age_seconds
        if max_age is None or now < self._expired_at + 1.0:
            return
        self._expired_at = now
        wall = self._clock.timestamp()
        if self._has_pending and (
            expired := self._outbox.change(deliveries.expire, self.name, now=wall, older_than=wall - max_age)
        ):
            extra = {"sink": self.name, "expired": expired}
            logger.warning("Records expired: they are older than max_age_seconds.", extra=extra)

    def _refresh(self) -> float:
        """Mark records that need a refresh as pending. Return the seconds until the next refresh."""
        if self._refresh_seconds is None or self._stop_at is not None:
            return _NEVER
        if not (self._outbox.is_trusted and self._has_seen_document()):
            return _NO_DOCUMENT_SECONDS
        now = self._clock.timestamp()
        due, seconds = self._outbox.read(
            deliveries.find_refreshes, self.name, now=now, every_seconds=self._refresh_seconds
        )
        if due:
            self._outbox.change(deliveries.send_again, self.name, due, now=now)
        return seconds

    def _warm_up(self, thread: SinkThread) -> float:
        """Warm up the sink once, after the first successful poll.

        Returns the number of seconds until the next check.
        """
        if not self._needs_warm_up or self._stop_at is not None:
            return _NEVER
        if not self._has_seen_document():
            return _NO_DOCUMENT_SECONDS
        self._needs_warm_up = False
        thread.warm_up()
        return 0.0

    @property
    def _has_pending(self) -> bool:
        return self._outbox.read(lambda state: bool(state.queues[self.name].pending))

    def _clear_attention_if_idle(self) -> None:
        """Clear needs_attention if the sink has no pending records, except after status 410."""
        if self._metrics.needs_attention and not self._schedule.is_gone and not self._has_pending:
            self._metrics.set_needs_attention(needed=False)

    # Sending.

    def _send(self, thread: SinkThread, batch: list[Delivery], following: list[Delivery], mode: SendMode) -> None:
        if not self._schedule.is_troubled:
            self._seen_through = self._outbox.read(lambda state: state.next_sequence) - 1
        self._send_began_at, self._in_flight = self._clock.monotonic(), (batch, mode)
        outcome: bool | DeliveryRejected | DeliveryFailed
        try:
            outcome = thread.send([row.record for row in batch], [row.record for row in following])
        except (DeliveryRejected, DeliveryFailed) as error:
            outcome = error
        self._end_send()
        if isinstance(outcome, DeliveryFailed):
            self._failed(batch, mode, outcome)
        elif isinstance(outcome, DeliveryRejected):
            self._rejected(batch, mode, outcome, under=thread.configuration)
        else:
            self._delivered(batch, under=thread.configuration if outcome else None)

    def _end_send(self) -> None:
        self._in_flight = None
        self._metrics.sent(self._clock.monotonic() - self._send_began_at)

    # Results.

    def _store(
        self, rows: Sequence[Delivery], to: DeliveryState, error: str | None = None, accepted_under: str | None = None
    ) -> None:
        sequences = [row.sequence for row in rows]
        self._outbox.record_results(self.name, sequences, to, error=error, accepted_under=accepted_under)

    def _delivered(self, batch: list[Delivery], *, under: str | None) -> None:
        """Mark *batch* as delivered.

        *under* is the digest of the sink's settings, or None if the sink handled the batch without a request.
        """
        is_first = under is not None and self._refusals.accepted([row.sequence for row in batch], under=under)
        self._store(batch, DeliveryState.DELIVERED, accepted_under=under if is_first else None)
        now = self._clock.now()
        for row in batch:
            self._metrics.delivered((now - parse_time(row.record.observed_at)).total_seconds())
        keys = [row.event_key for row in batch]
        if under is None:
            self._schedule.needed_no_request(keys)
            return
        self._report.recovered(f"{self.name}: refused", "The sink accepts records again.", sink=self.name)
        self._responded(keys)

    def _responded(self, event_keys: Sequence[str]) -> None:
        self._schedule.succeeded(event_keys)
        if self._metrics.needs_attention:
            self._metrics.set_needs_attention(needed=False)
        self._report.recovered(self.name, "The sink responds again.", sink=self.name)

    def _rejected(self, batch: list[Delivery], mode: SendMode, error: DeliveryRejected, *, under: str) -> None:
        events = {row.sequence: row.event_key for row in batch}
        if error.may_be_endpoint and self._refusals.are_about_endpoint(events, under=under):
            failed = DeliveryFailed(str(error), needs_attention=True, reason=error.reason)
            self._failed(batch, mode, failed, next_step=_ENDPOINT_REFUSES)
            if parked := self._refusals.take_back():
                self._outbox.change(deliveries.retry, self.name, sequences=parked, now=self._clock.timestamp())
            return
        reason = str(error)[:_REASON_CHARACTERS]
        named = [getattr(record, "id", record) for record in error.records]
        refused = batch if len(batch) == 1 else [row for row in batch if row.record.id in named]
        if refused:
            self._store(refused, DeliveryState.PARKED, reason)
            self._report.problem(
                f"{self.name}: refused",
                logging.ERROR,
                f"The sink rejected records permanently. They are parked; see `outbox list --state parked`. {reason}",
                kind=error.reason,
                sink=self.name,
                records=[row.record.id for row in refused],
            )
        # The worker sends the other records one by one, to find the records that cause the rejection.
        self._batching.alone |= {row.sequence for row in batch} - {row.sequence for row in refused}
        self._responded([row.event_key for row in batch])

    def _failed(self, batch: list[Delivery], mode: SendMode, error: DeliveryFailed, *, next_step: str = "") -> None:
        self._store(batch, DeliveryState.PENDING, str(error)[:_REASON_CHARACTERS])
        self._note_failure(error, next_step=next_step)
        keys = dict.fromkeys(row.event_key for row in batch)
        wall = self._clock.timestamp()
        has_urgent, seconds_to_notice, events = self._outbox.read(_urgency, self.name, keys, now=wall)
        self._schedule.failed(
            events,
            self._clock.monotonic(),
            during=mode,
            has_urgent=has_urgent,
            seconds_to_notice=seconds_to_notice,
            retry_after=error.retry_after,
            is_gone=error.gone,
        )

    def _note_failure(self, error: DeliveryFailed, *, next_step: str = "") -> None:
        self._metrics.retried(error.reason)
        if error.needs_attention:
            self._metrics.set_needs_attention(needed=True)  # until the sink responds
        level = logging.ERROR if error.needs_attention else logging.WARNING
        if error.gone:
            next_step = "Nothing is sent until `outbox retry`, a restart, or a reload that changes the sink."
        reason = str(error)[:_REASON_CHARACTERS]
        self._report.problem(
            self.name, level, f"Sending failed: {reason} {next_step}".rstrip(), kind=error.reason, sink=self.name
        )


def _urgency(
    state: State, sink: str, event_keys: Iterable[str], *, now: float
) -> tuple[bool, float | None, list[FailedEvent]]:
    """Return whether a row is urgent, the time to the next NotBefore, and both for each event."""
    queue = state.queues[sink]

    def seconds_to_not_before(rows: Iterable[Delivery]) -> float | None:
        times = (row.not_before - now for row in rows if row.not_before is not None and row.not_before > now)
        return min(times, default=None)

    events = [
        FailedEvent(
            event_key=key,
            urgent=any(row.urgent for row in queue.of_event(key)),
            seconds_to_not_before=seconds_to_not_before(queue.of_event(key)),
        )
        for key in event_keys
    ]
    return bool(queue.urgent), seconds_to_not_before(queue.pending.values()), events
