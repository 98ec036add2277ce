"""The poll: the thread that asks IMDS for the document once a second, and stores what changed in the outbox.

The outbox is written before anything else learns of a change. A poll that fails means that the document is unknown,
never that it is empty: the state stays, the failure is counted, the next poll follows. The thread outlives every error:
an agent that stopped watching looks like one that has nothing to report.

While the outbox is being loaded another poller keeps what it sees (`Poller.seen`), and this one begins with that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from bridge.backoff import poll_delay
from bridge.clock import REAL_CLOCK, Clock, Instant, format_time
from bridge.errors import BridgeError, DocumentInvalid, ImdsError, ImdsStatus, StreamChanged
from bridge.events.event import Document, Incarnation
from bridge.events.record import TransitionRecord
from bridge.events.tracker import DocumentTracker, Update
from bridge.imds.client import ImdsClient
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import Metrics
from bridge.outbox import meta
from bridge.outbox.outbox import Outbox
from bridge.outbox.records import Observation
from bridge.polling.identity import IdentityResolver
from bridge.system.boot import has_booted
from bridge.system.threads import LoopWatch

if TYPE_CHECKING:
    from bridge.polling.seen import SeenDocuments

logger = logging.getLogger(__name__)

_LEAST_GAP_SECONDS = 10.0
_GAP_POLLS = 5
#: The time of the last good answer is worth a write only now and then: an idle agent does not touch the disk.
_LIVENESS_SECONDS = 600.0
#: Of the answers from before the outbox was loaded, so many are stored in one commit, and it may take so long.
_TOGETHER = 100
_STORED_WITHIN_SECONDS = 10.0
#: Of an event's Resources, in a line of the log; the record has them all.
_MOST_NAMES = 5


class PollResult(str, Enum):
    """What came of a poll, for its metric; a status of IMDS that is not 200 is ``status_NNN`` instead."""

    OK = "ok"
    INVALID = "invalid"
    UNREACHABLE = "unreachable"
    NOT_STORED = "not_stored"
    ERROR = "error"


class Approvals(Protocol):
    """The approver as the poll sees it: engines do not import one another."""

    @property
    def approved(self) -> frozenset[str]:
        """Return the keys of the events that this agent approved, or may have."""

    def observe(
        self, document: Document, instant: Instant, *, asked_at: float | None, unsettled: frozenset[str]
    ) -> None:
        """Take a good answer, after what changed was stored; must be quick.

        It was asked for at *asked_at*, in monotonic seconds. *unsettled* are the EventIds of events that it lacks,
        while their absence is not believed yet.
        """

    def wait_for_submission(self, event_keys: Collection[str]) -> None:
        """Wait, a second at most, until Azure's answer about these events is on its way into the outbox."""


