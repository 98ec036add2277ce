"""Records, counts, and logs the outcomes of approvals. Similar refusals share one record.

Anyone who controls the portal can send thousands of forged tokens. A record for each of them would page people again
and again, and evict other records. Therefore, only the first refusal for each reason produces a record immediately.
Further refusals for the same reason within a minute are combined into one record with a count.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from functools import partial

import msgspec

from bridge.approval.changes import ApprovalRecord, Changes
from bridge.clock import REAL_CLOCK, Clock
from bridge.events.event import Incarnation
from bridge.events.record import ApprovalResult, Transition, TransitionRecord, new_record
from bridge.metrics.metrics import Metrics
from bridge.outbox import approvals
from bridge.outbox.outbox import Outbox

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0


class _Refusals(msgspec.Struct, kw_only=True):
    first: ApprovalRecord | None = None
    count: int = 0
    quiet_until: float = -math.inf


class ApprovalRecorder:
    """Writes outcomes to *outbox* and reports them to *metrics*. Any thread can call `refuse`."""

    def __init__(self, outbox: Outbox, metrics: Metrics, *, clock: Clock = REAL_CLOCK) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._refusals: dict[str, _Refusals] = {}

    def refuse(self, refusals: Sequence[ApprovalRecord]) -> None:
        """Count *refusals*. A later call of `write` writes their records."""
        with self._lock:
            for refusal in refusals:
                known = self._refusals.setdefault(refusal.approval.result, _Refusals())
                known.first = known.first or refusal
                known.count += 1

    def write(self, changes: Changes, stream_id: str, incarnation: Incarnation) -> None:
        """Write *changes*, their records, and all due refusal records to the outbox in one step."""
        self.refuse(changes.refusals)
        outcomes = [*changes.records, *self._due()]
        if changes.is_empty and not outcomes:
            return
        new = [self._new_record(outcome, incarnation) for outcome in outcomes]
        first = partial(
            approvals.write_changes, stream_id=stream_id, approvals=changes.approvals, decisions=changes.decisions
        )
        self._report(self._outbox.append(new, first=first))

    def _new_record(self, outcome: ApprovalRecord, incarnation: Incarnation) -> TransitionRecord:
        jws_sha256 = self._outbox.read(approvals.token_digests, outcome.arrivals)
        return new_record(
            outcome.transition,
            self._outbox.clock.now(),
            event=outcome.event,
            incarnation=incarnation,
            previous_incarnation=incarnation,
            approval=msgspec.structs.replace(outcome.approval, jws_sha256=jws_sha256),
        )

    def _due(self) -> list[ApprovalRecord]:
        now = self._clock.monotonic()
        records = []
        with self._lock:
            for known in self._refusals.values():
                if known.first is not None and known.quiet_until <= now:
                    records.append(_counted(known.first, known.count))
                    known.first, known.count, known.quiet_until = None, 0, now + QUIET_SECONDS
        return records

    def _report(self, records: Sequence[TransitionRecord]) -> None:
        for record in records:
            self._metrics.recorded(record.transition)
            approval = record.approval
            if approval is None:
                continue
            self._metrics.approval(approval.source, approval.result)
            event_id = None if record.event is None else record.event.event_id
            message = f"{record.transition.value}: {approval.reason or approval.result}"
            if approval.result == ApprovalResult.ACCEPTED.value:
                reason = f" (reason: {approval.reason})" if approval.reason else ""
                message = f"Azure accepted the approval of event {event_id}{reason}."
            logger.log(
                logging.INFO if record.transition is Transition.APPROVED else logging.WARNING,
                "%s",
                message,
                extra={
                    "source": approval.source,
                    "result": approval.result,
                    "event_id": event_id,
                    "decision_id": approval.decision_id,
                    "approvers": list(approval.approvers),
                    "jws_sha256": list(approval.jws_sha256),
                },
            )


def _counted(refusal: ApprovalRecord, count: int) -> ApprovalRecord:
    if count == 1:
        return refusal
    reason = f"{refusal.approval.reason} ({count} decisions were refused for this reason. This is the first.)"
    return msgspec.structs.replace(refusal, approval=msgspec.structs.replace(refusal.approval, reason=reason))
