"""Submission: StartRequests for the approvals that are due, and the meaning of Azure's response.

An attempt is counted and saved before the request, so after a crash the agent knows that Azure may have accepted the
approval. A second request for the same EventId does no harm.

    200                 approved
    another status      failed; recorded once, and tried again until the event starts, changes, or is held
    no response         unknown; tried again when a newer document shows the event as Scheduled

Right before each request, the agent gets the document once more (the last look). Only approvals that this response
allows go into the request. The others are withheld, and tried again a second later.

One EventId that Azure does not know makes Azure refuse the whole request. After a 4xx, each approval therefore gets a
request of its own. While a request is on its way, and until its outcome is written (`Submitter.in_flight`), the poll
can wait (`Submitter.wait_for`), so that the record `approved` precedes the `started` that it caused.

Two conditions prevent all requests: the file ``approvals.disabled`` in the state directory, and unsafe permissions of a
file that determines who may approve (`bridge.approval.files`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bridge.approval.evaluation import Evaluation, approval_record
from bridge.backoff import delivery_gap
from bridge.clock import REAL_CLOCK, Clock, Instant
from bridge.errors import ImdsError, ImdsStatus
from bridge.events.event import Document, Incarnation
from bridge.events.record import Transition
from bridge.logs import ThrottledLog
from bridge.outbox.approvals import DISABLED_FILE
from bridge.outbox.rows import ApprovalResult, ApprovalStage, DecisionStage, EventVersion, PendingApproval

if TYPE_CHECKING:  # `status` imports this module, and needs no HTTP
    from bridge.imds.client import ImdsClient

logger = logging.getLogger(__name__)

_TOO_MANY_REQUESTS = 429
_LONGEST_GAP_SECONDS = 30.0
_MOST_IN_A_REQUEST = 50
_IDLE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_MINIMUM_WAIT_SECONDS = 0.05


def is_disabled(directory: Path) -> bool:
    """Return whether ``approvals.disabled`` is in the state *directory*, or its absence cannot be confirmed."""
    try:
        (directory / DISABLED_FILE).lstat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """The document right before a request, and the time of the response."""

    document: Document
    answered_at: Instant
    """The wall time of the request plus the monotonic seconds of the call: a pause of the VM makes it older."""


def batches(approvals: Sequence[PendingApproval]) -> list[Sequence[PendingApproval]]:
    """Return *approvals* in parts of at most one request."""
    return [approvals[start : start + _MOST_IN_A_REQUEST] for start in range(0, len(approvals), _MOST_IN_A_REQUEST)]


class _Attempt(msgspec.Struct, kw_only=True):
    """The last request for an approval and the earliest next one, in monotonic seconds."""

    made_at: float = -math.inf
    retry_at: float = -math.inf


class Submitter:
    """Posts approvals with *imds*; for one thread, except `wait_for` and `events_in_flight`.

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
        self._attempts: dict[EventVersion, _Attempt] = {}
        self._gap_seconds = _RETRY_SECONDS
        self._landed = threading.Condition()
        self._in_flight: frozenset[str] = frozenset()

    # When.

    def due(self, approvals: Iterable[PendingApproval], answered_at: float) -> list[PendingApproval]:
        """Return the approvals that are due by a document of *answered_at* (monotonic seconds).

        After an attempt, an approval waits for a newer document.
        """
        wanted = _wanted(approvals)
        self._attempts = {each.key: self._attempts.get(each.key) or _Attempt() for each in wanted}
        now = self._clock.monotonic()
        return [
            each
            for each in wanted
            if self._attempts[each.key].retry_at <= now and self._attempts[each.key].made_at < answered_at
        ]

    def wait_seconds(self, approvals: Iterable[PendingApproval]) -> float:
        """Return the seconds until one of *approvals* may be due."""
        wanted = _wanted(approvals)
        if not wanted:
            return _IDLE_SECONDS
        now = self._clock.monotonic()
        waits = [self._attempt(each).retry_at - now for each in wanted]
        return max(min([wait for wait in waits if wait > 0] + [_RETRY_SECONDS]), _MINIMUM_WAIT_SECONDS)

    # Instead of a request.

    def is_disabled(self) -> bool:
        """Return whether ``approvals.disabled`` or unsafe permissions prevent all requests."""
        return self._why_disabled() is not None

    def _why_disabled(self) -> tuple[ApprovalResult, str] | None:
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
        disabled = self._why_disabled()
        if disabled is not None:
            return self._put_off(due, *disabled)
        return self._pretend(due) if self._dry_run else None

    def _put_off(self, due: Sequence[PendingApproval], why: ApprovalResult, message: str) -> Evaluation:
        result = Evaluation()
        for each in due:
            self._attempt(each).retry_at = self._clock.monotonic() + _RETRY_SECONDS
            since = self._clock.timestamp() if why is ApprovalResult.DISABLED else None
            told = msgspec.structs.replace(each, is_told=True, put_off_at=each.put_off_at or since)
            if told != each:
                result.approvals.append(told)
            if not each.is_told:
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

    # The order of records.

    @contextmanager
    def in_flight(self, approvals: Iterable[PendingApproval]) -> Iterator[None]:
        """Mark *approvals* as on their way to Azure until the outcome is written."""
        with self._landed:
            self._in_flight = frozenset(each.event_id for each in approvals)
        try:
            yield
        finally:
            with self._landed:
                self._in_flight = frozenset()
                self._landed.notify_all()

    @property
    def events_in_flight(self) -> frozenset[str]:
        """Return the keys of the events with a request on its way."""
        return self._in_flight

    def wait_for(self, event_keys: Collection[str], timeout_seconds: float) -> None:
        """Wait until no request about *event_keys* is on its way, at most *timeout_seconds*."""
        if not self._in_flight:
            return
        with self._landed:
            self._landed.wait_for(lambda: self._in_flight.isdisjoint(event_keys), timeout_seconds)

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
            )
            if isinstance(error, ImdsStatus) and error.retry_after_seconds is not None:
                self._gap_seconds = min(max(error.retry_after_seconds, _RETRY_SECONDS), _LONGEST_GAP_SECONDS)
            return None
        self._log.recovered("look", "The metadata service responds before approvals again.")
        monotonic = self._clock.monotonic()
        wall = asked_at.wall + timedelta(seconds=monotonic - asked_at.monotonic)
        return LastLook(document=document, answered_at=Instant(wall=wall, monotonic=monotonic))

    def withhold(self, approvals: Iterable[PendingApproval], why: str) -> None:
        """Let *approvals* wait for a moment before the next attempt, because of *why*."""
        for each in approvals:
            self._attempt(each).retry_at = self._clock.monotonic() + self._gap_seconds
            self._log.problem(each.key, logging.INFO, f"The approval is withheld. {why}", event_id=each.event_id)

    def post(
        self, approvals: Sequence[PendingApproval], incarnation: Incarnation, result: Evaluation
    ) -> list[Sequence[PendingApproval]]:
        """Post *approvals* in one request, and add the outcomes to *result*.

        Return the approvals to post again, each in a separate request, if one of them may be why Azure refused all.
        """
        try:
            status = self._imds.start_requests([each.event_id for each in approvals], incarnation=incarnation)
        except ImdsStatus as error:
            about_one_of_them = 400 <= error.status < 500 and error.status != _TOO_MANY_REQUESTS  # noqa: PLR2004
            if about_one_of_them and len(approvals) > 1:
                return [[each] for each in approvals]
            for each in approvals:
                self._failed(each, error, result, status=error.status, retry_after=error.retry_after_seconds)
        except ImdsError as error:
            for each in approvals:
                self._failed(each, error, result, status=None, retry_after=None)
        else:
            for each in approvals:
                self._accepted(each, status, result)
        return []

    def _accepted(self, approval: PendingApproval, status: int, result: Evaluation) -> None:
        self._log.recovered(approval.key, "Azure accepts the approval now.", event_id=approval.event_id)
        moment = self._clock.timestamp()
        was_posted = approval.posted_at is not None
        posted = msgspec.structs.replace(
            approval,
            state=ApprovalStage.POSTED,
            http_status=status,
            posted_at=approval.posted_at if was_posted else moment,
            changed_at=moment,
        )
        result.approvals.append(posted)
        again = "Azure accepted an approval of this event before, and accepted it again." if was_posted else None
        result.records.append(
            approval_record(posted, Transition.APPROVED, ApprovalResult.ACCEPTED, message=again, http_status=status)
        )
        message = again or "Azure accepted the approval. It may still wait for other VMs."
        result.update_decisions(posted.arrivals, DecisionStage.FOLLOWED, ApprovalResult.ACCEPTED.value, message)

    def _failed(
        self,
        approval: PendingApproval,
        error: ImdsError,
        result: Evaluation,
        *,
        status: int | None,
        retry_after: float | None,
    ) -> None:
        self._log.problem(
            approval.key, logging.WARNING, f"The approval could not be posted: {error}", event_id=approval.event_id
        )
        self._back_off(approval, retry_after)
        is_told = approval.is_told or status is not None
        failed = msgspec.structs.replace(
            approval, http_status=status, is_told=is_told, changed_at=self._clock.timestamp()
        )
        result.approvals.append(failed)
        if is_told and not approval.is_told:
            message = f"{error} The agent tries again until the event starts, changes, or is held."
            result.records.append(
                approval_record(
                    failed, Transition.APPROVAL_FAILED, ApprovalResult.REJECTED, message=message, http_status=status
                )
            )
            result.update_decisions(failed.arrivals, DecisionStage.WAITING, ApprovalResult.REJECTED.value, message)

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
        attempt = self._attempt(approval)
        attempt.made_at = self._clock.monotonic()
        attempt.retry_at = attempt.made_at + gap

    def _attempt(self, approval: PendingApproval) -> _Attempt:
        return self._attempts.setdefault(approval.key, _Attempt())


def _wanted(approvals: Iterable[PendingApproval]) -> list[PendingApproval]:
    return [each for each in approvals if each.state is ApprovalStage.WANTED]
