"""Writes what became of decisions and approvals, and counts and logs each record of it.

Refusals of a kind become one record a minute (`RefusalLimiter`): a flood of forgeries is told, and fills nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import msgspec

from bridge.approval.inbox import RefusalLimiter
from bridge.approval.outcomes import Evaluation, Refusal
from bridge.clock import Clock
from bridge.events.event import Document, Incarnation
from bridge.events.record import Transition, TransitionRecord
from bridge.metrics.metrics import Metrics
from bridge.outbox.approvals import ApprovalStage, PendingApproval
from bridge.outbox.outbox import Outbox


class ApprovalWriter:
    """Hands to *outbox* what is to be written, and tells *metrics* and *logger* of it."""

    def __init__(self, outbox: Outbox, metrics: Metrics, logger: logging.Logger, *, clock: Clock) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._refusals = RefusalLimiter(clock)
        self._posted_at: list[tuple[str, float]] = []

    def wait_seconds(self) -> float:
        """Return the seconds until refusals that were held back may be written."""
        return self._refusals.wait_seconds()

    def refuse(self, refusals: Sequence[Refusal], document: Document | None) -> None:
        """Count *refusals*, with the event that each names, as far as *document* has it."""
        events = {} if document is None or not refusals else {event.event_id: event for event in document.events}
        for refusal in refusals:
            event = refusal.event
            if event is None and refusal.event_id is not None:
                event = events.get(refusal.event_id)
            self._refusals.add(msgspec.structs.replace(refusal, event=event))

    def write(self, evaluation: Evaluation, stream_id: str, incarnation: Incarnation) -> None:
        """Write *evaluation*, unless it is empty, and announce its records."""
        if not evaluation.is_empty:
            self.announce(self.begin_write(evaluation, stream_id, incarnation).result())

    def begin_write(
        self, evaluation: Evaluation, stream_id: str, incarnation: Incarnation
    ) -> Future[list[TransitionRecord]]:
        """Hand *evaluation* to the outbox, in one transaction with its records."""
        for refusal in evaluation.refusals:
            self._refusals.add(refusal)
        return self._outbox.write(
            self._outbox.records.write_approvals,
            stream_id,
            pending=evaluation.approvals,
            decisions=evaluation.decisions,
            outcomes=[*evaluation.records, *self._refusals.take()],
            incarnation=incarnation,
        )

    def write_refusals(self, incarnation: Incarnation) -> None:
        """Write the refusals whose time has come."""
        if records := self._refusals.take():
            append = self._outbox.records.append_outcomes
            self.announce(self._outbox.write(append, records, incarnation=incarnation).result())

    def announce(self, records: Sequence[TransitionRecord]) -> None:
        """Count and log *records* about approvals."""
        for record in records:
            self._metrics.recorded(record.transition)
            approval = record.approval
            if approval is None:
                continue
            self._metrics.approval(approval.source, approval.result)
            self._logger.log(
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
        """Take over from *approvals* when Azure took which."""
        posted = [each for each in approvals if each.state is ApprovalStage.POSTED]
        self._posted_at = [(each.event_id, each.posted_at) for each in posted if each.posted_at is not None]

    def waiting_seconds(self, document: Document | None) -> float:
        """Return how long the approval waits that Azure took first and has not acted on yet."""
        if document is None:
            return 0.0
        scheduled = {each.event_id for each in document.events if each.event_status == "Scheduled"}
        since = [posted_at for event_id, posted_at in self._posted_at if event_id in scheduled]
        return max(self._clock.timestamp() - min(since), 0.0) if since else 0.0
