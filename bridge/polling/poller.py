"""Polls the Scheduled Events document, and stores the changes in the outbox.

The default interval is one second.

If a poll fails, the agent keeps the last known events and polls again. It never treats a failed poll as an empty
document. Errors never end the poll thread, because an agent that has stopped polling looks like an agent without
events.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Protocol

import msgspec

from bridge.backoff import poll_delay
from bridge.clock import REAL_CLOCK, Clock, Instant, format_time, parse_time
from bridge.errors import DocumentInvalid, ImdsError
from bridge.events.event import Document, Incarnation, ScheduledEvent, names_vm
from bridge.events.record import Transition, TransitionRecord
from bridge.events.tracker import DocumentTracker, Update
from bridge.events.transitions import Step, classify_shown
from bridge.imds.client import ImdsClient
from bridge.impact.downtime import Downtime
from bridge.impact.report import impact_of
from bridge.impact.sampler import Sampler
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import Metrics
from bridge.outbox import records
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import EventRow
from bridge.outbox.state import State
from bridge.polling.identity import IdentityResolver
from bridge.system.boot import has_booted
from bridge.system.threads import LoopWatch

logger = logging.getLogger(__name__)

_LEAST_GAP_SECONDS = 10.0
_GAP_POLLS = 5
#: The poll waits this long before it logs and counts, because the saver and the sinks need the interpreter first.
_HEAD_START_SECONDS = 0.004
_CONFIRMING_SECONDS = 1.0
#: The sampler starts to read the clocks often this long before NotBefore.
_NEAR_SECONDS = 10.0
_BOOT_TYPES = frozenset({"Reboot", "Redeploy"})
#: The agent stores the time of the last good response only this often, so that it rarely writes to the disk.
_LIVENESS_SECONDS = 600.0
_UNTRUSTED_URGENT_SECONDS = 2.0
#: A log line contains at most this many names of VMs. The record contains all names.
_MOST_NAMES = 5


class PollResult(str, Enum):
    """The result of a poll, as a metric label. HTTP errors have labels such as ``status_404``."""

    OK = "ok"
    INVALID = "invalid"
    UNREACHABLE = "unreachable"
    ERROR = "error"


class Approvals(Protocol):
    """The approver's interface for the poller, which must not import the approver."""

    @property
    def approved(self) -> frozenset[str]:
        """Return the keys of the events that this agent has approved or might have approved."""

    def observe(
        self,
        document: Document,
        instant: Instant,
        *,
        asked_at: float,
        unsettled: frozenset[str],
        tracked: Document | None,
    ) -> None:
        """Process a good IMDS response after its changes are stored. Must return quickly."""

    def wait_for_submission(self) -> None:
        """Wait up to one second for the result of the current approval request."""


