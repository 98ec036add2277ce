"""Commands of approvals: programs that must succeed on this VM before an approval of a rule or the portal is posted.

Each command has its own thread, so a drain of ten minutes delays no other approval. A command runs once for each
approval of a version of an event, and its result is stored. If the agent was killed or stopped while the command ran,
the command runs again, because its progress is unknown. A command must therefore tolerate a second run.

If an approval is withdrawn or ends while its command runs, the command runs to its end, and the result is not used. A
drain that is interrupted leaves a VM in a worse state than a complete drain or none.

The command receives the last record of the event as JSON on standard input, and the variables of
`bridge.events.environment`, including SCHEDULED_EVENT_RULE with the name of the rule. It does not receive variables of
the agent that contain secrets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

import msgspec

from bridge.approval.evaluation import Evaluation, approval_record
from bridge.config.approval import RemoteSettings, RuleSettings
from bridge.events.environment import environment_of
from bridge.events.event import encode
from bridge.events.record import Transition, TransitionRecord
from bridge.logs import ThrottledLog
from bridge.outbox.rows import (
    ApprovalResult,
    ApprovalStage,
    ApprovalState,
    DecisionStage,
    EventVersion,
    PendingApproval,
)
from bridge.system.run_and_kill import PASSING_ERRORS, Ending, Finished, Runner

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 8
_JOIN_SECONDS = 1.0
#: Without a free descriptor or process, the agent tries again.
_TRY_AGAIN_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 60.0

_Run = tuple[EventVersion, str]
"""The version of the event, and the source of the approval."""


class ApprovalCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A program and its owner."""

    owner: str
    """``rule NAME`` or ``approval.remote``, for messages."""
    rule: str
    """The name of the rule; empty for the command of the portal."""
    arguments: tuple[str, ...]
    timeout_seconds: float

    @classmethod
    def of_rule(cls, rule: RuleSettings) -> ApprovalCommand:
        """Return the command of *rule*."""
        return cls(
            owner=f"rule {rule.name}",
            rule=rule.name,
            arguments=rule.command or (),
            timeout_seconds=rule.command_timeout_seconds,
        )

    @classmethod
    def of_portal(cls, remote: RemoteSettings | None) -> ApprovalCommand | None:
        """Return the command of *remote*; None if it has none."""
        if remote is None or remote.command is None:
            return None
        return cls(
            owner="approval.remote", rule="", arguments=remote.command, timeout_seconds=remote.command_timeout_seconds
        )

    def problem(self, finished: Finished) -> str | None:
        """Return why a *finished* command allows no approval; None if it exited with 0 in time."""
        detail = f": {finished.error_output}" if finished.error_output else "."
        if finished.ending is Ending.DEADLINE:
            return f"The command of {self.owner} did not end within {self.timeout_seconds:g} s{detail}"
        if finished.exit_code != 0:
            return f"The command of {self.owner} failed with exit code {finished.exit_code}{detail}"
        return None


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command."""

    approval: PendingApproval
    """The approval at the start of the command."""
    problem: str | None
    """None: the command exited with 0 in time."""
    message: str
    """A sentence with the result."""


class ApprovalCommands:
    """Runs commands of approvals without the variables *unset*; calls *wake* when a command has ended."""

    def __init__(self, wake: Callable[[], None], *, unset: Collection[str] = ()) -> None:
        self._wake = wake
        self._unset = unset
        self._lock = threading.Lock()
        self._running: dict[_Run, tuple[Runner, threading.Thread]] = {}
        self._ended: list[CommandResult] = []
        self._closed = threading.Event()
        self._log = ThrottledLog(logger)

    @property
    def is_full(self) -> bool:
        """Return whether the maximum number of commands is running."""
        with self._lock:
            return len(self._running) >= _MOST_AT_ONCE

    def is_running(self, approval: PendingApproval) -> bool:
        """Return whether a command for *approval* runs, or its result was not taken yet."""
        run = _run_of(approval)
        with self._lock:
            return run in self._running or any(_run_of(each.approval) == run for each in self._ended)

    def start(self, approval: PendingApproval, command: ApprovalCommand, record: TransitionRecord) -> bool:
        """Run *command* for *approval* of the event of *record*; return False if no thread can be started."""
        runner, run = Runner(), _run_of(approval)
        name = f"approval:command:{command.rule or 'remote'}"
        thread = threading.Thread(target=self._run, args=(approval, command, record, runner), name=name, daemon=True)
        with self._lock:
            if self._closed.is_set():
                return False
            self._running[run] = (runner, thread)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                del self._running[run]
            self._log.problem(run, logging.ERROR, f"The command of {command.owner} cannot run yet: {error}.")
            return False
        logger.info("The command of %s runs.", command.owner, extra={"event_id": approval.event_id})
        return True

    def take(self, state: ApprovalState, *, now: float) -> Evaluation:
        """Return the changes by the commands that have ended since the last call.

        A command of an approval that was withdrawn or ended meanwhile changes nothing.
        """
        result = Evaluation()
        with self._lock:
            taken, self._ended = self._ended, []
        for ended in taken:
            before, approval = ended.approval, state.approvals.get(ended.approval.key)
            is_the_same = approval is not None and _run_of(approval) == _run_of(before)
            if approval is None or not is_the_same or approval.state is not ApprovalStage.DRAINING:
                continue
            if (
                approval.arrivals != before.arrivals
            ):  # withdrawn, and then wanted by other decisions: the command runs again
                continue
            message = ended.message if approval.arrivals else None
            done = msgspec.structs.replace(approval, command_result=message, changed_at=now)
            if ended.problem is None:
                result.approvals.append(msgspec.structs.replace(done, state=ApprovalStage.WANTED))
            else:
                _fail(state, done, ended.problem, result)
        return result

    def close(self) -> None:
        """Kill the running commands. They run again after the next start of the agent."""
        with self._lock:
            self._closed.set()
            running = list(self._running.values())
        for runner, _ in running:
            runner.close()
        for _, thread in running:
            thread.join(_JOIN_SECONDS)

    def _run(
        self, approval: PendingApproval, command: ApprovalCommand, record: TransitionRecord, runner: Runner
    ) -> None:
        began_at = time.monotonic()
        try:
            finished = self._finished(command, record, runner)
            problem = command.problem(finished)
            was_closed = finished.ending is Ending.CLOSED
        except OSError as error:
            was_closed = False
            problem = f"The command of {command.owner} cannot be started: {error.strerror or error}."
        except Exception as error:
            logger.exception("A command of an approval failed unexpectedly.")
            was_closed = False
            problem = f"The command of {command.owner} failed: {error!r}."
        message = problem or f"The command of {command.owner} exited 0 after {time.monotonic() - began_at:.1f} s."
        with self._lock:
            del self._running[_run_of(approval)]
            if not (was_closed or self._closed.is_set()):
                self._ended.append(CommandResult(approval=approval, problem=problem, message=message))
        self._wake()

    def _finished(self, command: ApprovalCommand, record: TransitionRecord, runner: Runner) -> Finished:
        """Run *command*; try again for a while if it cannot be started, and then raise OSError."""
        give_up_at = time.monotonic() + min(command.timeout_seconds, _LONGEST_WAIT_SECONDS)
        while True:
            try:
                return runner.run(
                    command.arguments,
                    deadline_seconds=command.timeout_seconds,
                    stdin=encode(record) + b"\n",
                    environment=environment_of(record, rule=command.rule),
                    without=self._unset,
                )
            except OSError as error:
                if error.errno not in PASSING_ERRORS or time.monotonic() >= give_up_at:
                    raise
                message = f"The command of {command.owner} cannot be started for now: {error.strerror}."
                self._log.problem(command.owner, logging.ERROR, message)
            self._closed.wait(_TRY_AGAIN_SECONDS)  # a closed runner returns at once


def _run_of(approval: PendingApproval) -> _Run:
    return approval.key, approval.source


def _fail(state: ApprovalState, approval: PendingApproval, problem: str, result: Evaluation) -> None:
    """Add the failure of the command for *approval* to *result*, and refuse the decisions behind it."""
    why = ApprovalResult.COMMAND_FAILED
    result.approvals.append(msgspec.structs.replace(approval, state=ApprovalStage.COMMAND_FAILED))
    told = msgspec.structs.replace(approval, command_result=None)  # the message already contains it
    result.records.append(approval_record(told, Transition.APPROVAL_FAILED, why, message=problem))
    if not approval.arrivals:
        return
    for decision in state.decisions:
        if decision.state is not DecisionStage.WAITING or decision.key != approval.key or decision.source != "portal":
            continue
        result.update_decisions([decision.arrival], DecisionStage.REFUSED, why.value, problem)
        if decision.arrival not in approval.arrivals:
            # More people approved than required. The command does not run for each of them.
            surplus = msgspec.structs.replace(
                told,
                decision_id=decision.decision_id,
                approvers=(decision.approver,),
                reason=decision.reason,
                arrivals=(decision.arrival,),
            )
            result.records.append(approval_record(surplus, Transition.APPROVAL_FAILED, why, message=problem))
