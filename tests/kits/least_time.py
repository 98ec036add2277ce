"""The least time that something takes, for bounds that are tighter than a busy machine keeps each time.

What else runs makes a call late now and then; a call that takes too long by itself does so every time. So it is called
again when it was late, and the least of a few times is what counts, as with `timeit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TRIES = 5


def least_seconds(call: Callable[[], object], *, below: float, tries: int = _TRIES) -> float:
    """Return the least time that *call* took, of so many *tries*; the first below *below* is enough."""
    return least(lambda: _seconds(call), below=below, tries=tries)


def least(measure: Callable[[], float], *, below: float, tries: int = _TRIES) -> float:
    """Return the least of what *measure* returned, of so many *tries*; the first below *below* is enough."""
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
