"""Approver: the thread that turns stored decisions and rules into StartRequests. It fails closed.

    evaluate -> write -> count the attempt -> wait until it is saved -> last look (GET) -> POST -> write the outcome

Each step reads and writes the state in memory. An approval is posted only when everything about it is saved, including
the attempt. After a crash at any point, the same approval therefore continues, and no other. The agent tries again
until the event starts, changes, or is held, or until a key behind the approval is no longer trusted.

Decisions, a changed document, and the approver's own clock wake the thread. The thread delays the poll in one case
only: a poll that sees a change while StartRequests is on its way waits up to a second, so that the record `approved`
precedes the `started` that it caused. No failure here reaches the poll or a sink.

Nothing is approved in any of these cases:

- The outbox is not saved, or the identity of this VM is not confirmed.
- The portal has not sent all of its decisions since the start.
- The file ``approvals.disabled`` is in the state directory.
- The metadata service did not respond within the last three seconds.

No rule acts while a decision that may be a hold waits for its key file, because a rule decides without a person.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence

import msgspec

from bridge.approval.approval_commands import ApprovalCommand, ApprovalCommands
from bridge.approval.evaluate import evaluate, postable
from bridge.approval.evaluation import Context, DocumentIndex, Evaluation, index_document
from bridge.approval.inbox import DecisionInbox
from bridge.approval.recorder import ApprovalRecorder
from bridge.approval.rules import RuleEngine
from bridge.approval.submit import LastLook, Submitter
from bridge.clock import REAL_CLOCK, Clock, Instant
from bridge.config.approval import ApprovalSettings
from bridge.errors import BridgeError
from bridge.events.event import Document, Incarnation
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import Metrics
from bridge.outbox import approvals, records
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import OPEN_STAGES, ApprovalStage, ApprovalState, DecisionStage, PendingApproval
from bridge.system.threads import LoopWatch

logger = logging.getLogger(__name__)

FRESH_SECONDS = 3.0
_SAVE_SECONDS = 2.0
_WAIT_FOR_POST_SECONDS = 1.0
_IDLE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_STEP_SECONDS = 30.0
_PRUNE_SECONDS = 3600.0
#: More steps than this mean that two steps contradict each other.
_MOST_STEPS = 20


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A good response of the metadata service."""

    document: Document
    instant: Instant
    asked_at: float
    """Unix seconds. Decisions that arrived later may concern events that the response does not show."""
    unsettled: frozenset[str]
    tracked: Document | None


