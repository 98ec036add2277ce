"""Tasks that a running agent does now and then, each at its own interval, on the one thread that calls `run_due`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from bridge.clock import REAL_CLOCK, Clock
from bridge.logs import ThrottledLog

logger = logging.getLogger(__name__)


class _Task(msgspec.Struct, kw_only=True):
    run: Callable[[], object]
    seconds: Callable[[], float]
    due: float


class PeriodicTasks:
    """The tasks of one agent."""

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._tasks: list[_Task] = []
        self._report = ThrottledLog(logger)

    def every(self, seconds: float | Callable[[], float], run: Callable[[], object], *, now: bool = False) -> None:
        """Call *run* each *seconds*, the first time at the next `run_due` with *now*; never while *seconds* is 0."""
        interval = seconds if callable(seconds) else lambda: seconds
        self._tasks.append(_Task(run=run, seconds=interval, due=self._clock.monotonic() + (0.0 if now else interval())))

    def run_due(self) -> None:
        """Run the tasks that are due; called about once a second."""
        now = self._clock.monotonic()
        for task in self._tasks:
            seconds = task.seconds()
            if seconds:  # an interval that was shortened is in force at once
                task.due = min(task.due, now + seconds)
            if seconds and now >= task.due:
                task.due = now + seconds
                self._run(task)

    def _run(self, task: _Task) -> None:
        try:
            task.run()
        except Exception as error:  # noqa: BLE001  # logged with its traceback, once; the others must run too
            self._report.problem(
                id(task), logging.ERROR, f"A periodic task failed; it runs again. {error}", exc_info=error
            )
        else:
            self._report.recovered(id(task), "The periodic task works again.")


class FileWatch:
    """Calls *react* when *file* has another time than before: a command beside the agent has touched it."""

    def __init__(self, file: Path, react: Callable[[], object]) -> None:
        self._file = file
        self._react = react
        self._touched_at = self._read()

    def check(self) -> None:
        """Compare the file's time once."""
        touched_at = self._read()
        if touched_at != self._touched_at:
            self._touched_at = touched_at
            self._react()

    def _read(self) -> int | None:
        try:
            return self._file.lstat().st_mtime_ns
        except OSError:
            return None
