"""Measures the minimum time of a call, for bounds that a busy machine cannot meet on every attempt.

Other processes delay a call occasionally, but a call that is slow by itself is slow every time. Therefore, a late call
is repeated, and the minimum of a few attempts counts, as with `timeit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TRIES = 5


def least_seconds(call: Callable[[], object], *, below: float, tries: int = _TRIES) -> float:
    """Return the minimum time of *call* in at most *tries* attempts. Stops at the first time below *below*."""
    return least(lambda: _seconds(call), below=below, tries=tries)


def least(measure: Callable[[], float], *, below: float, tries: int = _TRIES) -> float:
    """Return the minimum of *measure* in at most *tries* attempts. Stops at the first value below *below*."""
    lowest = measure()
    for _ in range(tries - 1):
        if lowest < below:
            break
        lowest = min(lowest, measure())
    return lowest


def _seconds(call: Callable[[], object]) -> float:
    began_at = time.monotonic()
    call()
    return time.monotonic() - began_at
