"""Commands of rules: programs that must succeed on this VM before the rule approves.

Each command has a thread of its own, so that a drain of ten minutes delays no other approval. It runs once for an event
as it is: what became of it is kept. The one exception is an agent that died or was stopped meanwhile. How far the
command came is then unknown, and it runs again: skipping it would approve an event for a VM that may not be drained,
or leave a drained one unapproved. So a command must bear being run twice.

The command gets the last record of the event as JSON on standard input, and the variables of
`bridge.events.environment`, SCHEDULED_EVENT_RULE with the name of the rule among them. Of the agent's own variables it
does not get those that hold secrets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

import msgspec

from bridge.approval.outcomes import Evaluation, approval_record
from bridge.config.approval import RuleSettings
from bridge.events.environment import environment_of
from bridge.events.event import encode
from bridge.events.record import Transition, TransitionRecord
from bridge.logs import ThrottledLog
from bridge.outbox.approvals import ApprovalResult, ApprovalStage, ApprovalState, EventVersion
from bridge.system.run_and_kill import PASSING_ERRORS, Ending, Finished, Runner

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 8
_JOIN_SECONDS = 1.0
#: Without a descriptor or a process to be had, it is tried so often, and for so long.
_TRY_AGAIN_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 60.0


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended."""

    key: EventVersion
    problem: str | None
    """None: it exited 0 in time."""


class RuleCommands:
    """Runs the commands of rules, without the variables *unset*; *wake* is called when one has ended."""

    def __init__(self, wake: Callable[[], None], *, unset: Collection[str] = ()) -> None:
        self._wake = wake
        self._unset = unset
        self._lock = threading.Lock()
        self._running: dict[EventVersion, tuple[Runner, threading.Thread]] = {}
        self._ended: list[CommandResult] = []
        self._closed = threading.Event()
        self._log = ThrottledLog(logger)

    @property
    def is_full(self) -> bool:
        """Return whether no other command may start now."""
        with self._lock:
            return len(self._running) >= _MOST_AT_ONCE

    def is_running(self, key: EventVersion) -> bool:
        """Return whether the command for *key* runs, or its end was not taken yet."""
        with self._lock:
            return key in self._running or any(each.key == key for each in self._ended)

    def start(self, key: EventVersion, rule: RuleSettings, record: TransitionRecord) -> bool:
        """Run the command of *rule* for the event of *record*; return whether it runs: no thread may be to be had."""
        runner = Runner()
        thread = threading.Thread(
            target=self._run, args=(key, rule, record, runner), name=f"approval:command:{rule.name}", daemon=True
        )
        with self._lock:
            if self._closed.is_set():
                return False
            self._running[key] = (runner, thread)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                del self._running[key]
            self._log.problem(key, logging.ERROR, f"The command of rule {rule.name} cannot run yet: {error}.")
            return False
        logger.info("A rule's command runs.", extra={"rule": rule.name, "event_id": key[0]})
        return True

    def take(self, state: ApprovalState, *, now: float) -> Evaluation:
        """Return what follows from *state* by the commands that have ended since the last call.

        That is nothing for an approval that was decided otherwise meanwhile.
        """
        result = Evaluation()
        with self._lock:
            taken, self._ended = self._ended, []
        for ended in taken:
            approval = state.approvals.get(ended.key)
            if approval is None or approval.state is not ApprovalStage.DRAINING:
                continue
            stage = ApprovalStage.WANTED if ended.problem is None else ApprovalStage.COMMAND_FAILED
            result.approvals.append(msgspec.structs.replace(approval, state=stage, changed_at=now))
            if ended.problem is not None:
                failed, why = Transition.APPROVAL_FAILED, ApprovalResult.COMMAND_FAILED
                result.records.append(approval_record(approval, failed, why, message=ended.problem))
        return result

    def close(self) -> None:
        """Kill what runs; it runs again with the next start of the agent."""
        with self._lock:
            self._closed.set()
            running = list(self._running.values())
        for runner, _ in running:
            runner.close()
        for _, thread in running:
            thread.join(_JOIN_SECONDS)

    def _run(self, key: EventVersion, rule: RuleSettings, record: TransitionRecord, runner: Runner) -> None:
        try:
            finished = self._finished(rule, record, runner)
            problem = _problem(rule, finished)
            was_closed = finished.ending is Ending.CLOSED
        except OSError as error:
            was_closed = False
            problem = f"The command of rule {rule.name} cannot be started: {error.strerror or error}."
        except Exception as error:
            logger.exception("A rule's command failed in an unforeseen way.")
            was_closed = False
            problem = f"The command of rule {rule.name} failed: {error!r}."
        with self._lock:
            del self._running[key]
            if not (was_closed or self._closed.is_set()):
                self._ended.append(CommandResult(key=key, problem=problem))
        self._wake()

    def _finished(self, rule: RuleSettings, record: TransitionRecord, runner: Runner) -> Finished:
        """Run the command, a while later when it cannot be started for now; raise OSError when it cannot at all."""
        give_up_at = time.monotonic() + min(rule.command_timeout_seconds, _LONGEST_WAIT_SECONDS)
        while True:
            try:
                return runner.run(
                    rule.command or (),
                    deadline_seconds=rule.command_timeout_seconds,
                    stdin=encode(record) + b"\n",
                    environment=environment_of(record, rule=rule.name),
                    without=self._unset,
                )
            except OSError as error:
                if error.errno not in PASSING_ERRORS or time.monotonic() >= give_up_at:
                    raise
                message = f"The command of rule {rule.name} cannot be started for now: {error.strerror}."
                self._log.problem(rule.name, logging.ERROR, message)
            self._closed.wait(_TRY_AGAIN_SECONDS)  # a runner that is closed says so


def _problem(rule: RuleSettings, finished: Finished) -> str | None:
    detail = f": {finished.error_output}" if finished.error_output else "."
    if finished.ending is Ending.DEADLINE:
        return f"The command of rule {rule.name} did not end within {rule.command_timeout_seconds:g} s{detail}"
    if finished.exit_code != 0:
        return f"The command of rule {rule.name} failed with exit code {finished.exit_code}{detail}"
    return None
