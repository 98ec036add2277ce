"""On any doubt the agent does nothing, and says why. This is where that is kept.

Persist the decision; check it against an answer of the metadata service that is not older than 3 s; count the attempt;
POST; record the outcome. Each step is in the outbox before the next begins, so a crash anywhere leaves a state from
which the same approval goes on, and no other. It is tried again until the event starts, changes or is held.

One thread does all of that, woken by a decision, by a document that changed, by a command that wrote beside the agent,
or by its own clock. It never holds up the poll but for one case: a poll that sees an event change while StartRequests
for that event is on its way waits up to a second, so that `approved` is written before the `started` that it caused.
Nothing that fails here reaches the poll or a sink.

Nothing is posted while the outbox lives in memory, while the file ``approvals.disabled`` is in the state directory, or
without this VM's own answer of a moment ago.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from bridge.approval.disabled import DISABLED_FILE
from bridge.approval.evaluate import (
    COMMAND_FAILED_RESULT,
    DocumentIndex,
    Evaluation,
    Refusal,
    judge,
    newest_hold,
    outcome_of,
    view,
)
from bridge.approval.inbox import DecisionInbox
from bridge.approval.posting import Imds, Poster
from bridge.approval.refusal_limiter import RefusalLimiter
from bridge.approval.rule_commands import RuleCommands
from bridge.approval.rule_engine import RuleEngine
from bridge.approval.submit import Teller
from bridge.clock import Instant, utc_now
from bridge.config.approval import ApprovalSettings
from bridge.errors import BridgeError, OutboxReadOnly
from bridge.events.event import Document, Incarnation, VmIdentity
from bridge.events.record import Transition, TransitionRecord
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import Metrics
from bridge.outbox import approvals, deliveries
from bridge.outbox.approvals import COMMAND_FAILED, DRAINING, POSTED, WANTED, ApprovalState
from bridge.outbox.outbox import Outbox

logger = logging.getLogger(__name__)

FRESH_SECONDS = 3.0
_WAIT_FOR_POST_SECONDS = 1.0
_LOOK_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_PRUNE_SECONDS = 3600.0
#: A judgement follows from the one before; more turns than this mean that two of them contradict each other.
_MOST_TURNS = 20


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    document: Document
    moment: Instant


class Approver:
    """Follows decisions and rules on one VM; *directory* is the state directory, *vm* says who this VM is.

    With *on_request_only* rules begin nothing: somebody asked for one approval.
    """

    def __init__(
        self,
        settings: ApprovalSettings,
        outbox: Outbox,
        imds: Imds,
        *,
        vm: Callable[[], VmIdentity],
        directory: Path,
        metrics: Metrics,
        on_request_only: bool = False,
        now: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._on_request_only = on_request_only
        self._outbox = outbox
        self._metrics = metrics
        self._now = now
        self._monotonic = monotonic
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="approver", daemon=True)
        self._answer: _Answer | None = None
        self._wants_answer = False
        self._seen: tuple[Document, DocumentIndex] | None = None
        self._report = ThrottledLog(logger)
        self._refusals = RefusalLimiter(monotonic)
        remote = settings.remote
        self._required = 1 if remote is None else remote.required_approvals
        self._intake = DecisionInbox(
            () if remote is None else remote.trusted_keys(),
            outbox,
            vm_id=lambda: vm().vm_id,
            refuse=self._refuse,
            now=now,
        )
        self._poster = Poster(imds, now=now, monotonic=monotonic, chance=chance)
        self._teller = Teller(
            outbox,
            self._poster,
            dry_run=settings.dry_run,
            disabled_file=directory / DISABLED_FILE,
            is_current=self._is_current,
            write=self._write,
            heard=self._heard,
            report=self._report,
            now=now,
            monotonic=monotonic,
        )
        self._drains = RuleCommands(self._wake.set)
        self._ruling = RuleEngine(settings, vm_name=lambda: vm().name, monotonic=monotonic)
        self._prune_at = monotonic() + _PRUNE_SECONDS
        self._waiting: list[tuple[str, float]] = []
        self._attempted: frozenset[str] = frozenset()
        self._note(outbox.read(approvals.read_approvals).result())
        metrics.watch_approved(self._waiting_seconds)

    # Called from other threads.

    @property
    def approved(self) -> frozenset[str]:
        """The keys of the events that this agent approved, or may have: they may start before NotBefore."""
        return self._attempted | self._poster.in_flight

    def start(self) -> None:
        """Begin to follow decisions."""
        self._thread.start()

    def stop(self) -> None:
        """Begin to stop (see `join`); a command that runs is killed, and runs again after the next start."""
        self._stop.set()
        self._wake.set()
        self._drains.close()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end; closing the metadata client breaks off a request."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def saw(self, document: Document, moment: Instant) -> None:
        """Take a good answer of the metadata service; costs next to nothing while nothing changed."""
        before = self._answer
        self._answer = _Answer(document=document, moment=moment)
        if self._wants_answer or before is None or before.document is not document:
            self._wake.set()

    def let_finish(self, event_keys: Collection[str]) -> None:
        """Wait, a second at most, while Azure is being told about one of *event_keys*."""
        self._poster.wait_for(event_keys, _WAIT_FOR_POST_SECONDS)

    def offer(self, tokens: Sequence[str]) -> None:
        """Take tokens from the portal."""
        if self._settings.remote is not None:
            self._intake.offer(tokens)
            self._wake.set()

    def nudge(self) -> None:
        """Look at once: a command has written to the outbox."""
        self._wake.set()

    def _refuse(self, refusal: Refusal) -> None:
        answer = self._answer
        if refusal.event is None and refusal.event_id is not None and answer is not None:
            event = view(answer.document).events.get(refusal.event_id)
            refusal = msgspec.structs.replace(refusal, event=event)
        self._refusals.add(refusal)
        self._wake.set()

    # The thread.

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                wait_seconds = self.turn()
                self._report.recovered("approver", "Approvals work again.")
            except OutboxReadOnly as error:
                self._report.problem("approver", logging.ERROR, str(error))
                wait_seconds = _RETRY_SECONDS
            except BridgeError as error:
                if not self._stop.is_set():  # the outbox may be closed under a thread that was left behind
                    self._report.problem("approver", logging.ERROR, f"Approvals do not work for now: {error}")
                wait_seconds = _RETRY_SECONDS
            except Exception as error:  # noqa: BLE001  # logged with its traceback; the thread outlives everything
                message = f"The approver failed; it goes on. {type(error).__name__}: {error}"
                self._report.problem("approver", logging.ERROR, message, exc_info=error)
                wait_seconds = _RETRY_SECONDS
            self._wake.wait(wait_seconds)
            self._wake.clear()

    def turn(self) -> float:
        """Do all that can be done now; return the seconds until something may be due."""
        if outcomes := self._refusals.take():
            self._heard(
                self._outbox.write(
                    self._outbox.records.append_outcomes, outcomes, incarnation=self._incarnation
                ).result()
            )
        wait_seconds = min(_LOOK_SECONDS, self._refusals.wait_seconds() or _LOOK_SECONDS)
        if self._outbox.in_memory:
            raise OutboxReadOnly("No approval is given while the outbox lives in memory. Free the disk under it.")
        if self._intake.has_waiting:
            self._intake.offer_waiting()
        wait_seconds = min(wait_seconds, _RETRY_SECONDS) if self._intake.has_waiting else wait_seconds
        state = self._outbox.read(approvals.read_approvals).result()
        self._note(state)
        answer = self._fresh_answer()
        if answer is None:
            return min(wait_seconds, _RETRY_SECONDS) if self._has_work(state) else wait_seconds
        return min(wait_seconds, self._follow(state, answer))

    def _has_work(self, state: ApprovalState) -> bool:
        is_open = any(each.state in ("new", "waiting") for each in state.decisions)
        is_under_way = any(each.state in (WANTED, DRAINING) for each in state.consents.values())
        self._wants_answer = is_open or is_under_way or self._ruling.is_waiting
        return self._wants_answer

    def _fresh_answer(self) -> _Answer | None:
        answer = self._answer
        return answer if answer is not None and self._is_fresh(answer) else None

    def _is_fresh(self, answer: _Answer) -> bool:
        here = Instant(wall=self._now(), monotonic=self._monotonic())
        return here.seconds_since(answer.moment) <= FRESH_SECONDS

    @property
    def _incarnation(self) -> Incarnation:
        return None if self._answer is None else self._answer.document.incarnation

    def _view(self, document: Document) -> DocumentIndex:
        if self._seen is None or self._seen[0] is not document:
            self._seen = (document, view(document))
        return self._seen[1]

    def _follow(self, state: ApprovalState, answer: _Answer) -> float:
        seen = self._view(answer.document)
        for _ in range(_MOST_TURNS):
            judgement = judge(
                state,
                seen,
                now=self._now(),
                required_approvals=self._required,
                is_trusted=self._intake.is_trusted,
                dry_run=self._settings.dry_run,
            )
            self._add_drained(judgement, state)
            if judgement.is_empty and not self._on_request_only:
                self._ruling.rule(judgement, state, seen, self._drains)
            if judgement.is_empty:
                break
            self._write(judgement, state.stream_id)
            state = self._outbox.read(approvals.read_approvals).result()
        else:
            self._report.problem("judging", logging.ERROR, "What follows from the decisions does not come to an end.")
            return _RETRY_SECONDS
        if not self._on_request_only:
            self._start_commands(state, seen)
        self._note(state)
        if self._monotonic() >= self._prune_at:
            self._prune_at = self._monotonic() + _PRUNE_SECONDS
            self._outbox.write(approvals.prune, list(seen.events), self._now().timestamp())
        wait_seconds = min(
            self._teller.tell(state, answer.document, answer.moment.monotonic), self._ruling.wait_seconds()
        )
        state = self._outbox.read(approvals.read_approvals).result()
        self._note(state)
        self._has_work(state)
        if any(each.state == "waiting" for each in state.decisions):
            wait_seconds = min(wait_seconds, 10.0)  # they expire
        return wait_seconds

    def _write(self, judgement: Evaluation, stream_id: str) -> None:
        for refusal in judgement.refusals:
            self._refusals.add(refusal)
        self._heard(
            self._outbox.write(
                self._outbox.records.write_approvals,
                stream_id,
                consents=judgement.consents,
                settled=judgement.settled,
                outcomes=[*judgement.outcomes, *self._refusals.take()],
                incarnation=self._incarnation,
            ).result()
        )

    def _heard(self, records: Sequence[TransitionRecord]) -> None:
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
                },
            )

    # Commands of rules.

    def _add_drained(self, judgement: Evaluation, state: ApprovalState) -> None:
        for drained in self._drains.take():
            consent = state.consents.get(drained.key)
            if consent is None or consent.state != DRAINING:
                continue  # decided otherwise, or over, while the command ran
            moment = self._now().timestamp()
            after = WANTED if drained.problem is None else COMMAND_FAILED
            if any(each.key == drained.key for each in judgement.consents):
                continue
            judgement.consents.append(msgspec.structs.replace(consent, state=after, changed_at=moment))
            if drained.problem is not None:
                judgement.outcomes.append(
                    outcome_of(
                        consent,
                        Transition.APPROVAL_FAILED,
                        COMMAND_FAILED_RESULT,
                        event=consent.event,
                        said=drained.problem,
                    )
                )

    def _start_commands(self, state: ApprovalState, seen: DocumentIndex) -> None:
        for consent in state.consents.values():
            if consent.state != DRAINING or self._drains.is_running(consent.key) or self._drains.is_full:
                continue
            rule = self._ruling.rule_of(consent, seen)
            record = self._outbox.read(deliveries.last_record, consent.event.key).result()
            if rule is not None and record is not None and newest_hold(state.decisions, consent.key) is None:
                self._drains.start(consent.key, rule, record)

    def _is_current(self, document: Document) -> bool:
        """Return whether *document* is what the metadata service said a moment ago, and the agent goes on."""
        latest = self._answer
        is_latest = latest is not None and latest.document is document and self._is_fresh(latest)
        return is_latest and not self._stop.is_set()

    # What is visible.

    def _note(self, state: ApprovalState) -> None:
        consents = state.consents.values()
        self._attempted = frozenset(each.event.key for each in consents if each.attempts or each.state == POSTED)
        posted = [each for each in consents if each.state == POSTED]
        self._waiting = [(each.event_id, each.posted_at) for each in posted if each.posted_at is not None]

    def _waiting_seconds(self) -> float:
        """Return how long the approval waits that Azure took first and has not acted on yet."""
        answer = self._answer
        if answer is None:
            return 0.0
        scheduled = {each.event_id for each in answer.document.events if each.event_status == "Scheduled"}
        since = [posted_at for event_id, posted_at in self._waiting if event_id in scheduled]
        return max(self._now().timestamp() - min(since), 0.0) if since else 0.0