class Poller:
    """Polls *imds* and stores what changed in *outbox*; *approvals* is None where nothing is ever approved.

    *boot_id* names the boot that this VM runs since *seconds_since_boot*: 0 where only that is known, that it runs.
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
        self._interval_seconds = poll_interval_seconds
        self._clock = clock
        self._report = ThrottledLog(logger)
        self.loop_watch = LoopWatch(clock)
        self._answered_at: float | None = None
        self._stop = threading.Event()
        self._is_reconfigured = False
        self._woken = threading.Event()
        self._has_stream_changed = False
        self._failures = 0
        self._saved_at = float("-inf")
        self.good_at: datetime | None = None
        """When the service last answered as it should, to this agent."""
        self.refused_answer: str | None = None
        """Why the last answer, a 200, is no document; None when it is one, or when there was no such answer."""
        self._is_settled = False
        self.seen: SeenDocuments | None = None
        """Where every good answer is kept while the outbox is being loaded; None: nowhere."""
        self._seen_before: SeenDocuments | None = None
        self._known_ids: Collection[str] = ()
        self._stream_id, self._tracker = self._load()

    def begin_with(self, seen: SeenDocuments, *, known_ids: Collection[str]) -> None:
        """Store first what follows from *seen*; records that have one of *known_ids* were counted and logged."""
        self._seen_before, self._known_ids = seen, known_ids

    @property
    def incarnation(self) -> Incarnation:
        """Return the incarnation of the document that is tracked."""
        return None if self._tracker.document is None else self._tracker.document.incarnation

    @property
    def gap_seconds(self) -> float:
        """How long the service may be silent before an end that was missed is only inferred."""
        return max(_LEAST_GAP_SECONDS, _GAP_POLLS * self._interval_seconds)

    @property
    def silent_seconds(self) -> float | None:
        """How long ago the last good answer came; None before the first."""
        return None if self._answered_at is None else max(self._clock.monotonic() - self._answered_at, 0.0)

    def reconfigure(self, imds: ImdsClient, identity: IdentityResolver, *, poll_interval_seconds: float) -> None:
        """Poll *imds* from now on."""
        self._imds = imds
        self._identity = identity
        self._interval_seconds = poll_interval_seconds
        self._tracker.gap_seconds = self.gap_seconds
        self._is_reconfigured = True
        self.wake()

    def wake(self) -> None:
        """Have the poll look at the *stop* of `run` now, and not when the next poll is due."""
        self._woken.set()

    def run(self, stop: threading.Event) -> None:
        """Poll until *stop* is set and `wake` called, then store when IMDS last answered."""
        self._stop = stop
        self._store_seen_before()
        due = self._clock.monotonic()
        while not stop.is_set():
            self.loop_watch.expect_call_within(self._imds.deadline_seconds)
            delay = self.poll_once()
            # The pace is kept: a poll that took a while is followed sooner, but never by a burst.
            due = max(due + delay, self._clock.monotonic())
            self.loop_watch.expect_within(due - self._clock.monotonic())
            if self._sleep_until(due):
                due = self._clock.monotonic()
        self.loop_watch.idle()
        self._save_liveness(wait=True)

    def _sleep_until(self, due: float) -> bool:
        """Wait until *due*, or until the stop is asked for; return whether `reconfigure` has cut that short."""
        while not self._is_reconfigured and not self._stop.is_set():
            left = due - self._clock.monotonic()
            if left <= 0:
                break
            if self._woken.wait(min(left, threading.TIMEOUT_MAX)):
                self._woken.clear()
        was_reconfigured, self._is_reconfigured = self._is_reconfigured, False
        return was_reconfigured

    def poll_once(self) -> float:
        """Poll once; return the seconds until the next poll is due, from when this one was."""
        started = self._clock.monotonic()
        result, delay = PollResult.OK.value, self._interval_seconds
        try:
            self._follow_stream()
            self._process(self._imds.scheduled_events(), asked_at=started)
            self._recovered()
        except ImdsError as error:
            result = _reason(error)
            delay = self._failed(error)
        except StreamChanged:
            self._has_stream_changed = True  # the state is read again before the next answer
            delay = 0.0
        except BridgeError as error:
            result = PollResult.NOT_STORED.value
            self._tracker.invalidate()
            self._report.problem("store", logging.ERROR, f"A change could not be stored: {error}")
        except Exception as error:  # noqa: BLE001  # logged with its traceback; the poll outlives everything
            result = PollResult.ERROR.value
            self._tracker.invalidate()
            self._report.problem("poll", logging.ERROR, f"The poll failed: {error!r}", exc_info=error)
        self._metrics.polled(result, duration_seconds=self._clock.monotonic() - started)
        return delay

    def _follow_stream(self) -> None:
        """Read the state again when the outbox was started over."""
        if self._has_stream_changed or self._outbox.stream_id != self._stream_id:
            self._stream_id, self._tracker = self._load()
            self._has_stream_changed = False

    @property
    def is_storing_seen(self) -> bool:
        """Return whether not all that was seen before the outbox was loaded is stored yet."""
        return self._seen_before is not None

    def _store_seen_before(self) -> None:
        """Store what follows from the documents that were seen before the outbox was loaded, many in one commit."""
        answers = list(self._seen_before or ())
        for first in range(0, len(answers), _TOGETHER):
            together = answers[first : first + _TOGETHER]
            self.loop_watch.expect_call_within(_STORED_WITHIN_SECONDS)
            try:
                try:
                    self._store_together(together)
                except StreamChanged:  # the identity came just now, and the outbox was another machine's
                    self._has_stream_changed = True
                    self._store_together(together)
            except Exception as error:  # noqa: BLE001  # the poll outlives everything
                self._has_stream_changed = True  # what the outbox has is read again
                trace = None if isinstance(error, BridgeError) else error
                message = f"A change could not be stored: {error}"
                self._report.problem("store", logging.ERROR, message, exc_info=trace)
            self.good_at, self._answered_at = together[-1][1].wall, together[-1][1].monotonic
        self._seen_before, self._known_ids = None, ()

    def _store_together(self, answers: Sequence[tuple[Document, Instant]]) -> None:
        self._follow_stream()
        observations = []
        for document, moment in answers:
            update = self._observe(document, moment)
            if update is not None and update.is_news:
                observations.append(self._observation(document, update, moment))
            if update is not None:
                self._tracker.commit(update)
                self._is_settled = update.is_settled
        if observations:
            records = self._outbox.write(self._outbox.records.append_observations, observations).result()
            self._note(records)

    def _recovered(self) -> None:
        self.refused_answer = None
        if self._failures:
            self._failures = 0
            self._report.recovered("imds", "The metadata service answers again.")

    def _failed(self, error: ImdsError) -> float:
        if self._stop.is_set():
            return 0.0  # the connection was closed under the poll, to end it
        self._failures += 1
        self._tracker.poll_failed()
        self.refused_answer = str(error) if isinstance(error, DocumentInvalid) else None
        self._report.problem("imds", logging.WARNING, str(error))
        status = error.status if isinstance(error, ImdsStatus) else None
        retry_after = error.retry_after_seconds if isinstance(error, ImdsStatus) else None
        return poll_delay(self._interval_seconds, failures=self._failures, status=status, retry_after=retry_after)

    def _process(self, document: Document, *, asked_at: float) -> None:
        """Store what *document*, a good answer, changes; then notify the approver, metrics and logs."""
        moment = self._clock.instant()
        if self.seen is not None:
            self.seen.add(document, moment)
        approvals = self.approvals
        update = self._take(document, moment)
        if approvals is not None:
            unsettled = frozenset[str]() if update is None or update.is_settled else _absent(update.document, document)
            approvals.observe(document, moment, asked_at=asked_at, unsettled=unsettled)
        self.good_at, self._answered_at = moment.wall, moment.monotonic
        self._metrics.good_poll(moment.wall.timestamp(), self._tracker.document or document)
        if moment.monotonic - self._saved_at >= _LIVENESS_SECONDS:
            self._save_liveness(wait=False)

    def _take(self, document: Document, moment: Instant) -> Update | None:
        """Store what *document*, seen at *moment*, changes; return what it means."""
        approvals = self.approvals
        update = self._observe(document, moment)
        if update is not None:
            if approvals is not None and update.changes:
                approvals.wait_for_submission([change.event.key for change in update.changes])
            self._store(document, update, moment)
        return update

    def _observe(self, document: Document, moment: Instant) -> Update | None:
        approvals = self.approvals
        approved = frozenset[str]() if approvals is None else approvals.approved
        vm_name = self._identity.vm.name or self._outbox.records.doubted_vm_name
        return self._tracker.observe(document, moment, vm_name=vm_name, approved=approved)

    def _store(self, document: Document, update: Update, moment: Instant) -> None:
        """Write *update* into the outbox, go on from it, and count and log its records."""
        records: list[TransitionRecord] = []
        if update.is_news:
            observation = self._observation(document, update, moment)
            records = self._outbox.write(self._outbox.records.append_observation, observation).result()
            self._report.recovered("store", "Changes are stored again.")
        self._tracker.commit(update)
        self._is_settled = update.is_settled
        self._note(records)

    def _observation(self, document: Document, update: Update, moment: Instant) -> Observation:
        return Observation(
            stream_id=self._stream_id,
            document=update.document,
            changes=update.changes,
            observed_at=moment.wall,
            incarnation=document.incarnation,
            previous_incarnation=self.incarnation,
            is_settled=update.is_settled,
            boot_id=self._boot_id,
        )

    def _note(self, records: Sequence[TransitionRecord]) -> None:
        """Count and log *records*, which are stored now."""
        for record in records:
            if record.id not in self._known_ids:
                self._metrics.recorded(record.transition)
                _log_record(record)
        if any(record.is_urgent for record in records):
            self._identity.expedite()

    def _save_liveness(self, *, wait: bool) -> None:
        """Store the time of the last good answer, unless an absence is in doubt: the doubt must outlive a restart."""
        if self.good_at is None or not self._is_settled:
            return
        self._saved_at = self._clock.monotonic()
        try:
            stored = self._outbox.write(
                self._outbox.records.save_liveness, last_good_at=self.good_at, boot_id=self._boot_id
            )
            if wait:
                stored.result()
        except BridgeError as error:
            logger.warning("The time of the last good answer could not be stored: %s", error)

    def _load(self) -> tuple[str, DocumentTracker]:
        """Return the id of the outbox's stream, and a tracker of the document that is stored there."""
        stored = self._outbox.read(meta.load).result()
        tracker = DocumentTracker(
            stored.document,
            last_good_at=stored.last_good_at,
            booted=has_booted(stored.boot_id, self._boot_id),
            booted_at=self._booted_at,
            gap_seconds=self.gap_seconds,
        )
        return stored.stream_id, tracker


def _absent(tracked: Document, document: Document) -> frozenset[str]:
    """Return the EventIds of the events in *tracked* that *document* lacks."""
    shown = {event.event_id for event in document.events}
    return frozenset(event.event_id for event in tracked.events if event.event_id and event.event_id not in shown)


def _reason(error: ImdsError) -> str:
    if isinstance(error, ImdsStatus):
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
