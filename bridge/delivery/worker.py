"""The delivery worker: the thread that sends the pending records of one sink.

One worker a sink, so that nothing another sink does can delay it. The parts, each with its own reason: the
`RetrySchedule` decides what may be tried when, the `Batcher` finds the rows, the `Sender` keeps the deadline, the sink
only sends, the `ResultWriter` stores what became of it. The worker joins them, and tells logs and metrics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bridge.clock import REAL_CLOCK, Clock, parse_time
from bridge.delivery.batcher import Batcher
from bridge.delivery.refresher import Refresher
from bridge.delivery.refusals import Refusals
from bridge.delivery.resolved import ResolvedConfiguration
from bridge.delivery.results import ResultWriter
from bridge.delivery.retry_schedule import FailedEvent, RetrySchedule, SendMode
from bridge.delivery.sender import Sender
from bridge.errors import DeliveryError, DeliveryFailed, DeliveryRejected, OutboxError
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import SinkMetrics
from bridge.outbox import deliveries
from bridge.outbox.deliveries import DeliveryState, PendingDelivery, StartMark
from bridge.outbox.outbox import Outbox
from bridge.sink import AttestedTokens, Sink, SinkConfig, TransitionRecord
from bridge.system.threads import LoopWatch

logger = logging.getLogger(__name__)

_REASON_CHARACTERS = 256
#: An idle worker reads the outbox by itself now and then, in case it was not notified.
_IDLE_WAIT_SECONDS = 60.0
_FAULT_SECONDS = 1.0
#: How long a sink that skips what is over waits for the first document: what is pending may be over since.
_FIRST_DOCUMENT_SECONDS = 5.0
_TICK_SECONDS = 0.1
_NEVER = float("inf")
_ENDPOINT_REFUSES = (
    "The endpoint has accepted nothing since the configuration changed, or refuses one event after the other: so it is "
    "the endpoint, and nothing is parked. Check the URL and what signs the requests; park_statuses parks all the same."
)


class DeliveryWorker:
    """Delivers to one sink, from `start` to `stop`."""

    def __init__(
        self,
        *,
        config: SinkConfig,
        sink_class: type[Sink],
        outbox: Outbox,
        metrics: SinkMetrics,
        clock: Clock = REAL_CLOCK,
        has_seen_document: Callable[[], bool] = lambda: True,
        attested: AttestedTokens | None = None,
    ) -> None:
        self.name = config.name
        self.config = config
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self.loop_watch = LoopWatch(clock)
        self._sender = Sender(
            lambda: sink_class(config),
            name=config.name,
            timeout_seconds=config.timeout_seconds,
            configuration=ResolvedConfiguration(sink_class, config).digest,
            on_stall=self.loop_watch.extend,
            attested=attested,
        )
        self._schedule = RetrySchedule(clock.random)
        self._results = ResultWriter(outbox, sink=config.name, clock=clock)
        self._batcher = Batcher(
            outbox=outbox,
            results=self._results,
            schedule=self._schedule,
            config=config,
            batch_by_event=sink_class.batch_by_event,
        )
        every_seconds = sink_class.refresh_seconds(config)
        self._refresher = Refresher(
            outbox, sink=config.name, every_seconds=every_seconds, clock=clock, has_seen_document=has_seen_document
        )
        self._sink_class = sink_class
        self._skips_what_is_over = sink_class.skips_what_is_over(config)
        self._has_seen_document = has_seen_document
        self._began_at = clock.monotonic()
        self._pending_before = outbox.records.last_sequence
        self._prepares_next = sink_class.prepare_next is not Sink.prepare_next
        accepted_under = outbox.read(deliveries.configuration_accepted, config.name).result()
        self._refusals = Refusals(accepted_under=accepted_under)
        self._report = ThrottledLog(logger, clock=clock)
        self._woken = threading.Event()
        self._was_woken_by_command = False
        self._retry_requests = outbox.read(deliveries.retry_requests, config.name).result()
        self._stop_at: float | None = None
        self._expired_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"delivery:{config.name}", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def notify(self, *, by_command: bool = False) -> None:
        """Tell the worker that there may be new rows, or with *by_command* that a command has written to the outbox."""
        if by_command:
            self._was_woken_by_command = True
        self._woken.set()

    def stop(self, *, grace_seconds: float) -> None:
        """Let the worker send what is due for *grace_seconds* more; returns at once, see `join`."""
        self._stop_at = self._clock.monotonic() + grace_seconds
        self._woken.set()

    def cut(self) -> None:
        """End the send that is under way, and begin no other: there is no more time, and records stay pending."""
        self._sender.cut()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; return whether it came."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # The loop.

    def _run(self) -> None:
        while not self._is_time_to_stop():
            self.loop_watch.expect_call_within(self.config.timeout_seconds)
            try:
                wait_seconds = self._run_once()
            except Exception as error:  # noqa: BLE001  # logged with its traceback, once
                message = f"The delivery worker failed; it goes on. {type(error).__name__}: {error}"
                self._report.problem("worker", logging.ERROR, message, exc_info=error, sink=self.name)
                self._batcher.drop_prefetch()
                wait_seconds = _FAULT_SECONDS
            if wait_seconds > 0:
                if self._stop_at is not None:
                    break
                self.loop_watch.expect_within(wait_seconds)
                self._woken.wait(wait_seconds)
        self.loop_watch.idle()
        self._results.wait()
        self._sender.close()

    def _is_time_to_stop(self) -> bool:
        return self._stop_at is not None and self._clock.monotonic() >= self._stop_at

    def _run_once(self) -> float:
        """Send one batch; return for how many seconds there is nothing to do."""
        if self._woken.is_set():
            self._woken.clear()
            self._note_new_rows()
        now = self._clock.monotonic()
        self._expire(now)
        mode, batch = self._batcher.next(now)
        is_waiting = bool(batch) and self._waits_for_document(batch, now)
        if is_waiting:
            self._batcher.drop_prefetch()
        elif batch:
            self._send(batch, mode)
            return 0.0
        self._results.retry_unwritten()
        refresh_seconds = self._refresh(now)
        if refresh_seconds <= 0:
            return 0.0
        self._clear_attention_if_idle()
        if is_waiting:
            return _TICK_SECONDS
        self._batcher.await_new_rows()
        return min(self._schedule.next_at() - self._clock.monotonic(), self._idle_seconds(), refresh_seconds)

    def _waits_for_document(self, batch: Sequence[PendingDelivery], now: float) -> bool:
        """Return whether *batch*, pending since before the start, may be over, or not be all that is under way.

        What is urgent never waits, and nothing does for a service that stays silent.
        """
        if not self._skips_what_is_over or now >= self._began_at + _FIRST_DOCUMENT_SECONDS or self._has_seen_document():
            return False
        return batch[0].sequence <= self._pending_before and not any(row.urgent for row in batch)

    def _clear_attention_if_idle(self) -> None:
        """Reset needs_attention once nothing is pending for the sink; one that is gone (410) still needs a person."""
        if not self._metrics.needs_attention or self._schedule.is_gone or self._refresher.is_failing:
            return
        if not self._outbox.read(deliveries.probe, self.name).result():
            self._metrics.set_needs_attention(needed=False)

    def _idle_seconds(self) -> float:
        max_age = self.config.max_age_seconds
        if max_age is None or not self._schedule.is_troubled:
            return _IDLE_WAIT_SECONDS
        return min(_IDLE_WAIT_SECONDS, max(1.0, max_age))

    def _note_new_rows(self) -> None:
        by_command, self._was_woken_by_command = self._was_woken_by_command, False
        if by_command:
            before = self._retry_requests
            self._retry_requests = self._outbox.read(deliveries.retry_requests, self.name).result()
            if self._retry_requests != before:
                self._schedule.resume()
        now, wall = self._clock.monotonic(), self._clock.timestamp()
        self._batcher.note_new_records(now, wall=wall, by_command=by_command)

    def _expire(self, now: float) -> None:
        """Give up what is older than `max_age_seconds`, at most once a second."""
        max_age = self.config.max_age_seconds
        if max_age is None or now < self._expired_at + 1.0:
            return
        self._expired_at = now
        self._results.flush()  # what is delivered does not expire
        expired = self._outbox.expire(self.name, max_age_seconds=max_age).result()
        if expired:
            self._batcher.drop_prefetch()
            logger.warning(
                "Records were given up: they are older than max_age_seconds.",
                extra={"sink": self.name, "expired": expired},
            )

    # Sending.

    def _send(self, batch: list[PendingDelivery], mode: SendMode) -> None:
        batch = self._park_unreadable(batch)
        if not batch or self._is_time_to_stop():  # the outbox may have hung; another worker may have these rows by now
            return
        mark = self._mark_started(batch[0])
        if mark.skipped or self._give_up_superseded(batch[0], mark):
            self._batcher.drop_prefetch()
            return
        error: DeliveryError | None = None
        made_request = True
        started = self._clock.monotonic()
        try:
            made_request = self._sender.send([row.record for row in batch], self._following())
        except DeliveryError as raised:
            error = raised
        self._metrics.sent(self._clock.monotonic() - started)
        if error is None:
            self._delivered(batch, made_request=made_request)
        elif isinstance(error, DeliveryRejected):
            self._rejected(batch, error, mode)
        elif isinstance(error, DeliveryFailed):
            self._failed(batch, error, mode)
        self._clear_start_mark(batch[0], mark, error)

    def _refresh(self, now: float) -> float:
        """Send again a record that is due to be told again; return for how many seconds there is none."""
        if self._stop_at is not None or self._schedule.mode(now) is not SendMode.ALL:
            return _NEVER  # the sink is being ended, or is paused: `RetrySchedule.next_at` says until when
        row = self._refresher.next(now)
        if row is None:
            return self._refresher.next_at - self._clock.monotonic()
        started = self._clock.monotonic()
        try:
            made_request = self._sender.send([row.record], gives_way=self._woken.is_set)
        except DeliveryFailed as error:
            self._refresh_failed(row, error)
        except DeliveryRejected as error:
            self._refresh_rejected(row, error)
        else:
            self._refresher.told(self._clock.monotonic())
            if made_request:
                self._accepted([row])
        self._metrics.sent(self._clock.monotonic() - started)
        return 0.0

    def _refresh_rejected(self, row: PendingDelivery, error: DeliveryRejected) -> None:
        if error.may_be_endpoint and self._refusals.are_about_endpoint([row], under=self._sender.configuration):
            self._refresh_failed(row, _endpoint_failed(error), next_step=_ENDPOINT_REFUSES)
            self._take_back()
            return
        self._refresher.told(self._clock.monotonic())
        message = f"The sink refused what it had accepted before; it stays delivered. {error}"[:_REASON_CHARACTERS]
        self._report.problem(f"{self.name}: refused", logging.ERROR, message, sink=self.name)
        self._answered([row])

    def _refresh_failed(self, row: PendingDelivery, error: DeliveryFailed, *, next_step: str = "") -> None:
        now = self._clock.monotonic()
        self._refresher.failed(now)
        self._note_failure(error, "Telling it again what is active failed", next_step=next_step)
        if error.held or error.retry_after:  # that is about the sink, whatever was sent
            self._reschedule([row], error, SendMode.ALL, now)

    def _following(self) -> list[TransitionRecord]:
        """Return the records that probably go next, for a sink that makes use of that."""
        if not self._prepares_next:
            return []
        try:
            return [row.record for row in self._batcher.following()]
        except msgspec.MsgspecError:
            return []

    def _park_unreadable(self, batch: list[PendingDelivery]) -> list[PendingDelivery]:
        """Return *batch* without what is no record; that is parked, for a person to see."""
        bad: list[PendingDelivery] = []
        for row in batch:
            try:
                _ = row.record
            except msgspec.MsgspecError as error:
                bad.append(row)
                logger.error(  # noqa: TRY400  # the sentence says it all
                    "A row of the outbox is no record and was parked.",
                    extra={"sink": self.name, "sequence": row.sequence, "error": str(error)},
                )
        if bad:
            self._results.finished(bad, DeliveryState.PARKED, "It is no record.")
        return [row for row in batch if row not in bad] if bad else batch

    def _mark_started(self, row: PendingDelivery) -> StartMark:
        """Mark the event as started at a sink that skips what is over, or skip it; see `bridge.outbox.deliveries`."""
        if not self._skips_what_is_over or row.record.event is None:
            return StartMark()
        self._results.flush()  # what is delivered counts as started
        wall = self._clock.timestamp()
        mark = self._outbox.write(deliveries.mark_started, self.name, row.event_key, now=wall).result()
        if mark.skipped:
            logger.log(
                logging.WARNING if row.attempts else logging.INFO,
                "An event was skipped: it was over before anything of it could be sent.",
                extra={"sink": self.name, "event_id": row.event_key, "expired": mark.skipped},
            )
        return mark

    def _give_up_superseded(self, row: PendingDelivery, mark: StartMark) -> bool:
        """Give *row* up if its sink needs only the end of the event, which is pending; return whether it was."""
        if mark.last_end is None or row.sequence >= mark.last_end:
            return False
        if not self._sink_class.superseded_by_end(self.config, row.record):
            return False
        self._results.finished([row], DeliveryState.EXPIRED, "The end of its event is known.")
        logger.info(
            "A record was skipped: the end of its event is known and is sent.",
            extra={"sink": self.name, "event_id": row.event_key, "sequence": row.sequence},
        )
        return True

    def _clear_start_mark(self, row: PendingDelivery, mark: StartMark, error: DeliveryError | None) -> None:
        """Take the mark away when surely nothing of the event arrived, and when its end did."""
        if not self._skips_what_is_over or row.record.event is None or self._sender.is_cut:
            return  # the worker after a cut one may have sent of the event, and relies on the mark
        surely_nothing_arrived = mark.is_new and isinstance(error, DeliveryFailed) and not error.uncertain
        if surely_nothing_arrived or (error is None and row.record.transition.is_ending):
            self._results.flush()
            self._outbox.write(deliveries.clear_started, self.name, row.event_key)

    # What became of it.

    def _delivered(self, batch: list[PendingDelivery], *, made_request: bool) -> None:
        self._results.finished(batch, DeliveryState.DELIVERED)
        now = self._clock.now()
        for row in batch:
            self._metrics.delivered((now - parse_time(row.record.observed_at)).total_seconds())
        if not made_request:
            self._schedule.needed_no_request([row.event_key for row in batch])
            return
        self._report.recovered(f"{self.name}: refused", "The sink accepts records again.", sink=self.name)
        self._accepted(batch)

    def _accepted(self, batch: list[PendingDelivery]) -> None:
        """Note that the destination took *batch*."""
        under = self._sender.configuration
        if self._refusals.accepted([row.sequence for row in batch], under=under):
            self._results.accepted_under(under)
        self._answered(batch)

    def _answered(self, batch: list[PendingDelivery]) -> None:
        """Note that the destination is there: it took records, or refused them for good."""
        if self._schedule.succeeded([row.event_key for row in batch]):
            self._batcher.drop_prefetch()
        self._metrics.set_needs_attention(needed=False)
        self._report.recovered(self.name, "The sink answers again.", sink=self.name)

    def _rejected(self, batch: list[PendingDelivery], error: DeliveryRejected, mode: SendMode) -> None:
        if error.may_be_endpoint and self._refusals.are_about_endpoint(batch, under=self._sender.configuration):
            self._endpoint_refuses(batch, error, mode)
            return
        reason = str(error)[:_REASON_CHARACTERS]
        named = [getattr(record, "id", record) for record in error.records]
        refused = batch if len(batch) == 1 else [row for row in batch if row.record.id in named]
        if refused:
            self._results.finished(refused, DeliveryState.PARKED, reason)
            self._report.problem(
                f"{self.name}: refused",
                logging.ERROR,
                f"The sink refused records for good; they are parked. See `outbox list --state parked`. {reason}",
                sink=self.name,
                records=[row.record.id for row in refused],
            )
        # Which of the others is to blame, if any, shows when each goes alone.
        self._batcher.send_alone({row.sequence for row in batch} - {row.sequence for row in refused})
        self._answered(batch)

    def _endpoint_refuses(self, batch: list[PendingDelivery], error: DeliveryRejected, mode: SendMode) -> None:
        """Keep *batch* pending: the endpoint is to blame."""
        self._failed(batch, _endpoint_failed(error), mode, next_step=_ENDPOINT_REFUSES)
        self._take_back()

    def _take_back(self) -> None:
        """Have pending again what was parked by refusals that are the endpoint's."""
        if parked := self._refusals.take_back():
            self._results.take_back(parked)
            self._batcher.drop_prefetch()

    def _failed(
        self, batch: list[PendingDelivery], error: DeliveryFailed, mode: SendMode, *, next_step: str = ""
    ) -> None:
        now = self._clock.monotonic()
        self._results.tried(batch, str(error)[:_REASON_CHARACTERS])
        self._batcher.drop_prefetch()
        self._note_failure(error, "Sending failed", next_step=next_step)
        self._reschedule(batch, error, mode, now)

    def _note_failure(self, error: DeliveryFailed, what: str, *, next_step: str = "") -> None:
        """Count the failure *error*, and tell the log *what* failed."""
        self._metrics.retried(error.reason)
        if error.needs_attention:
            self._metrics.set_needs_attention(needed=True)  # until the sink answers
        level = logging.ERROR if error.needs_attention else logging.WARNING
        if error.held:
            next_step = "Nothing is sent until `outbox retry` or a restart."
        reason = str(error)[:_REASON_CHARACTERS]
        self._report.problem(self.name, level, f"{what}: {reason} {next_step}".rstrip(), sink=self.name)

    def _reschedule(self, batch: list[PendingDelivery], error: DeliveryFailed, mode: SendMode, now: float) -> None:
        wall = self._clock.timestamp()
        groups = _by_event(batch)
        has_urgent, soonest, notices = self._urgency(groups, wall)
        events = [
            FailedEvent(
                event_key=key,
                urgent=any(row.urgent for row in rows),
                seconds_to_not_before=notices[key] - wall if key in notices else None,
            )
            for key, rows in groups.items()
        ]
        self._schedule.failed(
            events,
            now,
            during=mode,
            has_urgent=has_urgent,
            seconds_to_notice=None if soonest is None else soonest - wall,
            retry_after=error.retry_after,
            is_gone=error.held,
        )

    def _urgency(
        self, events: Mapping[str, list[PendingDelivery]], wall: float
    ) -> tuple[bool, float | None, Mapping[str, float]]:
        """Return what `deliveries.urgency` and `deliveries.soonest_notices` tell of *events*, which failed."""
        try:
            has_urgent, soonest = self._outbox.read(deliveries.urgency, self.name, now=wall).result()
            if soonest is None:
                return has_urgent, None, {}
            read = self._outbox.read(deliveries.soonest_notices, self.name, now=wall, events=tuple(events))
            return has_urgent, soonest, read.result()
        except OutboxError:
            rows = [row for group in events.values() for row in group]
            ahead = [(row.not_before, row.event_key) for row in rows if row.not_before is not None]
            notices = {key: not_before for not_before, key in sorted(ahead, reverse=True) if not_before > wall}
            return any(row.urgent for row in rows), min(notices.values(), default=None), notices


def _endpoint_failed(error: DeliveryRejected) -> DeliveryFailed:
    return DeliveryFailed(str(error), needs_attention=True, reason=error.reason)


def _by_event(batch: Sequence[PendingDelivery]) -> dict[str, list[PendingDelivery]]:
    groups: dict[str, list[PendingDelivery]] = {}
    for row in batch:
        groups.setdefault(row.event_key, []).append(row)
    return groups
