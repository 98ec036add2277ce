"""A disk that hangs: the outbox's thread is in a call that does not return, and another goes on from memory.

A file system that is frozen for a backup, or a disk that is throttled or gone, gives no error: the call just does not
return. So the outbox's thread says at each step how long it may take (`Turn.enter`), and `StallWatch` looks on. A step
that takes longer is left to its thread, for good: when it returns, `Left` ends the turn there, and nothing that it did
counts but what is on the disk by then. Time is counted in the watch's own ticks: a machine that was frozen as a whole
does not look like a disk that hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bridge.outbox.locks import sync_nudge

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: A commit, and whatever else only writes what is already made.
COMMIT_SECONDS = 2.0
#: What may have to read or compute a lot.
WORK_SECONDS = 10.0
_TICK_SECONDS = 0.25
#: Between two looks at a disk that has hung.
_LOOK_SECONDS = 1.0


class Left(BaseException):
    """The turn was left to its thread: another goes on. No error, so that nothing on the way takes it for one."""


class Step(msgspec.Struct, eq=False):
    """One step of a turn: the same one is the same object."""

    limit_seconds: float


class Turn:
    """What one thread of the outbox is doing; entered by it, left behind by the watch."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._is_left = False
        self.step: Step | None = None
        self.group: list[Any] = []
        """The jobs at hand, done or not."""
        self.has_returned = threading.Event()
        """Set when the call that hung has returned, whatever the disk does next."""
        self.ended = threading.Event()
        """Set when the thread has ended and the disk answers."""
        self.outcomes: list[tuple[Any, Any, Exception | None]] = []
        """The jobs whose commit was begun, and what each returned or raised."""

    def enter(self, limit_seconds: float) -> None:
        """Begin the next step, which takes *limit_seconds* at most; raise Left when the last took too long."""
        with self._gate:
            if self._is_left:
                raise Left
            self.step = Step(limit_seconds)

    def pause(self) -> None:
        """End the last step; raise Left when it took too long."""
        with self._gate:
            if self._is_left:
                raise Left
            self.step = None

    def leave(self, step: Step) -> bool:
        """Leave the turn to its thread, unless it is beyond *step* by now; return whether it was left."""
        with self._gate:
            if self.step is not step or self._is_left:
                return False
            self._is_left = True
            return True


class StallWatch:
    """The thread that leaves a turn which hangs, and calls *go_on*; it wakes only while there is work."""

    def __init__(self, turn: Callable[[], Turn], go_on: Callable[[Turn], None]) -> None:
        self._turn = turn
        self._go_on = go_on
        self._has_work = threading.Event()
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="outbox-watch", daemon=True).start()

    def wake(self) -> None:
        """Look on: there is work."""
        if not self._has_work.is_set():
            self._has_work.set()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._has_work.set()

    def _run(self) -> None:
        seen: Step | None = None
        seconds = 0.0
        while self._has_work.wait() and not self._stop.wait(_TICK_SECONDS):
            turn = self._turn()
            step = turn.step
            if step is None:
                seen = None
                self._rest(turn)
                continue
            seconds = seconds + _TICK_SECONDS if step is seen else 0.0
            seen = step
            if seconds >= step.limit_seconds and turn.leave(step):
                self._go_on(turn)
                seen = None

    def _rest(self, turn: Turn) -> None:
        """Sleep until there is work, unless some came just now."""
        self._has_work.clear()
        if turn.step is not None or turn is not self._turn() or self._stop.is_set():
            self._has_work.set()


def wait_for_disk(directory: Path, stop: threading.Event, note_slow: Callable[[], None]) -> None:
    """Return when the disk under *directory* makes something durable as quickly as a commit, or *stop* is set.

    Call *note_slow* when it made something durable, and that took longer.
    """
    while not stop.is_set() and _sync_seconds(directory) > COMMIT_SECONDS:
        note_slow()
        stop.wait(_LOOK_SECONDS)


def until_there_are_threads(work: Callable[[], _T], stop: threading.Event) -> _T:
    """Return what *work* does, which starts a thread last or fails; again and again while none is to be had.

    Raise RuntimeError when *stop* is set meanwhile.
    """
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            logger.error("No thread can be started to go on in memory; trying again.", extra={"why": repr(error)})  # noqa: TRY400
            if stop.wait(_LOOK_SECONDS):
                raise


def _sync_seconds(directory: Path) -> float:
    """Return how long the disk takes to make something durable, or to say why it does not."""
    started = time.monotonic()
    sync_nudge(directory)
    return time.monotonic() - started
