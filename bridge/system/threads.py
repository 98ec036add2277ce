"""Threads: `run_daemon` starts a function, `LoopWatch` detects a stuck loop, and `RunningTime` limits a wait.

Before each wait or call, a loop sets the longest time that the wait or call may take. A loop counts as late only 30 s
after this time, because the machine may be busy. After a freeze by Azure, the clocks can also jump by half a minute.
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
#: If a wait ends this much too late, the process did not run.
_STALL_SECONDS = 0.25
#: The counted share of such a wait, so that the limit of a starved process also ends.
_COUNTED_OF_A_STALL = 0.1


def run_daemon(name: str, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
    """Call *work* on a new daemon thread *name*; return the Future of the result.

    Use it for calls that can hang, such as a resolver or an SDK. The thread of an executor would delay the exit.
    """
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # a cancel would not stop the thread

    def run() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # the top of a thread; the caller receives the error
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class LoopWatch:
    """The deadline of one loop. Only the loop writes it."""

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._due = math.inf

    def expect_within(self, within_seconds: float) -> None:
        """Set the deadline of the next call to *within_seconds* plus the slack."""
        self._due = self._clock.monotonic() + within_seconds + SLACK_SECONDS

    def expect_call_within(self, deadline_seconds: float) -> None:
        """Set the deadline for a call that ends within 1.1 x *deadline_seconds*."""
        self.expect_within(deadline_seconds * _DEADLINE_FACTOR)

    def idle(self) -> None:
        """Clear the deadline: the loop does not run."""
        self._due = math.inf

    @property
    def late_seconds(self) -> float:
        """Time since the deadline; 0 before the deadline."""
        return max(self._clock.monotonic() - self._due, 0.0)


class RunningTime:
    """A limit of *seconds* that counts only the time in which this process runs. A freeze of the VM does not count.

    The monotonic clock continues during a freeze or jumps after it. A caller therefore waits in steps of `next_wait`,
    and a step that takes much longer was a freeze. For one thread.
    """

    def __init__(self, seconds: float) -> None:
        self.left_seconds = seconds
        self._at = time.monotonic()
        self._longest = 0.0

    def next_wait(self, at_most: float = _LONGEST_WAIT_SECONDS) -> float:
        """Count the time since the last call, and return the length of the next wait; 0 or less at the end."""
        now = time.monotonic()
        elapsed, self._at = now - self._at, now
        if elapsed - self._longest > _STALL_SECONDS and self._longest:
            elapsed = self._longest * _COUNTED_OF_A_STALL
        self.left_seconds -= elapsed
        self._longest = min(at_most, max(self.left_seconds / 4, _SHORTEST_WAIT_SECONDS), max(self.left_seconds, 0.0))
        return self._longest