class Approver:
    """Follows the decisions in *outbox* and *rules* on one VM.

    *portal_read* returns the `Outbox.epoch` for which the portal has sent all decisions from index 0. Commands do not
    receive the environment's *secret_variables*.
    """

    def __init__(
        self,
        settings: ApprovalSettings,
        outbox: Outbox,
        *,
        inbox: DecisionInbox,
        rules: RuleEngine,
        submitter: Submitter,
        portal_read: Callable[[], int | None] = lambda: None,
        metrics: Metrics,
        secret_variables: Collection[str] = (),
        imds_timeout_seconds: float = 5.0,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._settings = settings
        self._outbox = outbox
        self._inbox = inbox
        self._rules = rules
        self._submitter = submitter
        self._portal_read = portal_read
        self._clock = clock
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._posting = threading.Lock()
        """Held from a request to the write of its outcome."""
        self._thread = threading.Thread(target=self._run, name="approver", daemon=True)
        self.loop_watch = LoopWatch(clock)
        self._imds_timeout_seconds = imds_timeout_seconds
        self._commands = ApprovalCommands(self._wake.set, unset=secret_variables)
        self._portal_command = ApprovalCommand.of(settings.remote)
        self._recorder = ApprovalRecorder(outbox, metrics, clock=clock)
        self._log = ThrottledLog(logger)
        self._answer: _Answer | None = None
        self._wants_answer = False
        self._prune_at = clock.monotonic() + _PRUNE_SECONDS
        metrics.watch_approved(self._waiting_seconds)

    # Called from other threads.

    @property
    def approved(self) -> frozenset[str]:
        """Return the keys of the events that this agent approved, or may have: they may start before NotBefore."""
        known = self._outbox.read(approvals.read_state).approvals.values()
        return frozenset(each.event.key for each in known if each.attempts)

    def _waiting_seconds(self) -> float:
        """Return for how long the oldest accepted approval has waited for its event to start."""
        events = () if self._document is None else self._document.events
        scheduled = {each.event_id for each in events if each.event_status == "Scheduled"}
        known = self._outbox.read(approvals.read_state).approvals.values()
        since = [each.changed_at for each in known if each.state is ApprovalStage.POSTED and each.event_id in scheduled]
        return max(self._clock.timestamp() - min(since), 0.0) if since else 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Begin to stop. A running command is killed, and runs again after the next start."""
        self._stop.set()
        self._wake.set()
        self._commands.close()

    @property
    def is_running(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the thread. Closing the metadata client cancels a request."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def observe(
        self,
        document: Document,
        instant: Instant,
        *,
        asked_at: float | None = None,
        unsettled: frozenset[str] = frozenset(),
        tracked: Document | None = None,
    ) -> None:
        """Take a good response of the metadata service. Cheap while nothing changes.

        The response arrived at *instant* and was requested at *asked_at* (monotonic seconds; None: at the same time).
        *unsettled* contains the events with an unconfirmed change, and *tracked* is the tracked document.
        """
        before = self._answer
        seconds = 0.0 if asked_at is None else instant.monotonic - asked_at
        self._answer = _Answer(
            document=document,
            instant=instant,
            asked_at=instant.wall.timestamp() - seconds,
            unsettled=unsettled,
            tracked=tracked,
        )
        if self._wants_answer or before is None or not _is_same(before, self._answer):
            self._wake.set()

    def wait_for_submission(self) -> None:
        """Wait up to a second while a request is on its way."""
        if self._posting.acquire(timeout=_WAIT_FOR_POST_SECONDS):
            self._posting.release()

    def receive(self, tokens: Sequence[str]) -> None:
        """Take tokens from the portal."""
        self._recorder.refuse(self._inbox.receive(tokens), self._document)
        self._wake.set()

    def wake(self) -> None:
        """Run at once, because the state has changed."""
        self._wake.set()

    # The thread.

    def _run(self) -> None:
        while not self._stop.is_set():
            self.loop_watch.expect_within(_STEP_SECONDS)
            wait_seconds = _RETRY_SECONDS
            try:
                wait_seconds = self.run_once()
                self._log.recovered("approver", "Approvals work again.")
            except BridgeError as error:
                if not self._stop.is_set():
                    self._log.problem("approver", logging.ERROR, f"Approvals do not work: {error}")
            except Exception as error:  # noqa: BLE001  # logged with its traceback; the thread must continue
                message = f"The approver failed and continues. {type(error).__name__}: {error}"
                self._log.problem("approver", logging.ERROR, message, kind=repr(type(error)), exc_info=error)
            self.loop_watch.expect_within(wait_seconds)
            self._wake.wait(wait_seconds)
            self._wake.clear()
        self.loop_watch.idle()

    def run_once(self) -> float:
        """Do everything that can be done now; return the seconds until something may be due."""
        self._outbox.created_at()  # it follows a clock that was ahead, before a decision is compared with it
        self._recorder.write_refusals(self._incarnation)
        self._submitter.why_disabled()  # to log a change
        self._recorder.refuse(self._inbox.receive_waiting(), self._document)
        self._note_portal_read()
        answer = self._answer
        if answer is not None and self._clock.instant().seconds_since(answer.instant) <= FRESH_SECONDS:
            self._follow(answer)
        state = self._outbox.read(approvals.read_state)
        self._wants_answer = (
            self._rules.is_waiting
            or any(each.state is not DecisionStage.ON_HOLD for each in state.decisions)
            or any(each.state in OPEN_STAGES for each in state.approvals.values())
        )
        is_open = self._wants_answer or self._inbox.has_waiting
        return _RETRY_SECONDS if is_open else _IDLE_SECONDS

    def _follow(self, answer: _Answer) -> None:
        """Do everything that follows from a fresh *answer*."""
        index = index_document(answer.document, unsettled=answer.unsettled, tracked=answer.tracked)
        context = msgspec.structs.replace(self._context(index), asked_at=answer.asked_at)
        state = self._evaluate(context)
        self._start_commands(state, context)
        self._submit(state, context)
        if self._clock.monotonic() >= self._prune_at:
            self._prune_at = self._clock.monotonic() + _PRUNE_SECONDS
            self._outbox.change(approvals.prune, index.events, self._clock.timestamp())

    def _evaluate(self, context: Context) -> ApprovalState:
        """Write everything that follows from the state, step by step; return the state after it."""
        for _ in range(_MOST_STEPS):
            state = self._outbox.read(approvals.read_state)
            step = evaluate(state, context)
            if step.is_empty:
                step = self._commands.take(state, now=context.now)
            if step.is_empty:
                step = self._rules.apply(state, context.index, may_begin=self._may_begin)
            if step.is_empty:
                break
            self._write(step, state.stream_id)
        else:
            self._log.problem("evaluation", logging.ERROR, "The evaluation of the decisions does not end.")
        return state

    def _write(self, evaluation: Evaluation, stream_id: str) -> None:
        self._recorder.write(evaluation, stream_id, self._incarnation)

    # Requests.

    def _submit(self, state: ApprovalState, context: Context) -> None:
        """Post the approvals that are due."""
        due = self._postable(state, context, self._submitter.due(state.approvals.values()))
        if not due or not self._may_approve():
            return
        instead = self._submitter.instead_of_posting(due)
        if instead is not None:
            self._write(instead, state.stream_id)
            return
        for approval in due:
            self._post(approval, state.stream_id)

    def _post(self, approval: PendingApproval, stream_id: str) -> None:
        """Count and save the attempt, check once more, post, and write the outcome."""
        now = self._clock.timestamp()
        ready = self._outbox.change(approvals.begin_attempt, stream_id, [approval], now=now)
        if not ready:
            return
        self.loop_watch.expect_call_within(_STEP_SECONDS + 2 * self._imds_timeout_seconds)
        look = self._submitter.last_look() if self._outbox.wait_saved(_SAVE_SECONDS) else None
        if look is not None and self._is_confirmed(ready[0], look):
            with self._posting:
                self._write(self._submitter.post(ready[0], look.document.incarnation), stream_id)
            return
        self._submitter.withhold(approval, "The outbox is not saved, or the last look does not allow it.")
        self._write(Evaluation(approvals=[approval]), stream_id)  # no request was sent, so the attempt does not count

    def _is_confirmed(self, approval: PendingApproval, look: LastLook) -> bool:
        """Return whether *approval* may be posted now, by the last *look*."""
        answer = self._answer
        if answer is None or self._stop.is_set() or self._submitter.why_disabled() or not self._may_approve():
            return False
        state = self._outbox.read(approvals.read_state)
        if self._clock.instant().seconds_since(look.answered_at) > FRESH_SECONDS:
            return False
        tracked = answer.tracked or answer.document
        index = index_document(look.document, unsettled=answer.unsettled, tracked=tracked)
        return bool(self._postable(state, self._context(index), [approval]))

    def _postable(
        self,
        state: ApprovalState,
        context: Context,
        due: Sequence[PendingApproval],
        *,
        stage: ApprovalStage = ApprovalStage.WANTED,
    ) -> list[PendingApproval]:
        due = [each for each in due if each.arrivals or self._may_rules_act()]
        return postable(state, context, due, stage=stage)

    def _may_approve(self) -> bool:
        """Return whether the state allows any approval at all."""
        outbox, why = self._outbox, None
        if not outbox.is_trusted:
            why = "The identity of this VM is not confirmed."
        elif self._settings.remote is not None and outbox.awaits_portal:
            why = "The portal has not sent all of its decisions since the start of the agent."
        elif outbox.is_behind:
            why = "The outbox is not saved. Free the disk, or make it writable."
        elif self._inbox.has_unkept:
            why = "Decisions of the portal are not saved yet. One of them may be a hold."
        if why is None:
            self._log.recovered("state", "Approvals are possible again.")
            return True
        self._log.problem("state", logging.WARNING, f"Nothing is approved. {why}")
        return False

    def _may_begin(self) -> bool:
        """Return whether a rule may begin an approval."""
        return self._may_approve() and self._may_rules_act()

    def _may_rules_act(self) -> bool:
        if self._inbox.awaits_key:
            message = "No rule acts: a decision waits until its key file is usable, and it may be a hold."
            self._log.problem("awaits_key", logging.ERROR, message)
            return False
        self._log.recovered("awaits_key", "Every decision can be verified. Rules act again.")
        return True

    def _note_portal_read(self) -> None:
        """Allow approvals when all decisions of the portal are stored."""
        outbox = self._outbox
        epoch = outbox.epoch
        # In this order: the poller stores decisions before it reports that it has read all of them.
        if outbox.awaits_portal and self._portal_read() == epoch and not self._inbox.has_unkept:
            outbox.awaits_portal = False
            if outbox.epoch != epoch:  # the state was replaced meanwhile
                outbox.awaits_portal = True

    # Input of an evaluation.

    def _context(self, index: DocumentIndex) -> Context:
        remote = self._settings.remote
        return Context(
            index=index,
            now=self._clock.timestamp(),
            required_approvals=1 if remote is None else remote.required_approvals,
            trust=self._inbox.trust,
            dry_run=self._settings.dry_run,
            has_command=self._portal_command is not None,
        )

    @property
    def _incarnation(self) -> Incarnation:
        return None if self._document is None else self._document.incarnation

    @property
    def _document(self) -> Document | None:
        return None if self._answer is None else self._answer.document

    # Commands.

    def _start_commands(self, state: ApprovalState, context: Context) -> None:
        """Start the commands that approvals wait for. A command that cannot be started is tried again."""
        for approval in state.approvals.values():
            is_draining = approval.state is ApprovalStage.DRAINING
            if not is_draining or self._commands.is_running(approval) or self._commands.is_full:
                continue
            command = self._command_for(approval, state, context)
            record = None if command is None else self._outbox.read(records.last_record, approval.event.key)
            if command is not None and record is not None:
                self._commands.start(approval, command, record)

    def _command_for(self, approval: PendingApproval, state: ApprovalState, context: Context) -> ApprovalCommand | None:
        """Return the command that *approval* waits for; None while it may not start."""
        if not self._postable(state, context, [approval], stage=ApprovalStage.DRAINING) or not self._may_approve():
            return None
        put_off = self._submitter.put_off([approval])
        if put_off is not None:
            if not put_off.is_empty:
                self._write(put_off, state.stream_id)
            return None
        if approval.arrivals:
            return self._portal_command
        return ApprovalCommand.of(self._rules.rule_behind(approval, context.index))


def _is_same(one: _Answer, other: _Answer) -> bool:
    return one.document is other.document and one.unsettled == other.unsettled and one.tracked is other.tracked
