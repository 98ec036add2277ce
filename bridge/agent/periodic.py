"""Tasks that a running agent repeats, each at its own interval, on the one thread that calls `run_due`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from bridge.clock import REAL_CLOCK, Clock
from bridge.logs import ThrottledLog

logger = logging.getLogger(__name__)


class _Task(msgspec.Struct, kw_only=True):
    run: Callable[[], object]
    interval: Callable[[], float]
    ran_at: float


class PeriodicTasks:
    """The tasks of one agent."""

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._tasks: list[_Task] = []
        self._report = ThrottledLog(logger)

    def every(self, seconds: float | Callable[[], float], run: Callable[[], object], *, now: bool = False) -> None:
        """Call *run* every *seconds*, never while *seconds* is 0; with *now*, the first time at the next `run_due`.

        *seconds* may be a function, for an interval that changes. A change takes effect at once.
        """
        interval = seconds if callable(seconds) else lambda: seconds
        ran_at = float("-inf") if now else self._clock.monotonic()
        self._tasks.append(_Task(run=run, interval=interval, ran_at=ran_at))

    def run_due(self) -> None:
        """Run the tasks that are due."""
        now = self._clock.monotonic()
        for task in self._tasks:
            seconds = task.interval()
            if seconds and now - task.ran_at >= seconds:
                task.ran_at = now
                self._run(task)

    def _run(self, task: _Task) -> None:
        try:
            task.run()
        except Exception as error:  # noqa: BLE001  # logged with its traceback; the other tasks must run
            message = f"A periodic task failed. The agent tries again. {error}"
            self._report.problem(id(task), logging.ERROR, message, exc_info=error)
        else:
            self._report.recovered(id(task), "The periodic task succeeded again.")