class Poller:
    """Polls *imds* and stores changes in *outbox*. Without *approvals*, nothing is approved.

    *boot_id* identifies the current boot, which started *seconds_since_boot* ago.
    """

    def __init__(
        self,
        imds: ImdsClient,
        outbox: Outbox,
        identity: IdentityResolver,
        *,
        metrics: Metrics,
        boot_id: str,
        poll_interval_seconds: float,
        approvals: Approvals | None = None,
        sampler: Sampler | None = None,
        seconds_since_boot: float = 0.0,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._imds = imds
        self._outbox = outbox
        self._identity = identity
        self._metrics = metrics
        self._boot_id = boot_id
        self._booted_at = clock.now() - timedelta(seconds=seconds_since_boot)
        self.approvals = approvals
        self.on_records: Callable[[Sequence[TransitionRecord]], object] = lambda _records: None
        self._sampler = sampler
        self.downtime: Downtime | None = None
        """The downtime before this start of the agent, or None if the VM did not boot."""
        self._interval_seconds = poll_interval_seconds
        self._clock = clock
        self._report = ThrottledLog(logger)
        self.loop_watch = LoopWatch(clock)
        self._answered_at: float | None = None
        self._stop = threading.Event()
        self._due = 0.0
        """The time of the next poll."""
        self._woken = threading.Event()
        self._failures = 0
        self._saved_at = float("-inf")
        self.good_at: datetime | None = None
        self.refused_answer: str | None = None
        """The error in a response with status 200, or None if the response is a valid document."""
        self._tracker: DocumentTracker | None = None
        self._stream_id = ""
        self._untrusted_since: float | None = None
        self._urgent: list[ScheduledEvent] = []

    @property
    def document(self) -> Document | None:
        """Return the tracked document, or None while it is unknown."""
        return None if self._tracker is None else self._tracker.document

    @property
    def incarnation(self) -> Incarnation:
        """Return the incarnation of the tracked document."""
        return None if self.document is None else self.document.incarnation

    @property
    def gap_seconds(self) -> float:
        """Return the longest period without a good response that does not count as a gap."""
        return max(_LEAST_GAP_SECONDS, _GAP_POLLS * self._interval_seconds)

    @property
    def silent_seconds(self) -> float | None:
        """Return the seconds since the last good response, or None before the first good response."""
        return None if self._answered_at is None else max(self._clock.monotonic() - self._answered_at, 0.0)

    def reconfigure(self, imds: ImdsClient, identity: IdentityResolver, *, poll_interval_seconds: float) -> None:
        """Use *imds*, *identity*, and *poll_interval_seconds* from the next poll on."""
        self._imds = imds
        self._identity = identity
        self._interval_seconds = poll_interval_seconds
        if self._tracker is not None:
            self._tracker.gap_seconds = self.gap_seconds
        self._due = -math.inf
        self.wake()

    def wake(self) -> None:
        """End the current wait, so that `run` checks *stop* immediately."""
        self._woken.set()

    def run(self, stop: threading.Event) -> None:
        """Poll until *stop* is set, and then store the time of the last good response."""
        self._stop = stop
        self._due = self._clock.monotonic()
        while not stop.is_set():
            self.loop_watch.expect_call_within(self._imds.deadline_seconds)
            delay = self.poll_once()
            # After a slow poll, the next poll starts earlier, but the poller never sends several polls at once.
            due = self._due = max(self._due + delay, self._clock.monotonic())
            self.loop_watch.expect_within(due - self._clock.monotonic())
            self._sleep()
            if self._due == -math.inf:  # `reconfigure` ended the wait
                self._due = self._clock.monotonic()
            if self._sampler is not None:
                self._sampler.sample_poll(self._clock.monotonic() - due)
        self.loop_watch.idle()
        self._save_liveness()

    def _sleep(self) -> None:
        """Wait until the next poll is due.

        If the disk is slow, a record can become due before it is saved. This thread then wakes the sink workers.
        """
        while not self._stop.is_set() and (left := self._due - self._clock.monotonic()) > 0:
            unsaved_left = self._outbox.seconds_to_due()
            if self._woken.wait(min(left, unsaved_left, threading.TIMEOUT_MAX)):
                self._woken.clear()
            elif unsaved_left < left:
                self._outbox.on_due()

    def poll_once(self) -> float:
        """Poll once. Return the number of seconds from the start of this poll to the next poll."""
        started = self._clock.monotonic()
        result, backoff_seconds = PollResult.OK.value, 0.0
        try:
            self._process(self._imds.scheduled_events(), asked_at=started)
            self._failures, self.refused_answer = 0, None
            self._report.recovered("imds", "The metadata service responds again.")
        except ImdsError as error:
            result = _reason(error)
            backoff_seconds = self._failed(error)
        except Exception as error:  # noqa: BLE001  # logged with its traceback; the poll survives every error
            result = PollResult.ERROR.value
            self._report.problem(
                "poll", logging.ERROR, f"The poll failed: {error!r}", kind=repr(type(error)), exc_info=error
            )
        self._publish_active_events()
        self._metrics.polled(result, duration_seconds=self._clock.monotonic() - started)
        return max(self._seconds_between_polls, backoff_seconds)

    @property
    def _seconds_between_polls(self) -> float:
        is_confirming = self._tracker is not None and bool(self._tracker.unconfirmed)
        return min(self._interval_seconds, _CONFIRMING_SECONDS) if is_confirming else self._interval_seconds

    def _failed(self, error: ImdsError) -> float:
        if self._stop.is_set():
            return 0.0  # `stop` has closed the connection
        self._failures += 1
        self.refused_answer = str(error) if isinstance(error, DocumentInvalid) else None
        self._report.problem("imds", logging.WARNING, str(error), kind=_reason(error))
        interval, failures = self._seconds_between_polls, self._failures
        return poll_delay(interval, failures=failures, status=error.status, retry_after=error.retry_after_seconds)

    def _process(self, document: Document, *, asked_at: float) -> None:
        instant = self._clock.instant()
        self.good_at, self._answered_at = instant.wall, instant.monotonic
        tracker = self._trusted_tracker()
        if tracker is None:
            self._record_urgent(document, instant)
            self._metrics.good_poll(instant.wall.timestamp(), document)
            return
        approvals = self.approvals
        approved = frozenset[str]() if approvals is None else approvals.approved
        update = tracker.observe(document, instant, vm_name=self._identity.vm.name, approved=approved)
        self._watch_impact(document, instant, approved)
        if update is not None:
            if approvals is not None and update.changes:
                approvals.wait_for_submission()
            self._store(tracker, update)
        if approvals is not None:
            approvals.observe(
                document, instant, asked_at=asked_at, unsettled=tracker.unconfirmed, tracked=tracker.document
            )
        self._metrics.good_poll(instant.wall.timestamp(), tracker.document or document)
        if instant.monotonic - self._saved_at >= _LIVENESS_SECONDS:
            self._save_liveness()

    def _store(self, tracker: DocumentTracker, update: Update) -> None:
        new_records: Sequence[TransitionRecord] = ()
        if update.is_news:
            new_records = self._outbox.append_observation(
                update.document,
                [self._measured(record) for record in update.changes],
                active_event_ids=update.active_event_ids,
            )
            self._stop.wait(_HEAD_START_SECONDS)
        tracker.commit(update)
        self._note(new_records)

    def _watch_impact(self, document: Document, instant: Instant, approved: frozenset[str]) -> None:
        if self._sampler is not None:
            soon = instant.wall + timedelta(seconds=_NEAR_SECONDS)
            near = (
                names_vm(event, self._identity.vm.name)
                and (
                    event.event_status == "Started"
                    or event.key in approved
                    or (event.not_before is not None and event.not_before <= soon)
                )
                for event in document.events
            )
            self._sampler.watch(is_near=any(near))
            self._sampler.responded(self._imds.date)

    def _measured(self, record: TransitionRecord) -> TransitionRecord:
        """Return *record*, with the measured impact if it ends an event of this VM."""
        event, is_over = record.event, record.transition in {Transition.COMPLETED, Transition.ENDED}
        if self._sampler is None or event is None or not is_over or not names_vm(event, self._identity.vm.name):
            return record
        timeline = self._event_row(event.key).timeline
        starts = [each.observed_at for each in timeline if each.transition is Transition.STARTED]
        started_at = parse_time(starts[0]).timestamp() if starts else None
        ended_at = parse_time(record.observed_at).timestamp()
        impact = impact_of(self._sampler, started_at=started_at, ended_at=ended_at)
        downtime = self.downtime
        if downtime is not None and event.event_type in _BOOT_TYPES and timeline:
            is_inside = parse_time(timeline[0].observed_at).timestamp() <= downtime.last_alive_at
            impact = downtime.added_to(impact) if is_inside else impact
        return msgspec.structs.replace(record, impact=impact)

    def _note(self, new_records: Sequence[TransitionRecord]) -> None:
        self.on_records(new_records)
        for record in new_records:
            self._metrics.recorded(record.transition)
            _log_record(record)

    # State that might belong to another machine.

    def _trusted_tracker(self) -> DocumentTracker | None:
        """Return the tracker of the stored document, or None until the VM's identity is known."""
        outbox = self._outbox
        if not outbox.is_trusted or (self._tracker is None and self._identity.is_waiting):
            return None
        if self._tracker is None or outbox.stream_id != self._stream_id:
            self._stream_id = outbox.stream_id
            self._tracker = outbox.read(self._restored_tracker)
        return self._tracker

    def _restored_tracker(self, stored: State) -> DocumentTracker:
        good_at = stored.get("last_good_at")
        return DocumentTracker(
            stored.document,
            history=self._event_row,
            last_good_at=None if good_at is None else parse_time(good_at),
            booted_at=self._booted_at if has_booted(stored.get("boot_id"), self._boot_id) else None,
            gap_seconds=self.gap_seconds,
        )

    def _event_row(self, event_key: str) -> EventRow:
        return self._outbox.read(records.event, event_key)

    def _record_urgent(self, document: Document, instant: Instant) -> None:
        if self._untrusted_since is None:
            self._untrusted_since = instant.monotonic
        if instant.monotonic - self._untrusted_since < _UNTRUSTED_URGENT_SECONDS:
            return
        new = [event for event in document.events if event.is_urgent and event not in self._urgent]
        self._urgent += new
        step = Step(before=None, after=document, observed_at=instant.wall)
        changes = [change for event in new if (change := classify_shown(None, event, step)) is not None]
        self._note(self._outbox.append_observation(None, changes, active_event_ids=None))

    def _publish_active_events(self) -> None:
        tracker = self._tracker
        self._outbox.active_event_ids = None if tracker is None else tracker.active_event_ids(self._clock.instant())

    def _save_liveness(self) -> None:
        """Store the time of the last good response, unless a change is still unconfirmed."""
        tracker = self._tracker
        if self.good_at is None or tracker is None or not tracker.is_settled(self._clock.instant()):
            return
        self._saved_at = self._clock.monotonic()
        self._outbox.change(records.save_liveness, last_good_at=self.good_at, boot_id=self._boot_id)


def _reason(error: ImdsError) -> str:
    if error.status is not None:
        return f"status_{error.status}"
    return PollResult.INVALID.value if isinstance(error, DocumentInvalid) else PollResult.UNREACHABLE.value


def _log_record(record: TransitionRecord) -> None:
    event = record.event
    logger.info(
        "%s %s",
        "Event" if event is None else event.event_type or "Event",
        record.transition.value,
        extra={
            "transition": record.transition.value,
            "evidence": record.evidence.value,
            "event_id": None if event is None else event.event_id,
            "event_source": None if event is None else event.event_source,
            "not_before": None if event is None or event.not_before is None else format_time(event.not_before),
            "notice_seconds": record.notice_seconds,
            "resources": [] if event is None else list(event.resources or ())[:_MOST_NAMES],
            "affects_this_vm": record.affects_this_vm,
            "sequence": record.sequence,
        },
    )
