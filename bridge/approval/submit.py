"""The last step before Azure: what still stands in the way is looked at here, once more, right before each request.

An attempt is written before it is made, and its outcome is handed to the outbox before the poll may write what the
attempt caused. The file ``approvals.disabled`` in the state directory stops everything; so does a newer document, and a
decision that nobody has looked at yet: then the attempt that was counted is taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path

import msgspec

from bridge.approval.disabled import DISABLED_FILE, is_disabled
from bridge.approval.evaluate import ACCEPTED, DISABLED, DRY_RUN_RESULT, REJECTED, Evaluation, outcome_of
from bridge.approval.posting import Posted, Poster
from bridge.events.event import Document, Incarnation
from bridge.events.record import Transition, TransitionRecord
from bridge.logs import ThrottledLog
from bridge.outbox import approvals
from bridge.outbox.approvals import (
    DRY_RUN,
    FOLLOWED,
    WAITING,
    WANTED,
    ApprovalState,
    DecisionUpdate,
    Outcome,
    PendingApproval,
)
from bridge.outbox.outbox import Outbox

_LOOK_SECONDS = 60.0
_RETRY_SECONDS = 1.0


class Teller:
    """Tells Azure what is wanted, for one thread; *is_current* says whether a document is the latest and fresh."""

    def __init__(
        self,
        outbox: Outbox,
        poster: Poster,
        *,
        dry_run: bool,
        disabled_file: Path,
        is_current: Callable[[Document], bool],
        write: Callable[[Evaluation, str], None],
        heard: Callable[[Sequence[TransitionRecord]], None],
        report: ThrottledLog,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        self._outbox = outbox
        self._poster = poster
        self._dry_run = dry_run
        self._disabled_file = disabled_file
        self._is_current = is_current
        self._write = write
        self._heard = heard
        self._report = report
        self._now = now
        self._monotonic = monotonic

    def tell(self, state: ApprovalState, document: Document, answer_at: float) -> float:
        """Post what is due, given the fresh *document* of *answer_at*; return the seconds until something else is."""
        now = self._monotonic()
        wanted = [each for each in state.consents.values() if each.state == WANTED]
        self._poster.forget([each.key for each in wanted])
        due = [each for each in wanted if self._poster.due_at(each) <= now and self._poster.is_checked(each, answer_at)]
        if due and self._is_disabled():
            self._put_off(due, state.stream_id)
        elif due and self._dry_run:
            self._pretend(due, state.stream_id)
        elif due and not self._post(due, state.stream_id, document):
            return 0.0
        later = [self._poster.due_at(each) - self._monotonic() for each in wanted if each not in due]
        return max(min([*later, _RETRY_SECONDS]), 0.05) if wanted else _LOOK_SECONDS

    def _is_disabled(self) -> bool:
        if not is_disabled(self._disabled_file):
            self._report.recovered("disabled", f"The file {self._disabled_file} is gone; approvals go on.")
            return False
        self._report.problem("disabled", logging.WARNING, f"No approval is given while {self._disabled_file} exists.")
        return True

    def _put_off(self, due: Sequence[PendingApproval], stream_id: str) -> None:
        said = f"No approval is given while the file {DISABLED_FILE} is in the state directory."
        for each in due:
            self._poster.put_off(each, _RETRY_SECONDS)
        untold = [each for each in due if not each.is_told]
        if untold:
            told = [msgspec.structs.replace(each, is_told=True) for each in untold]
            outcomes = [
                outcome_of(each, Transition.APPROVAL_FAILED, DISABLED, event=each.event, said=said) for each in untold
            ]
            settled = _settled(untold, WAITING, DISABLED, said)
            self._write(Evaluation(consents=told, outcomes=outcomes, settled=settled), stream_id)

    def _pretend(self, due: Sequence[PendingApproval], stream_id: str) -> None:
        said = "dry_run: Azure would have been told."
        moment = self._now().timestamp()
        done = [msgspec.structs.replace(each, state=DRY_RUN, changed_at=moment) for each in due]
        outcomes = [outcome_of(each, Transition.APPROVED, DRY_RUN_RESULT, event=each.event, said=said) for each in due]
        settled = _settled(due, FOLLOWED, DRY_RUN_RESULT, said)
        self._write(Evaluation(consents=done, outcomes=outcomes, settled=settled), stream_id)

    def _post(self, due: Sequence[PendingApproval], stream_id: str, document: Document) -> bool:
        """Count the attempt, look once more, post and write down; return whether nothing came in between."""
        self._poster.takes_off(due)
        try:
            ready = self._outbox.write(approvals.begin_posting, stream_id, due, self._now().timestamp()).result()
            if not ready:
                return False
            if not self._is_current(document) or self._outbox.in_memory or self._is_disabled():
                counted = {each.key for each in ready}
                self._write(Evaluation(consents=[each for each in due if each.key in counted]), stream_id)
                return False
            posted = self._poster.post(ready, document.incarnation)
            pending = self._write_posted(posted, stream_id, document.incarnation)
        finally:
            self._poster.has_landed()
        self._heard(pending.result())
        return True

    def _write_posted(
        self, posted: Sequence[Posted], stream_id: str, incarnation: Incarnation
    ) -> Future[list[TransitionRecord]]:
        outcomes: list[Outcome] = []
        settled: list[DecisionUpdate] = []
        for each in posted:
            consent, status = each.consent, each.consent.http_status
            if each.is_accepted:
                self._report.recovered(consent.key, "Azure takes the approval now.", event_id=consent.event_id)
                outcomes.append(
                    outcome_of(consent, Transition.APPROVED, ACCEPTED, event=consent.event, http_status=status)
                )
                said = "Azure took the approval; it may still wait for others."
                settled += _settled([consent], FOLLOWED, ACCEPTED, said)
                continue
            self._report.problem(
                consent.key, logging.WARNING, f"Azure could not be told: {each.error}", event_id=consent.event_id
            )
            if each.is_news:
                said = f"{each.error} It is tried again until the event starts, changes or is held."
                outcomes.append(
                    outcome_of(
                        consent,
                        Transition.APPROVAL_FAILED,
                        REJECTED,
                        event=consent.event,
                        said=said,
                        http_status=status,
                    )
                )
                settled += _settled([consent], WAITING, REJECTED, said)
        return self._outbox.write(
            self._outbox.records.write_approvals,
            stream_id,
            consents=[each.consent for each in posted],
            settled=settled,
            outcomes=outcomes,
            incarnation=incarnation,
        )


def _settled(consents: Sequence[PendingApproval], state: str, outcome: str, said: str) -> list[DecisionUpdate]:
    return [
        DecisionUpdate(arrival=arrival, state=state, outcome=outcome, said=said)
        for consent in consents
        for arrival in consent.arrivals
    ]
