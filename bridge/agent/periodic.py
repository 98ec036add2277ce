"""What a running agent does now and then, each thing at its own pace, on the one thread that calls `tick`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from bridge.clock import REAL_CLOCK, Clock
from bridge.logs import ThrottledLog

logger = logging.getLogger(__name__)


class _Chore(msgspec.Struct, kw_only=True):
    do: Callable[[], object]
    seconds: Callable[[], float]
    due: float


class PeriodicTasks:
    """A list of things to do."""

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._chores: list[_Chore] = []
        self._report = ThrottledLog(logger)

    def every(self, seconds: float | Callable[[], float], do: Callable[[], object], *, now: bool = False) -> None:
        """Call *do* each *seconds*, the first time at the next tick with *now*; never while *seconds* is 0."""
        pace = seconds if callable(seconds) else lambda: seconds
        self._chores.append(_Chore(do=do, seconds=pace, due=self._clock.monotonic() + (0.0 if now else pace())))

    def tick(self) -> None:
        """Do what is due; called about once a second."""
        now = self._clock.monotonic()
        for chore in self._chores:
            seconds = chore.seconds()
            if seconds:  # a pace that was quickened is in force at once
                chore.due = min(chore.due, now + seconds)
            if seconds and now >= chore.due:
                chore.due = now + seconds
                self._do(chore)

    def _do(self, chore: _Chore) -> None:
        try:
            chore.do()
        except Exception as error:  # noqa: BLE001  # logged with its traceback, once; the others must be done too
            self._report.problem(id(chore), logging.ERROR, f"A chore failed; it is done again. {error}", exc_info=error)
        else:
            self._report.recovered(id(chore), "The chore is done again.")


class FileWatch:
    """Calls *do* when the time of *file* is another than before: a command beside the agent has touched it."""

    def __init__(self, file: Path, do: Callable[[], object]) -> None:
        self._file = file
        self._do = do
        self._touched_at = self._read()

    def look(self) -> None:
        """Look once."""
        touched_at = self._read()
        if touched_at != self._touched_at:
            self._touched_at = touched_at
            self._do()

    def _read(self) -> int | None:
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return None
