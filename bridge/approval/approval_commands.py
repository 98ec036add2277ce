"""Runs drain commands, which must succeed before the agent sends an approval to Azure.

A rule or ``approval.remote`` can name a command that drains this VM. Each command runs on its own thread, because a
drain can take ten minutes and must not delay other approvals.

The agent runs the command once per approval and stores the result. If the agent stops during a run, it reruns the
command at the next start, so commands must tolerate a second run.

If an approval is withdrawn while its command runs, the agent lets the command finish and ignores the result. An
interrupted drain would leave the VM in a worse state than a completed drain.

The command reads the event's last record as JSON from standard input. Its environment contains the variables from
`bridge.events.environment`, but no variables that contain secrets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait

import msgspec

from bridge.approval.changes import Changes
from bridge.config.approval import RemoteSettings, RuleSettings
from bridge.events.environment import environment_of
from bridge.events.event import encode
from bridge.events.record import ApprovalResult, Transition, TransitionRecord
from bridge.outbox.rows import ApprovalStage, ApprovalState, DecisionStage, PendingApproval
from bridge.system.run_and_kill import Ending, Finished, Runner
from bridge.system.threads import run_daemon

logger = logging.getLogger(__name__)

CommandSettings = RuleSettings | RemoteSettings

_MOST_AT_ONCE = 8
_CLOSE_SECONDS = 1.0


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    approval: PendingApproval
    """The approval when the command started."""
    settings: CommandSettings
    runner: Runner
    finished: Future[Finished]
    began_at: float

    def problem(self) -> str | None:
        """Return why the command failed, or None if it succeeded. The command must have ended."""
        owner = _owner(self.settings)
        try:
            finished = self.finished.result()
        except OSError as error:
            return f"The command of {owner} cannot be started: {error.strerror or error}."
        except Exception as error:
            logger.exception("The command of %s failed unexpectedly.", owner)
            return f"The command of {owner} failed: {error!r}."
        detail = f": {finished.error_output}" if finished.error_output else "."
        if finished.ending is Ending.DEADLINE:
            seconds = self.settings.command_timeout_seconds
            return f"The command of {owner} did not end within {seconds:g} s{detail}"
        if finished.exit_code != 0:
            return f"The command of {owner} failed with exit code {finished.exit_code}{detail}"
        extra = {"event_id": self.approval.event_id}
        logger.info("The command of %s succeeded after %.1f s.", owner, time.monotonic() - self.began_at, extra=extra)
        return None


class ApprovalCommands:
    """Runs drain commands on separate threads, and calls *wake* when a command ends.

    *unset* lists the environment variables that commands must not receive. Only `close` is thread-safe.
    """

    def __init__(self, wake: Callable[[], None], *, unset: Collection[str] = ()) -> None:
        self._wake = wake
        self._unset = unset
        self._lock = threading.Lock()
        """Prevents `start` from starting a command during or after `close`."""
        self._is_closed = False
        self._commands: list[_Command] = []
        """The commands whose results `take` has not returned yet."""

    def can_start(self, approval: PendingApproval) -> bool:
        """Return whether fewer than eight commands run, and none of them for *approval*."""
        running = [(each.approval.key, each.approval.source) for each in self._commands]
        return len(running) < _MOST_AT_ONCE and (approval.key, approval.source) not in running

    def start(self, approval: PendingApproval, settings: CommandSettings, record: TransitionRecord) -> None:
        """Start the command of *settings* before *approval* is posted.

        *record* is the last record of the event. Raises RuntimeError if no thread can be started.
        """
        runner = Runner()
        rule = settings.name if isinstance(settings, RuleSettings) else ""
        with self._lock:
            if self._is_closed:
                return
            finished = run_daemon(
                f"approval:command:{rule or 'remote'}",
                runner.run,
                settings.command or (),
                deadline_seconds=settings.command_timeout_seconds,
                stdin=encode(record) + b"\n",
                environment=environment_of(record, rule=rule),
                without=self._unset,
            )
            command = _Command(
                approval=approval, settings=settings, runner=runner, finished=finished, began_at=time.monotonic()
            )
            self._commands = [*self._commands, command]
        finished.add_done_callback(lambda _: self._wake())
        logger.info("The command of %s runs.", _owner(settings), extra={"event_id": approval.event_id})

    def take(self, state: ApprovalState, *, now: float) -> Changes:
        """Return new results. Skip approvals that were withdrawn or ended while the command ran."""
        result = Changes()
        ended = [each for each in self._commands if each.finished.done()]
        if self._is_closed:  # `close` may have killed the programs
            return result
        self._commands = [each for each in self._commands if each not in ended]
        for each in ended:
            problem, before = each.problem(), each.approval
            approval = state.approvals.get(before.key)
            if approval is None or approval.state is not ApprovalStage.DRAINING:
                continue
            if (approval.source, approval.arrivals) != (before.source, before.arrivals):
                continue  # withdrawn, and then started by other decisions, so the command runs again
            done = msgspec.structs.replace(approval, changed_at=now)
            if problem is None:
                result.approvals.append(msgspec.structs.replace(done, state=ApprovalStage.WANTED))
                continue
            failed, why = Transition.APPROVAL_FAILED, ApprovalResult.COMMAND_FAILED
            result.approvals.append(msgspec.structs.replace(done, state=ApprovalStage.COMMAND_FAILED))
            result.add_outcome(done, failed, why, decisions=DecisionStage.REFUSED, message=problem)
        return result

    def close(self) -> None:
        """Kill the running commands. The agent runs them again after its next start."""
        with self._lock:
            self._is_closed = True
        for each in self._commands:
            each.runner.close()
        wait([each.finished for each in self._commands], timeout=_CLOSE_SECONDS)


def _owner(settings: CommandSettings) -> str:
    return f"rule {settings.name}" if isinstance(settings, RuleSettings) else "approval.remote"
