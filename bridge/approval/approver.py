"""The approver thread evaluates decisions and rules, and sends StartRequests to Azure.

The thread repeats these steps:

1. Evaluate the stored decisions and the rules, and write the results to the outbox.
2. For each approval that is due, count the attempt, and wait until the outbox is saved.
3. Fetch the Scheduled Events document once more.
4. If the document still allows the approval, send StartRequests, and record the outcome.

The agent saves each attempt before it sends StartRequests, so that the approval survives a crash. It repeats the
request until Azure accepts it. It gives up if the event starts, changes, or is put on hold, if the approval expires, or
if the agent no longer trusts a key that signed the approval.

The thread does not approve events in these cases:

- The outbox is not saved, or the identity of this VM is not confirmed.
- The portal has not sent all of its decisions since the agent started.
- The file ``approvals.disabled`` is in the state directory.
- The metadata service has not responded within the last three seconds.

While a key file is invalid, the agent cannot verify tokens that were signed with this key. One of these tokens might be
a hold, so no rule approves an event until the file is valid again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bridge.approval.approval_commands import ApprovalCommands, CommandSettings
from bridge.approval.changes import Changes
from bridge.approval.document_index import DocumentIndex, index_document
from bridge.approval.evaluate import Context, evaluate, postable
from bridge.approval.files import ApprovalFiles
from bridge.approval.inbox import DecisionInbox
from bridge.approval.recorder import ApprovalRecorder
from bridge.approval.rules import RuleEngine
from bridge.approval.submit import Submitter
from bridge.clock import REAL_CLOCK, Clock, Instant
from bridge.config.approval import ApprovalSettings
from bridge.config.settings import Settings
from bridge.errors import BridgeError
from bridge.events.event import Document, ScheduledEvent, VmIdentity
from bridge.imds.client import ImdsClient
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
#: If an evaluation needs more steps than this, two of the steps contradict each other.
_MOST_STEPS = 20


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    document: Document
    instant: Instant
    asked_at: float
    """Unix seconds of the request. The document might lack the event of a decision that arrived later."""
    unsettled: frozenset[str]
    tracked: Document | None


class Approver:
    """Decides which events to approve on this VM, and sends the approvals to Azure.

    *portal_read* returns None until the agent has received all decisions from the portal. After that, it returns the
    `Outbox.stream_id` for which the agent received them. *vm* returns the VM's identity. *directory* is the state
    directory.
    """

    def __init__(
        self,
        settings: Settings,
        approval: ApprovalSettings,
        outbox: Outbox,
        imds: ImdsClient,
        *,
        vm: Callable[[], VmIdentity],
        directory: Path,
        portal_read: Callable[[], str | None],
        metrics: Metrics,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        keys = approval.trusted_keys()
        self.files = ApprovalFiles(keys, configuration=settings.file, directory=directory, metrics=metrics)
        self._settings = approval
        self._outbox = outbox
        self._inbox = DecisionInbox(keys, outbox, vm=vm, clock=clock)
        self._rules = RuleEngine(approval, vm=vm, clock=clock)
        self._submitter = Submitter(imds, self.files, clock=clock)
        self._portal_read = portal_read
        self._clock = clock
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._posting = threading.Lock()
        """The approver holds this lock from the start of a StartRequests until it has written the outcome."""
        self._thread = threading.Thread(target=self._run, name="approver", daemon=True)
        self.loop_watch = LoopWatch(clock)
        self._imds_timeout_seconds = settings.imds.timeout_seconds
        self._commands = ApprovalCommands(self._wake.set, unset=settings.secret_variables)
        self._recorder = ApprovalRecorder(outbox, metrics, clock=clock)
        self._log = ThrottledLog(logger)
        self._answer: _Answer | None = None
        self._wants_answer = False
        metrics.watch_approved(self._waiting_seconds)

    @property
    def approved(self) -> frozenset[str]:
        """Return the keys of the events that this agent approved or might have approved."""
        known = self._outbox.read(approvals.read_state).approvals.values()
        return frozenset(each.event.key for each in known if each.attempts)

    def _waiting_seconds(self) -> float:
        scheduled = {key for key, event in self._events.items() if event.event_status == "Scheduled"}
        known = self._outbox.read(approvals.read_state).approvals.values()
        since = [each.changed_at for each in known if each.state is ApprovalStage.POSTED and each.event_id in scheduled]
        return max(self._clock.timestamp() - min(since), 0.0) if since else 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Signal the thread to stop, and kill the running commands."""
        self._stop.set()
        self._wake.set()
        self._commands.close()

    def join(self, timeout_seconds: float) -> None:
        """Wait up to *timeout_seconds* until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def observe(
        self,
        document: Document,
        instant: Instant,
        *,
        asked_at: float,
        unsettled: frozenset[str],
        tracked: Document | None,
    ) -> None:
        """Store a valid IMDS response. Wake the thread if the document has changed.

        *asked_at* is when the request was sent, on the monotonic clock, and *instant* is when the response arrived.
        *unsettled* contains the EventIds that changed in this document, if no second response has confirmed the change
        yet. In *tracked*, these events are unchanged.
        """
        before = self._answer
        self._answer = _Answer(
            document=document,
            instant=instant,
            asked_at=instant.wall.timestamp() - (instant.monotonic - asked_at),
            unsettled=unsettled,
            tracked=tracked,
        )
        if (
            self._wants_answer
            or before is None
            or before.document is not document
            or before.tracked is not tracked
            or before.unsettled != unsettled
        ):
            self._wake.set()

    def wait_for_submission(self) -> None:
        """Wait for up to a second while the thread sends StartRequests.

        The poller calls this method after a change, because the `approved` record must precede the `started` record.
        """
        if self._posting.acquire(timeout=_WAIT_FOR_POST_SECONDS):
            self._posting.release()

    def receive(self, tokens: Sequence[str]) -> None:
        """Verify and store the *tokens* of the portal."""
        self._recorder.refuse(self._inbox.receive(tokens, self._events))
        self._wake.set()

    def wake(self) -> None:
        """Wake the thread, because the state has changed."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.loop_watch.expect_within(_STEP_SECONDS)
            wait_seconds = _RETRY_SECONDS
            try:
                wait_seconds = self.run_once()
                self._log.recovered("approver", "Approvals work again.")
            except BridgeError as error:
                if not self._stop.is_set():
                    self._log.problem("approver", logging.ERROR, f"Approvals failed: {error}", kind=repr(type(error)))
            except Exception as error:  # noqa: BLE001  # logged with its traceback; the thread must continue
                message = f"The approver failed and tries again. {type(error).__name__}: {error}"
                self._log.problem("approver", logging.ERROR, message, kind=repr(type(error)), exc_info=error)
            self.loop_watch.expect_within(wait_seconds)
            self._wake.wait(wait_seconds)
            self._wake.clear()
        self.loop_watch.idle()

    def run_once(self) -> float:
        """Run all due steps. Return the seconds until the next run."""
        self._outbox.created_at()  # corrects a creation time in the future
        self.files.why_disabled()  # logs a change
        self._recorder.refuse(self._inbox.receive_waiting(self._events))
        self._note_portal_read()
        answer = self._answer
        if answer is not None and self._clock.instant().seconds_since(answer.instant) <= FRESH_SECONDS:
            self._follow(answer)
        state = self._outbox.read(approvals.read_state)
        self._write(Changes(), state.stream_id)  # the records about refusals that are due
        self._wants_answer = (
            bool(self._settings.rules and self._events)  # a rule can still act
            or any(each.state is not DecisionStage.ON_HOLD for each in state.decisions)
            or any(each.state in OPEN_STAGES for each in state.approvals.values())
        )
        is_open = self._wants_answer or self._inbox.has_waiting
        return _RETRY_SECONDS if is_open else _IDLE_SECONDS

    def _follow(self, answer: _Answer) -> None:
        index = index_document(answer.document, unsettled=answer.unsettled, tracked=answer.tracked)
        context = msgspec.structs.replace(self._context(index), asked_at=answer.asked_at)
        state = self._evaluate(context)
        self._start_commands(state, context)
        self._submit(state, context)

    def _evaluate(self, context: Context) -> ApprovalState:
        """Repeat the evaluation until it finds no more changes, and return the new state.

        The method writes the changes of each step to the outbox.
        """
        for _ in range(_MOST_STEPS):
            state = self._outbox.read(approvals.read_state)
            step = evaluate(state, context)
            if step.is_empty:
                step = self._commands.take(state, now=context.now)
            if step.is_empty:
                step = self._rules.apply(
                    state, context.index, may_begin=lambda: self._may_approve() and self._may_rules_act()
                )
            if step.is_empty:
                break
            self._write(step, state.stream_id)
        else:
            self._log.problem(
                "evaluation", logging.ERROR, f"The evaluation of decisions did not finish within {_MOST_STEPS} steps."
            )
        return state

    def _write(self, changes: Changes, stream_id: str) -> None:
        self._recorder.write(changes, stream_id, self._document.incarnation)

    def _submit(self, state: ApprovalState, context: Context) -> None:
        due = self._postable(state, context, self._submitter.due(state.approvals.values()))
        if not due or not self._may_approve():
            return
        instead = self._submitter.put_off(due)
        if instead is None and self._settings.dry_run:
            instead = self._submitter.pretend(due)
        if instead is not None:
            self._write(instead, state.stream_id)
            return
        for approval in due:
            self._post(approval, state.stream_id)

    def _post(self, approval: PendingApproval, stream_id: str) -> None:
        """Save the attempt, check the document, send StartRequests, and record the outcome."""
        now = self._clock.timestamp()
        begun = self._outbox.change(approvals.begin_attempt, stream_id, approval, now=now)
        if begun is None:
            return
        self.loop_watch.expect_call_within(_STEP_SECONDS + 2 * self._imds_timeout_seconds)
        look = self._submitter.last_look() if self._outbox.wait_saved(_SAVE_SECONDS) else None
        if look is not None and self._is_confirmed(begun, *look):
            with self._posting:
                self._write(self._submitter.post(begun, look[0]), stream_id)
            return
        self._submitter.withhold(approval)
        self._write(Changes(approvals=[approval]), stream_id)  # without a request, the attempt does not count

    def _is_confirmed(self, approval: PendingApproval, document: Document, answered_at: Instant) -> bool:
        """Return whether *document*, the result of the last look, still allows *approval*."""
        answer = self._answer
        if answer is None or self._stop.is_set() or self.files.why_disabled() or not self._may_approve():
            return False
        state = self._outbox.read(approvals.read_state)
        if self._clock.instant().seconds_since(answered_at) > FRESH_SECONDS:
            return False
        if document.api_version != answer.document.api_version:
            return False
        tracked = answer.tracked or answer.document
        index = index_document(document, unsettled=answer.unsettled, tracked=tracked)
        return bool(self._postable(state, self._context(index), [approval]))

    def _postable(
        self, state: ApprovalState, context: Context, due: Sequence[PendingApproval]
    ) -> list[PendingApproval]:
        return postable(state, context, [each for each in due if each.arrivals or self._may_rules_act()])

    def _may_approve(self) -> bool:
        outbox, why = self._outbox, None
        if not outbox.is_trusted:
            why = "The identity of this VM is not confirmed."
        elif self._settings.remote is not None and outbox.portal_read_in != outbox.stream_id:
            why = "The portal has not sent all of its decisions since the start of the agent."
        elif outbox.is_behind:
            why = "The outbox is not saved. Free space on the disk, or make it writable."
        elif self._inbox.has_unkept:
            why = "Decisions from the portal are not saved yet. One of them may be a hold."
        if why is None:
            self._log.recovered("state", "Approvals are possible again.")
            return True
        self._log.problem("state", logging.WARNING, f"Nothing is approved. {why}")
        return False

    def _may_rules_act(self) -> bool:
        if self._inbox.awaits_key:
            message = "No rule acts, because a token waits for a valid key file and may contain a hold."
            self._log.problem("awaits_key", logging.ERROR, message)
            return False
        self._log.recovered("awaits_key", "All keys are usable again, so the rules approve events again.")
        return True

    def _note_portal_read(self) -> None:
        # The order matters: the poller stores decisions before it reports that it has received all of them.
        read_in = self._portal_read()
        if read_in is not None and not self._inbox.has_unkept:
            self._outbox.portal_read_in = read_in

    def _context(self, index: DocumentIndex) -> Context:
        remote = self._settings.remote
        return Context(
            index=index,
            now=self._clock.timestamp(),
            required_approvals=1 if remote is None else remote.required_approvals,
            trust=self._inbox.trust,
            dry_run=self._settings.dry_run,
            has_command=remote is not None and remote.command is not None,
        )

    @property
    def _events(self) -> dict[str, ScheduledEvent]:
        return {event.event_id: event for event in self._document.events if event.event_id is not None}

    @property
    def _document(self) -> Document:
        return Document() if self._answer is None else self._answer.document

    def _start_commands(self, state: ApprovalState, context: Context) -> None:
        for approval in state.approvals.values():
            if approval.state is not ApprovalStage.DRAINING or not self._commands.can_start(approval):
                continue
            settings = self._command_for(approval, state, context)
            record = self._outbox.read(records.last_record, approval.event.key)
            if settings is not None and settings.command is not None and record is not None:
                try:
                    self._commands.start(approval, settings, record)
                except RuntimeError as error:  # other approvals must not wait until a thread can start
                    self._log.problem("command", logging.ERROR, f"The command of an approval did not start: {error}")

    def _command_for(self, approval: PendingApproval, state: ApprovalState, context: Context) -> CommandSettings | None:
        """Return the settings that contain the approval's command, or None if it must not start."""
        if not self._postable(state, context, [approval]) or not self._may_approve():
            return None
        put_off = self._submitter.put_off([approval])
        if put_off is not None:
            self._write(put_off, state.stream_id)
            return None
        return self._settings.remote if approval.arrivals else self._rules.rule_behind(approval, context.index)
