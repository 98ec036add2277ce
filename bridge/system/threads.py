"""Threads: `run_daemon` runs a function aside and returns its Future; `LoopWatch` tells whether a loop is stuck.

A loop knows how long it means to wait, or how long what it is about to call may take at most; others know only the
time. The slack is for a machine under load and for one that Azure has just frozen: its clocks jump by up to half a
minute when it wakes, before any loop could turn.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from bridge.clock import REAL_CLOCK, Clock

_P = ParamSpec("_P")
_T = TypeVar("_T")

SLACK_SECONDS = 30.0
_DEADLINE_FACTOR = 1.1


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

    def idle(self) -> None:
        """Clear the deadline: the loop has ended, or has not begun."""
        self._due = math.inf

    @property
    def late_seconds(self) -> float:
        """How far the loop is beyond its deadline and the slack; 0 when it is not."""
        return max(self._clock.monotonic() - self._due, 0.0)
