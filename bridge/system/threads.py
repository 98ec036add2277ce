"""Threads: `run_daemon` runs a function aside, `LoopWatch` tells whether a loop is stuck, `RunningTime` limits a wait.

A loop knows how long it means to wait, or how long what it is about to call may take at most; others know only the
time. The slack is for a machine under load and for one that Azure has just frozen: its clocks jump by up to half a
minute when it wakes, before any loop could turn.
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
#: A wait that ends so much later than it should was no wait: this process did not run.
_STALL_SECONDS = 0.25
#: What of such a wait counts: a process that is starved all the time must come to its end too.
_COUNTED_OF_A_STALL = 0.1


def run_daemon(name: str, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
    """Call *work* on a new daemon thread called *name*; return the Future of what it returns or raises.

    For what may hang without a deadline of its own, such as a resolver or an SDK: the thread may be left behind. One
    of an executor would hold up the end of the process.
    """
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled: nothing would stop the thread

    def run() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # the top of a thread; the caller gets it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class LoopWatch:
    """The deadline of one loop; written by the loop alone, read by anybody."""

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        self._clock = clock
        self._due = math.inf

    def expect_within(self, within_seconds: float) -> None:
        """Set the deadline: the loop turns again within *within_seconds*, and the slack."""
        self._due = self._clock.monotonic() + within_seconds + SLACK_SECONDS

    def expect_call_within(self, deadline_seconds: float) -> None:
        """Set the deadline to that of a call the loop is about to make, which all our calls hold within 1.1 x."""
        self.expect_within(deadline_seconds * _DEADLINE_FACTOR)

    def extend(self, seconds: float) -> None:
        """Put the deadline off by *seconds*, in which this process did not run."""
        self._due += seconds

    def idle(self) -> None:
        """Clear the deadline: the loop has ended, or has not begun."""
        self._due = math.inf

    @property
    def late_seconds(self) -> float:
        """How far the loop is beyond its deadline and the slack; 0 when it is not."""
        return max(self._clock.monotonic() - self._due, 0.0)


class RunningTime:
    """A limit of *seconds* in which this process runs: a VM that is frozen meanwhile uses none of it up.

    The monotonic clock goes on over a freeze, or jumps after it. So whoever waits does it in pieces, each no longer
    than `next_wait` says, and one that takes much longer was a freeze. For one thread.
    """

    def __init__(self, seconds: float) -> None:
        self.left_seconds = seconds
        self.stalled_seconds = 0.0
        """How long this process did not run, as far as was noticed."""
        self._at = time.monotonic()
        self._longest = 0.0

    def next_wait(self, at_most: float = _LONGEST_WAIT_SECONDS) -> float:
        """Count the time since the last call, and return how long the next wait may be; 0 or less: it is over."""
        now = time.monotonic()
        elapsed, self._at = now - self._at, now
        if elapsed - self._longest > _STALL_SECONDS and self._longest:
            counted = self._longest * _COUNTED_OF_A_STALL
            self.stalled_seconds += elapsed - counted
            elapsed = counted
        self.left_seconds -= elapsed
        self._longest = min(at_most, max(self.left_seconds / 4, _SHORTEST_WAIT_SECONDS), max(self.left_seconds, 0.0))
        return self._longest
