"""A loop's promise of when it will turn again, so that others can tell a loop that waits from one that is stuck.

A loop knows how long it means to wait, or how long what it is about to call may take at most; whoever asks knows only
the time. The slack is for a machine under load and for one that Azure has just frozen: its clocks jump by up to half a
minute when it wakes, before any loop could turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SLACK_SECONDS = 30.0
_DEADLINE_FACTOR = 1.1


class LoopWatch:
    """One loop's promise; written by the loop alone, read by anybody. *monotonic* returns seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._due = math.inf

    def promise(self, within_seconds: float) -> None:
        """Say that the loop turns again within *within_seconds*, but for the slack."""
        self._due = self._monotonic() + within_seconds + SLACK_SECONDS

    def promise_call(self, deadline_seconds: float) -> None:
        """Say that the loop is about to call something with that deadline, which all our calls hold within 1.1 x."""
        self.promise(deadline_seconds * _DEADLINE_FACTOR)

    def rest(self) -> None:
        """Say that the loop has ended, or has not begun."""
        self._due = math.inf

    @property
    def late_seconds(self) -> float:
        """How far the loop is beyond what it promised, slack included; 0 when it is not."""
        return max(self._monotonic() - self._due, 0.0)
