"""Starts threads, detects loops that hang, and limits waits.

Each loop sets a deadline before it waits or makes a call, and counts as late if it is still waiting 30 s after the
deadline. A delay of up to 30 s is normal on a busy machine or after Azure unfreezes the VM.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from bridge.clock import REAL_CLOCK, Clock

_P = ParamSpec("_P")
_T = TypeVar("_T")

SLACK_SECONDS = 30.0
_DEADLINE_FACTOR = 1.1
_LONGEST_WAIT_SECONDS = 1.0
_SHORTEST_WAIT_SECONDS = 0.05
#: If a wait ends this late, the process did not run.
_STALL_SECONDS = 0.25
#: This share of such a wait still counts, so that a time limit also ends if the process is starved of CPU time.
_COUNTED_OF_A_STALL = 0.1


def run_daemon(name: str, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
    """Run *work* on a new daemon thread *name*, and return a Future.

    Use this function for calls that can hang, such as name lookups and SDK calls, because a hanging daemon thread does
    not prevent the process from exiting.
    """
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # a cancel would not stop the thread

    def run() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # the caller receives the error
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class LoopWatch:
    """The deadline of one loop. Only the loop itself sets it."""

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._due = math.inf

    def expect_within(self, within_seconds: float) -> None:
        """Set the deadline to *within_seconds* from now, plus 30 s."""
        self._due = self._clock.monotonic() + within_seconds + SLACK_SECONDS

    def expect_call_within(self, deadline_seconds: float) -> None:
        """Set the deadline for a call that may take up to 10 % longer than *deadline_seconds*."""
        self.expect_within(deadline_seconds * _DEADLINE_FACTOR)

    def idle(self) -> None:
        """Clear the deadline, because the loop is not running."""
        self._due = math.inf

    @property
    def late_seconds(self) -> float:
        """Return the time since the deadline, or 0 before the deadline."""
        return max(self._clock.monotonic() - self._due, 0.0)


class RunningTime:
    """A time limit that pauses while the VM is frozen. Use it in one thread only.

    While the VM is frozen, the monotonic clock can keep running or jump. Callers therefore wait in short steps, and
    `next_wait` returns the length of each step. If a step takes much longer than planned, only a tenth of its planned
    length counts toward the limit.
    """

    def __init__(self, seconds: float) -> None:
        self.left_seconds = seconds
        self._at = time.monotonic()
        self._longest = 0.0

    def next_wait(self) -> float:
        """Return the length of the next wait in seconds, or 0 after the time limit.

        The time since the previous call counts toward the limit.
        """
        now = time.monotonic()
        elapsed, self._at = now - self._at, now
        if elapsed - self._longest > _STALL_SECONDS and self._longest:
            elapsed = self._longest * _COUNTED_OF_A_STALL
        self.left_seconds -= elapsed
        step = min(_LONGEST_WAIT_SECONDS, max(self.left_seconds / 4, _SHORTEST_WAIT_SECONDS))
        self._longest = min(step, max(self.left_seconds, 0.0))
        return self._longest
