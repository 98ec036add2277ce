"""Sends StartRequests to Azure for approvals that are due, and handles the responses.

After a crash, the agent might send StartRequests twice for the same event. The second request is harmless.

- If Azure responds with 200, the event is approved.
- If Azure responds with another status, the agent writes one record and tries again. It stops when the event starts,
  changes, or is held.
- If Azure does not respond, the outcome is unknown. The agent tries again while the event is Scheduled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta

import msgspec

from bridge.approval.changes import Changes, approval_record
from bridge.approval.files import ApprovalFiles
from bridge.backoff import delivery_gap
from bridge.clock import REAL_CLOCK, Clock, Instant
from bridge.errors import ImdsError
from bridge.events.event import Document
from bridge.events.record import ApprovalResult, Transition
from bridge.imds.client import ImdsClient
from bridge.logs import ThrottledLog
from bridge.outbox.rows import ApprovalStage, DecisionStage, EventVersion, PendingApproval

logger = logging.getLogger(__name__)

_LONGEST_GAP_SECONDS = 30.0
_RETRY_SECONDS = 1.0


class Submitter:
    """Sends approvals through *imds*. Only one thread can use a submitter."""

    def __init__(self, imds: ImdsClient, files: ApprovalFiles, *, clock: Clock = REAL_CLOCK) -> None:
        self._imds = imds
        self._files = files
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)
        self._retry_at: dict[EventVersion, float] = {}
        """The earliest next attempt, in monotonic seconds."""

    def due(self, approvals: Iterable[PendingApproval]) -> list[PendingApproval]:
        """Return the *approvals* that are due for a request."""
        wanted = [each for each in approvals if each.state is ApprovalStage.WANTED]
        now = self._clock.monotonic()
        self._retry_at = {each.key: self._retry_at.get(each.key, now) for each in wanted}
        return [each for each in wanted if self._retry_at[each.key] <= now]

    def put_off(self, due: Sequence[PendingApproval]) -> Changes | None:
        """Return the changes that postpone *due* if approvals are disabled, and otherwise None."""
        disabled = self._files.why_disabled()
        if disabled is None:
            return None
        (why, message), result = disabled, Changes()
        for each in due:
            self._retry_at[each.key] = self._clock.monotonic() + _RETRY_SECONDS
            if not each.is_told:
                result.approvals.append(msgspec.structs.replace(each, is_told=True))
                failed, waits = Transition.APPROVAL_FAILED, DecisionStage.WAITING
                result.add_outcome(each, failed, why, decisions=waits, message=message)
        return result

    def pretend(self, due: Sequence[PendingApproval]) -> Changes:
        """Return the changes of a dry run, without sending a request."""
        message = "dry_run: the approval would have been posted."
        why, followed, result = ApprovalResult.DRY_RUN, DecisionStage.FOLLOWED, Changes()
        for each in due:
            done = msgspec.structs.replace(each, state=ApprovalStage.DRY_RUN, changed_at=self._clock.timestamp())
            result.approvals.append(done)
            result.add_outcome(each, Transition.APPROVED, why, decisions=followed, message=message)
        return result

    def last_look(self) -> tuple[Document, Instant] | None:
        """Return the current document and its time, or None if IMDS does not respond.

        The method adds the time that has passed on the monotonic clock to the time of the request. If the VM was paused
        in between, the result is earlier than the wall clock, so the response counts as old.
        """
        asked_at = self._clock.instant()
        try:
            document = self._imds.scheduled_events_again()
        except ImdsError as error:
            self._log.problem(
                "look",
                logging.WARNING,
                f"Nothing is approved, because the agent could not get the current events from IMDS. {error}",
                kind="look",
            )
            return None
        self._log.recovered("look", "The metadata service responds again, so approvals are possible.")
        monotonic = self._clock.monotonic()
        wall = asked_at.wall + timedelta(seconds=monotonic - asked_at.monotonic)
        return document, Instant(wall=wall, monotonic=monotonic)

    def withhold(self, approval: PendingApproval) -> None:
        """Postpone *approval* by one second, because it must not be sent yet."""
        self._retry_at[approval.key] = self._clock.monotonic() + _RETRY_SECONDS
        message = "The approval is withheld. The outbox is not saved, or the newest document does not allow it."
        self._log.problem(approval.key, logging.INFO, message, event_id=approval.event_id)

    def post(self, approval: PendingApproval, document: Document) -> Changes:
        """Send StartRequests for *approval*, and return the changes for the outcome.

        *document* is the result of `last_look`. The request uses its api-version.
        """
        try:
            status = self._imds.start_requests([approval.event_id], document=document)
        except ImdsError as error:
            return self._failed(approval, error)
        return self._accepted(approval, status)

    def _accepted(self, approval: PendingApproval, status: int) -> Changes:
        self._log.recovered(approval.key, "Azure has accepted the approval.", event_id=approval.event_id)
        posted = msgspec.structs.replace(
            approval, state=ApprovalStage.POSTED, http_status=status, changed_at=self._clock.timestamp()
        )
        accepted, result = ApprovalResult.ACCEPTED, Changes(approvals=[posted])
        result.records.append(approval_record(posted, Transition.APPROVED, accepted))
        message = "Azure accepted the approval. Azure may still wait for VMs of other customers on the same host."
        result.update_decisions(posted.arrivals, DecisionStage.FOLLOWED, accepted.value, message)
        return result

    def _failed(self, approval: PendingApproval, error: ImdsError) -> Changes:
        self._log.problem(
            approval.key,
            logging.WARNING,
            f"The approval could not be posted: {error}",
            kind="post",
            event_id=approval.event_id,
        )
        self._back_off(approval, error.retry_after_seconds)
        is_told = approval.is_told or error.status is not None
        failed = msgspec.structs.replace(
            approval, http_status=error.status, is_told=is_told, changed_at=self._clock.timestamp()
        )
        result = Changes(approvals=[failed])
        if is_told and not approval.is_told:
            message = f"{error} The agent tries again until the event starts, changes, or is held."
            why, waits = ApprovalResult.REJECTED, DecisionStage.WAITING
            result.add_outcome(failed, Transition.APPROVAL_FAILED, why, decisions=waits, message=message)
        return result

    def _back_off(self, approval: PendingApproval, retry_after: float | None) -> None:
        not_before = approval.event.not_before
        gap = delivery_gap(
            approval.attempts,
            seconds_to_not_before=None if not_before is None else (not_before - self._clock.now()).total_seconds(),
            urgent=approval.event.is_urgent,
            retry_after=retry_after,
            random=self._clock.random,
        )
        if retry_after is None:
            gap = min(gap, _LONGEST_GAP_SECONDS)
        self._retry_at[approval.key] = self._clock.monotonic() + gap
