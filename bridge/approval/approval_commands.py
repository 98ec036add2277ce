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

from bridge.approval.changes import Changes
from bridge.config.approval import RemoteSettings, RuleSettings
from bridge.events.environment import environment_of
from bridge.events.event import encode
from bridge.events.record import Transition, TransitionRecord
from bridge.logs import ThrottledLog
from bridge.outbox.rows import ApprovalResult, ApprovalStage, ApprovalState, DecisionStage, PendingApproval
from bridge.system.run_and_kill import Ending, Finished, Runner

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 8
_JOIN_SECONDS = 1.0


class ApprovalCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A program and its owner."""

    owner: str
    """``rule NAME`` or ``approval.remote``, for messages."""
    rule: str
    """The name of the rule; empty for the command of the portal."""
    arguments: tuple[str, ...]
    timeout_seconds: float

    @classmethod
    def of(cls, settings: RuleSettings | RemoteSettings | None) -> ApprovalCommand | None:
        """Return the command of *settings*; None if they have none."""
        if settings is None or settings.command is None:
            return None
        rule = settings.name if isinstance(settings, RuleSettings) else ""
        return cls(
            owner=f"rule {rule}" if rule else "approval.remote",
            rule=rule,
            arguments=settings.command,
            timeout_seconds=settings.command_timeout_seconds,
        )

    def problem(self, finished: Finished) -> str | None:
        """Return why a *finished* command allows no approval; None if it exited with 0 in time."""
        detail = f": {finished.error_output}" if finished.error_output else "."
        if finished.ending is Ending.DEADLINE:
            return f"The command of {self.owner} did not end within {self.timeout_seconds:g} s{detail}"
        if finished.exit_code != 0:
            return f"The command of {self.owner} failed with exit code {finished.exit_code}{detail}"
        return None


class ApprovalCommands:
    """Runs commands of approvals without the variables *unset*; calls *wake* when a command has ended."""

    def __init__(self, wake: Callable[[], None], *, unset: Collection[str] = ()) -> None:
        self._wake = wake
        self._unset = unset
        self._lock = threading.Lock()
        self._running: list[tuple[PendingApproval, Runner, threading.Thread]] = []
        self._ended: list[tuple[PendingApproval, str | None]] = []
        """The approval at the start of each command, and why the command allows no approval."""
        self._closed = threading.Event()
        self._log = ThrottledLog(logger)

    @property
    def is_full(self) -> bool:
        """Return whether the maximum number of commands is running."""
        return len(self._running) >= _MOST_AT_ONCE

    def is_running(self, approval: PendingApproval) -> bool:
        """Return whether a command for this event and source runs, or its result was not taken yet."""
        with self._lock:
            known = [*(each[0] for each in self._running), *(each[0] for each in self._ended)]
        return any((each.key, each.source) == (approval.key, approval.source) for each in known)

    def start(self, approval: PendingApproval, command: ApprovalCommand, record: TransitionRecord) -> None:
        """Run *command* for *approval* of the event of *record*. If no thread can be started, call this again."""
        runner = Runner()
        name = f"approval:command:{command.rule or 'remote'}"
        thread = threading.Thread(target=self._run, args=(approval, command, record, runner), name=name, daemon=True)
        with self._lock:
            if self._closed.is_set():
                return
            try:
                thread.start()
            except RuntimeError as error:
                self._log.problem(command.owner, logging.ERROR, f"The command of {command.owner} cannot run: {error}.")
                return
            self._running.append((approval, runner, thread))
        logger.info("The command of %s runs.", command.owner, extra={"event_id": approval.event_id})

    def take(self, state: ApprovalState, *, now: float) -> Changes:
        """Return the changes by the commands that have ended since the last call.

        A command of an approval that was withdrawn or ended meanwhile changes nothing.
        """
        result = Changes()
        with self._lock:
            ended, self._ended = self._ended, []
        for before, problem in ended:
            approval = state.approvals.get(before.key)
            if approval is None or approval.state is not ApprovalStage.DRAINING:
                continue
            if (approval.source, approval.arrivals) != (before.source, before.arrivals):
                continue  # withdrawn, and then wanted by other decisions: the command runs again
            done = msgspec.structs.replace(approval, changed_at=now)
            if problem is None:
                result.approvals.append(msgspec.structs.replace(done, state=ApprovalStage.WANTED))
                continue
            failed, why = Transition.APPROVAL_FAILED, ApprovalResult.COMMAND_FAILED
            result.approvals.append(msgspec.structs.replace(done, state=ApprovalStage.COMMAND_FAILED))
            result.add_outcome(done, failed, why, decisions=DecisionStage.REFUSED, message=problem)
        return result

    def close(self) -> None:
        """Kill the running commands. They run again after the next start of the agent."""
        with self._lock:
            self._closed.set()
            running = list(self._running)
        for _, runner, _ in running:
            runner.close()
        for _, _, thread in running:
            thread.join(_JOIN_SECONDS)

    def _run(
        self, approval: PendingApproval, command: ApprovalCommand, record: TransitionRecord, runner: Runner
    ) -> None:
        began_at = time.monotonic()
        was_closed = False
        try:
            finished = runner.run(
                command.arguments,
                deadline_seconds=command.timeout_seconds,
                stdin=encode(record) + b"\n",
                environment=environment_of(record, rule=command.rule),
                without=self._unset,
            )
            problem = command.problem(finished)
            was_closed = finished.ending is Ending.CLOSED
        except OSError as error:
            problem = f"The command of {command.owner} cannot be started: {error.strerror or error}."
        except Exception as error:
            logger.exception("A command of an approval failed unexpectedly.")
            problem = f"The command of {command.owner} failed: {error!r}."
        if problem is None:
            seconds = time.monotonic() - began_at
            extra = {"event_id": approval.event_id}
            logger.info("The command of %s succeeded after %.1f s.", command.owner, seconds, extra=extra)
        with self._lock:
            self._running = [each for each in self._running if each[1] is not runner]
            if not (was_closed or self._closed.is_set()):
                self._ended.append((approval, problem))
        self._wake()
