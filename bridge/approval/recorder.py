"""Writes the outcomes of approvals, counts and logs each of their records, and limits the records of refusals.

A stranger can send ten thousand forgeries. These forgeries must not evict real records or page people ten thousand
times, so refusals produce at most one record per minute and reason, with a count.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from bridge.approval.evaluation import Evaluation, Refusal
from bridge.clock import REAL_CLOCK, Clock
from bridge.errors import RefusalReason
from bridge.events.event import Document, Incarnation
from bridge.events.record import Approval, Transition, TransitionRecord
from bridge.metrics.metrics import Metrics
from bridge.outbox import approvals
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import ApprovalRecord, ApprovalStage, PendingApproval

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0


class ApprovalRecorder:
    """Writes to *outbox* and reports to *metrics*."""

    def __init__(self, outbox: Outbox, metrics: Metrics, *, clock: Clock) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._refusals = RefusalLimiter(clock)
        self._posted_at: list[tuple[str, float]] = []

    def wait_seconds(self) -> float:
        """Return the seconds until the record of a refusal is due."""
        return self._refusals.wait_seconds()

    def refuse(self, refusals: Sequence[Refusal], document: Document | None) -> None:
        """Count *refusals*, with the events in *document* that they name."""
        events = {} if document is None or not refusals else {event.event_id: event for event in document.events}
        for refusal in refusals:
            event = refusal.event
            if event is None and refusal.event_id is not None:
                event = events.get(refusal.event_id)
            self._refusals.add(msgspec.structs.replace(refusal, event=event))

    def write(self, evaluation: Evaluation, stream_id: str, incarnation: Incarnation) -> None:
        """Write *evaluation* and its records in one change."""
        for refusal in evaluation.refusals:
            self._refusals.add(refusal)
        store = partial(
            approvals.write_changes,
            stream_id=stream_id,
            approvals=evaluation.approvals,
            decisions=evaluation.decisions,
        )
        outcomes = [*evaluation.records, *self._refusals.take()]
        written = self._outbox.append_outcomes(outcomes, incarnation=incarnation, first=store)
        self.report(written)

    def write_refusals(self, incarnation: Incarnation) -> None:
        """Write the records of refusals that are due."""
        if outcomes := self._refusals.take():
            self.report(self._outbox.append_outcomes(outcomes, incarnation=incarnation))

    def report(self, records: Sequence[TransitionRecord]) -> None:
        """Count and log *records* about approvals."""
        for record in records:
            self._metrics.recorded(record.transition)
            approval = record.approval
            if approval is None:
                continue
            self._metrics.approval(approval.source, approval.result)
            logger.log(
                logging.INFO if record.transition is Transition.APPROVED else logging.WARNING,
                "%s: %s",
                record.transition.value,
                approval.reason or approval.result,
                extra={
                    "source": approval.source,
                    "result": approval.result,
                    "event_id": None if record.event is None else record.event.event_id,
                    "decision_id": approval.decision_id,
                    "approvers": list(approval.approvers),
                    "jws_sha256": list(approval.jws_sha256),
                },
            )

    def follow(self, approvals: Iterable[PendingApproval]) -> None:
        """Note the *approvals* that Azure has accepted."""
        posted = [each for each in approvals if each.state is ApprovalStage.POSTED]
        self._posted_at = [(each.event_id, each.posted_at) for each in posted if each.posted_at is not None]

    def waiting_seconds(self, document: Document | None) -> float:
        """Return for how long the oldest accepted approval has waited for its event to start."""
        if document is None:
            return 0.0
        scheduled = {each.event_id for each in document.events if each.event_status == "Scheduled"}
        since = [posted_at for event_id, posted_at in self._posted_at if event_id in scheduled]
        return max(self._clock.timestamp() - min(since), 0.0) if since else 0.0


class _Refusals(msgspec.Struct, kw_only=True):
    """The refusals of one reason that are not recorded yet."""

    first: Refusal | None = None
    count: int = 0
    quiet_until: float = -math.inf


class RefusalLimiter:
    """Counts refusals by reason and returns their records. Safe to use from several threads.

    The first refusal of a reason produces a record at once. The refusals of the following minute produce one record.
    """

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_reason: dict[RefusalReason, _Refusals] = {}

    def add(self, refusal: Refusal) -> None:
        """Count one refusal."""
        with self._lock:
            refusals = self._by_reason.setdefault(refusal.reason, _Refusals())
            refusals.first = refusals.first or refusal
            refusals.count += 1

    def take(self) -> list[ApprovalRecord]:
        """Return the records that are due."""
        now = self._clock.monotonic()
        records = []
        with self._lock:
            for refusals in self._by_reason.values():
                if refusals.first is not None and refusals.quiet_until <= now:
                    records.append(_record(refusals.first, refusals.count))
                    refusals.first, refusals.count, refusals.quiet_until = None, 0, now + QUIET_SECONDS
        return records

    def wait_seconds(self) -> float:
        """Return the seconds until a record is due; infinity without refusals."""
        with self._lock:
            waiting = [each.quiet_until for each in self._by_reason.values() if each.count]
        return max(min(waiting, default=math.inf) - self._clock.monotonic(), 0.0)


def _record(refusal: Refusal, count: int) -> ApprovalRecord:
    message = refusal.message
    if count > 1:
        message = f"{message} ({count} decisions were refused for this reason; this is the first of them.)"
    return ApprovalRecord(
        transition=Transition.APPROVAL_REFUSED,
        event=refusal.event,
        approval=Approval(
            source=refusal.source,
            decision_id=refusal.decision_id,
            approvers=refusal.approvers,
            reason=message,
            result=refusal.reason.value,
        ),
        arrivals=refusal.arrivals,
    )
