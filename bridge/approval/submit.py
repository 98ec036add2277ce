"""Sends a StartRequests for each due approval, and interprets the response of Azure.

An attempt is counted and saved before the request, so after a crash the agent knows that Azure may have accepted the
approval. A second request for the same EventId does no harm.

    200                 approved
    another status      failed; recorded once, and tried again until the event starts, changes, or is held
    no response         unknown; tried again while a newer document shows the event as Scheduled

Right before each request, the agent gets the document once more (the last look). If this response does not allow the
approval, the approval is withheld, and tried again a second later.

Two conditions prevent all requests: the file ``approvals.disabled`` in the state directory, and unsafe permissions of a
file that determines who may approve (`bridge.approval.files`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec

from bridge.approval.evaluation import Evaluation, approval_record
from bridge.approval.files import is_disabled
from bridge.backoff import delivery_gap
from bridge.clock import REAL_CLOCK, Clock, Instant
from bridge.errors import ImdsError, ImdsStatus
from bridge.events.event import Document, Incarnation
from bridge.events.record import Transition
from bridge.imds.client import ImdsClient
from bridge.logs import ThrottledLog
from bridge.outbox.approvals import DISABLED_FILE
from bridge.outbox.rows import ApprovalResult, ApprovalStage, DecisionStage, EventVersion, PendingApproval

logger = logging.getLogger(__name__)

_LONGEST_GAP_SECONDS = 30.0
_RETRY_SECONDS = 1.0


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """The document right before a request, and the time of the response."""

    document: Document
    answered_at: Instant
    """The wall time of the request plus the monotonic seconds of the call: a pause of the VM makes it older."""


class Submitter:
    """Posts approvals with *imds*; for one thread.

    *directory* is the state directory. *why_unsafe* returns a sentence about files that other users can write, None if
    there are none.
    """

    def __init__(
        self,
        imds: ImdsClient,
        directory: Path,
        *,
        why_unsafe: Callable[[], str | None],
        dry_run: bool,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._imds = imds
        self._directory = directory
        self._why_unsafe = why_unsafe
        self._dry_run = dry_run
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)
        self._retry_at: dict[EventVersion, float] = {}
        """The earliest next attempt, in monotonic seconds."""
        self._gap_seconds = _RETRY_SECONDS

    def due(self, approvals: Iterable[PendingApproval]) -> list[PendingApproval]:
        """Return the wanted ones among *approvals* that are due."""
        wanted = [each for each in approvals if each.state is ApprovalStage.WANTED]
        now = self._clock.monotonic()
        self._retry_at = {each.key: self._retry_at.get(each.key, now) for each in wanted}
        return [each for each in wanted if self._retry_at[each.key] <= now]

    # Instead of a request.

    def why_disabled(self) -> tuple[ApprovalResult, str] | None:
        """Return why ``approvals.disabled`` or unsafe permissions prevent all requests; None if they do not."""
        file = self._directory / DISABLED_FILE
        if is_disabled(self._directory):
            self._log.problem("disabled", logging.WARNING, f"Nothing is approved while {file} exists.")
            message = f"Nothing is approved while the file {DISABLED_FILE} is in the state directory."
            return ApprovalResult.DISABLED, message
        self._log.recovered("disabled", f"The file {file} was deleted. Approvals are possible again.")
        why = self._why_unsafe()
        return None if why is None else (ApprovalResult.UNSAFE_FILES, f"Nothing is approved. {why}")

    def instead_of_posting(self, due: Sequence[PendingApproval]) -> Evaluation | None:
        """Return the changes instead of a request if approvals are disabled or a dry run; None to post."""
        put_off = self.put_off(due)
        return self._pretend(due) if put_off is None and self._dry_run else put_off

    def put_off(self, due: Sequence[PendingApproval]) -> Evaluation | None:
        """Return the changes while approvals are disabled; None while they are possible."""
        disabled = self.why_disabled()
        if disabled is None:
            return None
        (why, message), result = disabled, Evaluation()
        for each in due:
            self._retry_at[each.key] = self._clock.monotonic() + _RETRY_SECONDS
            if not each.is_told:
                result.approvals.append(msgspec.structs.replace(each, is_told=True))
                result.records.append(approval_record(each, Transition.APPROVAL_FAILED, why, message=message))
                result.update_decisions(each.arrivals, DecisionStage.WAITING, why.value, message)
        return result

    def _pretend(self, due: Sequence[PendingApproval]) -> Evaluation:
        message = "dry_run: the approval would have been posted."
        result = Evaluation()
        for each in due:
            done = msgspec.structs.replace(each, state=ApprovalStage.DRY_RUN, changed_at=self._clock.timestamp())
            result.approvals.append(done)
            result.records.append(approval_record(each, Transition.APPROVED, ApprovalResult.DRY_RUN, message=message))
            result.update_decisions(each.arrivals, DecisionStage.FOLLOWED, ApprovalResult.DRY_RUN.value, message)
        return result

    # The request.

    def last_look(self) -> LastLook | None:
        """Request the document right before a `post`; return None without a response."""
        asked_at = self._clock.instant()
        self._gap_seconds = _RETRY_SECONDS
        try:
            document = self._imds.scheduled_events_again()
        except ImdsError as error:
            self._log.problem(
                "look",
                logging.WARNING,
                f"Nothing is approved, because the metadata service did not respond before the request. {error}",
                kind="look",
            )
            if isinstance(error, ImdsStatus) and error.retry_after_seconds is not None:
                self._gap_seconds = min(max(error.retry_after_seconds, _RETRY_SECONDS), _LONGEST_GAP_SECONDS)
            return None
        self._log.recovered("look", "The metadata service responds before approvals again.")
        monotonic = self._clock.monotonic()
        wall = asked_at.wall + timedelta(seconds=monotonic - asked_at.monotonic)
        return LastLook(document=document, answered_at=Instant(wall=wall, monotonic=monotonic))

    def withhold(self, approval: PendingApproval, why: str) -> None:
        """Let *approval* wait for a moment before the next attempt, because of *why*."""
        self._retry_at[approval.key] = self._clock.monotonic() + self._gap_seconds
        message = f"The approval is withheld. {why}"
        self._log.problem(approval.key, logging.INFO, message, event_id=approval.event_id)

    def post(self, approval: PendingApproval, incarnation: Incarnation) -> Evaluation:
        """Post *approval*; return the outcome."""
        try:
            status = self._imds.start_requests([approval.event_id], incarnation=incarnation)
        except ImdsStatus as error:
            return self._failed(approval, error, status=error.status, retry_after=error.retry_after_seconds)
        except ImdsError as error:
            return self._failed(approval, error, status=None, retry_after=None)
        return self._accepted(approval, status)

    def _accepted(self, approval: PendingApproval, status: int) -> Evaluation:
        self._log.recovered(approval.key, "Azure accepts the approval now.", event_id=approval.event_id)
        posted = msgspec.structs.replace(
            approval, state=ApprovalStage.POSTED, http_status=status, changed_at=self._clock.timestamp()
        )
        accepted, result = ApprovalResult.ACCEPTED, Evaluation(approvals=[posted])
        result.records.append(approval_record(posted, Transition.APPROVED, accepted, http_status=status))
        message = "Azure accepted the approval. It may still wait for other VMs."
        result.update_decisions(posted.arrivals, DecisionStage.FOLLOWED, accepted.value, message)
        return result

    def _failed(
        self, approval: PendingApproval, error: ImdsError, *, status: int | None, retry_after: float | None
    ) -> Evaluation:
        self._log.problem(
            approval.key,
            logging.WARNING,
            f"The approval could not be posted: {error}",
            kind="post",
            event_id=approval.event_id,
        )
        self._back_off(approval, retry_after)
        is_told = approval.is_told or status is not None
        failed = msgspec.structs.replace(
            approval, http_status=status, is_told=is_told, changed_at=self._clock.timestamp()
        )
        result = Evaluation(approvals=[failed])
        if is_told and not approval.is_told:
            why = ApprovalResult.REJECTED
            message = f"{error} The agent tries again until the event starts, changes, or is held."
            result.records.append(
                approval_record(failed, Transition.APPROVAL_FAILED, why, message=message, http_status=status)
            )
            result.update_decisions(failed.arrivals, DecisionStage.WAITING, why.value, message)
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
