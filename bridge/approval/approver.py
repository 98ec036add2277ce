"""Approver: the thread that turns stored decisions and rules into StartRequests. It fails closed.

Persist the decision; check it against an answer of the metadata service that is not older than 3 s; count the attempt;
GET the document once more and check all of it again (keys, approvers, event, holds); POST; record the outcome. What a
step did is in the outbox before the next begins, so after a crash anywhere the same approval goes on, and no other. It
is tried again until the event starts, changes or is held, or a key behind it is gone.

The thread is woken by a decision, by a document that changed, by a command that wrote beside the agent, and by its own
clock. It never delays the poll but for one case: a poll that sees an event change while StartRequests for that event is
on its way waits up to a second, so that `approved` is written before the `started` that it caused. No failure here
reaches the poll or a sink.

Nothing is posted while the outbox lives in memory, while the file ``approvals.disabled`` is in the state directory, or
without this VM's own answer of a moment ago.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

import msgspec

from bridge.approval.approval_commands import ApprovalCommand, ApprovalCommands
from bridge.approval.approval_writer import ApprovalWriter
from bridge.approval.evaluate import evaluate
from bridge.approval.evaluation_step import DocumentIndex, index_document, newest_holds
from bridge.approval.inbox import DecisionInbox
from bridge.approval.off_switch import OffSwitch
from bridge.approval.open_approvals import postable
from bridge.approval.outcomes import Evaluation, applied
from bridge.approval.rules import RuleEngine, RulePreconditions
from bridge.approval.submit import LastLook, Submitter, batches
from bridge.clock import REAL_CLOCK, Clock, Instant, SettledTime
from bridge.config.approval import ApprovalSettings
from bridge.errors import BridgeError, OutboxReadOnly
from bridge.events.event import Document, Incarnation
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import Metrics
from bridge.outbox import approvals, deliveries
from bridge.outbox.approvals import (
    ApprovalStage,
    ApprovalState,
    DecisionStage,
    PendingApproval,
    StoredDecision,
)
from bridge.outbox.outbox import Outbox
from bridge.system.threads import LoopWatch

logger = logging.getLogger(__name__)

FRESH_SECONDS = 3.0
_WAIT_FOR_POST_SECONDS = 1.0
_IDLE_SECONDS = 60.0
_EXPIRY_SECONDS = 10.0
_RETRY_SECONDS = 1.0
#: What a step may take that asks the outbox alone.
_STEP_SECONDS = 30.0
_PRUNE_SECONDS = 3600.0
#: Each step follows from the one before; more of them than this mean that two contradict each other.
_MOST_STEPS = 20


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    document: Document
    instant: Instant
    asked_at: float
    """When it was asked for, in monotonic seconds: what came later may not be in it."""
    unsettled: frozenset[str]


class Approver:
    """Follows the decisions in *outbox* and *rules* on one VM.

    Without *rules* it posts only what a person on this VM decides from now on: what else is open waits for the agent.
    Commands do not get the environment's *secret_variables*.
    """

    def __init__(
        self,
        settings: ApprovalSettings,
        outbox: Outbox,
        *,
        inbox: DecisionInbox,
        rules: RuleEngine | None,
        submitter: Submitter,
        off_switch: OffSwitch,
        portal_taken: Callable[[], Instant | None] = lambda: None,
        portal_read: Callable[[], object] = lambda: None,
        metrics: Metrics,
        secret_variables: Collection[str] = (),
        imds_timeout_seconds: float = 5.0,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._dry_run = settings.dry_run
        self._required_approvals = 1 if settings.remote is None else settings.remote.required_approvals
        self._outbox = outbox
        self._inbox = inbox
        self._rules = rules
        self._submitter = submitter
        self._off_switch = off_switch
        self._clock = clock
        self._made_at = clock.timestamp()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="approver", daemon=True)
        self.loop_watch = LoopWatch(clock)
        self._imds_timeout_seconds = imds_timeout_seconds
        self._commands = ApprovalCommands(self._wake.set, unset=secret_variables)
        self._portal_command = ApprovalCommand.of_portal(settings.remote)
        self._writer = ApprovalWriter(outbox, metrics, logger, clock=clock)
        self._log = ThrottledLog(logger)
        self._preconditions = RulePreconditions(
            *(settings, outbox, inbox), portal_taken=portal_taken, portal_read=portal_read, log=self._log, clock=clock
        )
        self._answer: _Answer | None = None
        self._wants_answer = False
        self._indexed: tuple[Document, frozenset[str], DocumentIndex] | None = None
        self._new_since: dict[tuple[str, str], float] = {}
        self._settled = SettledTime(clock)
        self._prune_at = clock.monotonic() + _PRUNE_SECONDS
        self._seen_event_ids: set[str] = set()
        """Of all documents since decisions were pruned last: one without an event does not end what is kept for it."""
        self._attempted: frozenset[str] = frozenset()
        self._publish(outbox.read(approvals.read_state).result())
        metrics.watch_approved(lambda: self._writer.waiting_seconds(self._document))

    # Called from other threads.

    @property
    def approved(self) -> frozenset[str]:
        """The keys of the events that this agent approved, or may have: they may start before NotBefore."""
        return self._attempted | self._submitter.events_in_flight

    def start(self) -> None:
        """Begin to follow decisions."""
        self._thread.start()

    def stop(self) -> None:
        """Begin to stop (see `join`); a command that runs is killed, and runs again after the next start."""
        self._stop.set()
        self._wake.set()
        self._commands.close()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end; closing the metadata client breaks off a request."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def observe(
        self,
        document: Document,
        instant: Instant,
        *,
        asked_at: float | None = None,
        unsettled: frozenset[str] = frozenset(),
    ) -> None:
        """Take a good answer of the metadata service; costs next to nothing while nothing changed.

        It came at *instant* and was asked for at *asked_at*, in monotonic seconds; None: at the same time. *unsettled*
        are the EventIds of events that it lacks, while the poll does not believe their absence yet.
        """
        before = self._answer
        asked_at = instant.monotonic if asked_at is None else asked_at
        self._answer = _Answer(document=document, instant=instant, asked_at=asked_at, unsettled=unsettled)
        if self._wants_answer or before is None or before.document is not document or before.unsettled != unsettled:
            self._wake.set()

    def wait_for_submission(self, event_keys: Collection[str]) -> None:
        """Wait, a second at most, while Azure is being told about one of *event_keys*."""
        self._submitter.wait_for(event_keys, _WAIT_FOR_POST_SECONDS)

    def receive(self, tokens: Sequence[str]) -> None:
        """Take tokens from the portal."""
        self._writer.refuse(self._inbox.receive(tokens), self._document)
        self._wake.set()

    def wake(self) -> None:
        """Run at once: a command has written to the outbox."""
        self._wake.set()

    # The thread.

    def _run(self) -> None:
        while not self._stop.is_set():
            self.loop_watch.expect_within(_STEP_SECONDS)
            wait_seconds = _RETRY_SECONDS
            try:
                wait_seconds = self.run_once()
                self._log.recovered("approver", "Approvals work again.")
            except OutboxReadOnly as error:
                self._log.problem("approver", logging.ERROR, str(error))
            except BridgeError as error:
                if not self._stop.is_set():  # the outbox may be closed under a thread that was left behind
                    self._log.problem("approver", logging.ERROR, f"Approvals do not work for now: {error}")
            except Exception as error:  # noqa: BLE001  # logged with its traceback; the thread outlives everything
                message = f"The approver failed; it goes on. {type(error).__name__}: {error}"
                self._log.problem("approver", logging.ERROR, message, exc_info=error)
            self.loop_watch.expect_within(wait_seconds)
            self._wake.wait(wait_seconds)
            self._wake.clear()
        self.loop_watch.idle()

    def run_once(self) -> float:
        """Do all that can be done now; return the seconds until something may be due."""
        self._writer.write_refusals(self._incarnation)
        if self._outbox.in_memory:
            raise OutboxReadOnly("No approval is given while the outbox lives in memory. Free the disk under it.")
        self._writer.announce(self._off_switch.check(self._incarnation))
        if self._inbox.has_waiting:
            self._writer.refuse(self._inbox.receive_waiting(), self._document)
        self._preconditions.note_portal_read()
        wait_seconds = min(_IDLE_SECONDS, self._inbox.wait_seconds(), self._writer.wait_seconds())
        state = self._outbox.read(approvals.read_state).result()
        self._publish(state)
        self._note_new(state)
        answer = self._answer
        if answer is not None and self._is_fresh(answer):
            return min(wait_seconds, self._follow(state, answer))
        return min(wait_seconds, _RETRY_SECONDS) if self._wants_answer else wait_seconds

    def _follow(self, state: ApprovalState, answer: _Answer) -> float:
        """Do what follows from *state* beside a fresh *answer*; return the seconds until something may be due."""
        index = self._index(answer)
        evaluation, after = self._evaluate(state, index, answer.asked_at)
        if evaluation is None:
            message = "What follows from the decisions does not come to an end."
            self._log.problem("evaluation", logging.ERROR, message)
            return _RETRY_SECONDS
        self._writer.write(evaluation, after.stream_id, answer.document.incarnation)
        all_run = self._start_commands(after, index)
        self._publish(after)
        self._prune(index)
        after, wait_seconds = self._submit(after, answer, index)
        self._publish(after)
        if self._rules is not None:
            wait_seconds = min(wait_seconds, self._rules.wait_seconds())
        if not all_run:
            wait_seconds = min(wait_seconds, _RETRY_SECONDS)
        if any(each.state is DecisionStage.WAITING for each in after.decisions):
            wait_seconds = min(wait_seconds, _EXPIRY_SECONDS)
        return wait_seconds

    def _evaluate(
        self, state: ApprovalState, index: DocumentIndex, asked_at: float
    ) -> tuple[Evaluation | None, ApprovalState]:
        """Return all that follows from *state*, and the state after it; None when there is no end to it."""
        evaluation = Evaluation()
        has_command = self._portal_command is not None
        may_run_command = has_command and not self._submitter.is_disabled()
        for _ in range(_MOST_STEPS):
            step = evaluate(
                state,
                index,
                now=self._clock.timestamp(),
                settled_now=self._settled.timestamp(),
                required_approvals=self._required_approvals,
                trust=self._inbox.trust,
                predates=lambda decision: asked_at < self._new_since.get(_name(decision), asked_at),
                dry_run=self._dry_run,
                has_command=has_command,
                may_run_command=may_run_command,
            )
            if step.is_empty:
                step = self._commands.take(state, now=self._clock.timestamp())
            if step.is_empty and self._rules is not None:
                may_begin = not index.events or self._preconditions.are_met()
                step = self._rules.apply(state, index, commands_are_full=self._commands.is_full, may_begin=may_begin)
            if step.is_empty:
                return evaluation, state
            evaluation.extend(step)
            state = applied(state, step)
        return None, state

    def _submit(self, state: ApprovalState, answer: _Answer, index: DocumentIndex) -> tuple[ApprovalState, float]:
        """Post what is due; return the state after it, and the seconds until something else may be due."""
        due = self._submitter.due(state.approvals.values(), answer.instant.monotonic)
        due = self._postable(state, index, due)
        evaluation = Evaluation()
        if due:
            instead = self._submitter.instead_of_posting(due)
            if instead is not None:
                self._writer.write(instead, state.stream_id, answer.document.incarnation)
                evaluation = instead
            elif (posted := self._post(due, state.stream_id)) is not None:
                evaluation = posted
            else:
                return state, 0.0
        after = applied(state, evaluation)
        return after, self._submitter.wait_seconds(after.approvals.values())

    def _post(self, due: Sequence[PendingApproval], stream_id: str) -> Evaluation | None:
        """Count the attempt, check once more, post and write the outcome; None when something came in between."""
        with self._submitter.in_flight(due):
            now = self._clock.timestamp()
            ready = self._outbox.write(approvals.begin_attempt, stream_id, due, now).result()
            if not ready:
                return None
            evaluation = self._post_confirmed(ready)
            kept_back = {each.key for each in ready} - {each.key for each in evaluation.approvals}
            evaluation.approvals += [  # their attempt was none; that nothing stops them any more is still so
                msgspec.structs.replace(each, put_off_at=None) for each in due if each.key in kept_back
            ]
            written = self._writer.begin_write(evaluation, stream_id, self._incarnation)
        self._writer.announce(written.result())
        return evaluation

    def _post_confirmed(self, ready: Sequence[PendingApproval]) -> Evaluation:
        """Post *ready*, each part after a last look that says that it still may be; return what became of them."""
        evaluation = Evaluation()
        parts = deque(batches(ready))
        while parts:
            part = parts.popleft()
            self.loop_watch.expect_call_within(_STEP_SECONDS + 2 * self._imds_timeout_seconds)  # the look, the request
            look = self._submitter.last_look()
            confirmed = [] if look is None else self._confirmed(part, look)
            keys = {each.key for each in confirmed}
            self._submitter.keep_back([each for each in part if each.key not in keys])
            if look is not None and confirmed:
                parts.extend(self._submitter.post(confirmed, look.document.incarnation, evaluation))
        return evaluation

    def _confirmed(self, ready: Sequence[PendingApproval], look: LastLook) -> list[PendingApproval]:
        """Return which of *ready* may be posted now, beside the last *look*; the last thing asked before a request."""
        known = self._indexed
        index = known[2] if known is not None and known[0] is look.document else index_document(look.document)
        state = self._outbox.read(approvals.read_open).result()
        if self._outbox.in_memory or self._submitter.is_disabled() or self._stop.is_set():
            return []
        if self._clock.instant().seconds_since(look.answered_at) > FRESH_SECONDS:
            return []
        return self._postable(state, index, ready, has_command=self._portal_command is not None)

    def _postable(
        self,
        state: ApprovalState,
        index: DocumentIndex,
        due: Sequence[PendingApproval],
        *,
        stage: ApprovalStage = ApprovalStage.WANTED,
        has_command: bool = False,
    ) -> list[PendingApproval]:
        if self._rules is None:
            asked_for = {each.key for each in state.decisions if self._is_asked_for(each)}
            due = [each for each in due if each.arrivals and each.key in asked_for]
        else:
            due = [each for each in due if each.arrivals or self._preconditions.are_met()]
        return postable(
            state,
            index,
            due,
            now=self._clock.timestamp(),
            required_approvals=self._required_approvals,
            trust=self._inbox.trust,
            stage=stage,
            has_command=has_command,
        )

    # What it depends on.

    def _is_asked_for(self, decision: StoredDecision) -> bool:
        """Return whether a person on this VM made *decision* since this approver is there."""
        return decision.source == "cli" and decision.received_at >= self._made_at

    def _is_fresh(self, answer: _Answer) -> bool:
        return self._clock.instant().seconds_since(answer.instant) <= FRESH_SECONDS

    @property
    def _incarnation(self) -> Incarnation:
        return None if self._document is None else self._document.incarnation

    @property
    def _document(self) -> Document | None:
        return None if self._answer is None else self._answer.document

    def _index(self, answer: _Answer) -> DocumentIndex:
        known = self._indexed
        if known is None or known[0] is not answer.document or known[1] != answer.unsettled:
            index = index_document(answer.document, answer.unsettled)
            self._indexed = known = (answer.document, answer.unsettled, index)
            self._seen_event_ids.update(index.events)
        return known[2]

    def _note_new(self, state: ApprovalState) -> None:
        """Keep since when each new decision is known here: an answer that was asked for earlier may not have it."""
        now = self._clock.monotonic()
        new = [_name(each) for each in state.decisions if each.state is DecisionStage.NEW]
        self._new_since = {name: self._new_since.get(name, now) for name in new}

    # Commands.

    def _start_commands(self, state: ApprovalState, index: DocumentIndex) -> bool:
        """Start the commands that approvals wait for; return False when one could not be started yet."""
        if self._rules is None:
            return True
        all_run = True
        for approval in state.approvals.values():
            is_draining = approval.state is ApprovalStage.DRAINING
            if not is_draining or self._commands.is_running(approval) or self._commands.is_full:
                continue
            command = self._command_for(approval, state, index)
            if command is None:
                continue
            record = self._outbox.read(deliveries.last_record, approval.event.key).result()
            if record is not None:
                all_run = self._commands.start(approval, command, record) and all_run
        return all_run

    def _command_for(
        self, approval: PendingApproval, state: ApprovalState, index: DocumentIndex
    ) -> ApprovalCommand | None:
        """Return the command that *approval* waits for; None while it may not start."""
        if approval.arrivals:
            may_start = self._postable(state, index, [approval], stage=ApprovalStage.DRAINING)
            return self._portal_command if may_start and not self._submitter.is_disabled() else None
        rule = None if self._rules is None else self._rules.rule_behind(approval, index)
        if rule is None or approval.event_id in newest_holds(state.decisions) or not self._preconditions.are_met():
            return None
        return ApprovalCommand.of_rule(rule)

    # What is kept, and what is visible.

    def _prune(self, index: DocumentIndex) -> None:
        if self._clock.monotonic() >= self._prune_at:
            self._prune_at = self._clock.monotonic() + _PRUNE_SECONDS
            self._outbox.write(approvals.prune, list(self._seen_event_ids), self._settled.timestamp())
            self._seen_event_ids = set(index.events)

    def _publish(self, state: ApprovalState) -> None:
        """Take over from *state* what other threads and the metrics see, and whether a fresh answer is needed."""
        pending = state.approvals.values()
        self._attempted = frozenset(each.event.key for each in pending if each.attempts or each.posted_at is not None)
        self._writer.follow(pending)
        self._wants_answer = (
            any(each.state in (DecisionStage.NEW, DecisionStage.WAITING) for each in state.decisions)
            or any(each.state in (ApprovalStage.WANTED, ApprovalStage.DRAINING) for each in pending)
            or (self._rules is not None and self._rules.is_waiting)
        )


def _name(decision: StoredDecision) -> tuple[str, str]:
    return decision.approver, decision.decision_id
