"""Tasks that a running agent does now and then, each at its own interval, on the one thread that calls `run_due`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from bridge.clock import REAL_CLOCK, Clock
from bridge.logs import ThrottledLog

logger = logging.getLogger(__name__)


class _Task(msgspec.Struct, kw_only=True):
    run: Callable[[], object]
    seconds: float
    due: float
    interval: Callable[[], float] | None = None
    """What gives `seconds` anew at each turn, for an interval that may change."""
    has_failed: bool = False


#: How often a calm agent has a turn.
CALM_SECONDS = 15.0


class PeriodicTasks:
    """The tasks of one agent.

    A turn in which little is due does little: an agent has nothing to do but this and the poll, for months. So tasks of
    one fixed interval share their turns, whenever they were added: each counts from the same moment (`count_from`). And
    while *is_calm* returns True they run no oftener than each `CALM_SECONDS`.
    """

    def __init__(self, clock: Clock = REAL_CLOCK, *, is_calm: Callable[[], bool] = lambda: False) -> None:
        self._clock = clock
        self._is_calm = is_calm
        self._was_calm = False
        self._counted_from = clock.monotonic()
        self._fixed: list[_Task] = []
        self._adjustable: list[_Task] = []
        self._next_due = -math.inf
        """When the first of the fixed ones is due."""
        self._report = ThrottledLog(logger)

    def every(self, seconds: float | Callable[[], float], run: Callable[[], object], *, now: bool = False) -> None:
        """Call *run* each *seconds*, the first time at the next `run_due` with *now*; never while *seconds* is 0.

        Without *now* the first time may come sooner than that.
        """
        interval = seconds if callable(seconds) else None
        first = seconds() if callable(seconds) else seconds
        due = self._clock.monotonic()
        task = _Task(run=run, seconds=first, due=due, interval=interval)
        if not now:
            task.due = self._next(task, due)
        (self._fixed if interval is None else self._adjustable).append(task)
        self._next_due = min(self._next_due, task.due)

    def count_from(self, moment: float) -> None:
        """Have what is added from now on at a fixed interval take its turns at *moment*, and whole intervals from it.

        *moment* is a monotonic time. What is done right after the poll finds in the processor's caches what the poll
        has just used, and costs two thirds of what it does between two polls.
        """
        self._counted_from = moment

    def run_due(self) -> None:
        """Run the tasks that are due; called about once a second."""
        now = self._clock.monotonic()
        for task in self._adjustable:
            if task.interval is not None:
                task.seconds = task.interval()
            if task.seconds:  # an interval that was shortened is in force at once
                task.due = min(task.due, now + task.seconds)
            self._run_if_due(task, now)
        was_calm, self._was_calm = self._was_calm, self._is_calm()
        if was_calm and not self._was_calm:
            for task in self._fixed:
                task.due = min(task.due, self._next(task, now))
            self._next_due = -math.inf
        if now >= self._next_due:
            for task in self._fixed:
                self._run_if_due(task, now)
            self._next_due = min((task.due for task in self._fixed if task.seconds), default=math.inf)

    def seconds_to_next(self) -> float:
        """Return how long there is nothing to run."""
        tasks = (task for task in (*self._fixed, *self._adjustable) if task.seconds)
        return max(min((task.due for task in tasks), default=math.inf) - self._clock.monotonic(), 0.0)

    def _run_if_due(self, task: _Task, now: float) -> None:
        if task.seconds and now >= task.due:
            task.due = self._next(task, now)
            self._run(task)

    def _next(self, task: _Task, now: float) -> float:
        """Return when *task* is due after *now*."""
        if task.interval is not None or not task.seconds:
            return now + task.seconds
        seconds = max(task.seconds, CALM_SECONDS) if self._was_calm else task.seconds
        due = self._counted_from + max((now - self._counted_from) // seconds, 0) * seconds
        return due + seconds * (1 if due + seconds > now else 2)

    def _run(self, task: _Task) -> None:
        try:
            task.run()
        except Exception as error:  # noqa: BLE001  # logged with its traceback, once; the others must run too
            task.has_failed = True
            self._report.problem(
                id(task), logging.ERROR, f"A periodic task failed; it runs again. {error}", exc_info=error
            )
        else:
            if task.has_failed:
                task.has_failed = False
                self._report.recovered(id(task), "The periodic task works again.")


class FileWatch:
    """Calls *react* when *file* is another than before, or has another time: a command beside the agent touched it."""

    def __init__(self, file: Path, react: Callable[[], object]) -> None:
        self._file = str(file)
        self._react = react
        self._seen = self._read()

    def check(self) -> bool:
        """Compare once; return whether the file is there and was not touched."""
        before, self._seen = self._seen, self._read()
        if self._seen != before:
            self._react()
            return False
        return self._seen is not None

    @property
    def is_there(self) -> bool:
        """Return whether the last `check` found it."""
        return self._seen is not None

    @property
    def is_touched(self) -> bool:
        """Return whether `check` would find it touched, made or deleted."""
        return self._read() != self._seen

    def _read(self) -> tuple[int, int, int] | None:
        try:
            found = os.lstat(self._file)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns
