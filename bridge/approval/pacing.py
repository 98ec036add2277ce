"""When the portal is asked again. Pure but for the counts it keeps: moments in, seconds out, chance is passed in.

An answer that brought something is followed by the next request at once, because there may be more. A portal whose
index grew without end would turn that into a loop that never rests, so there is a store of such turns, large enough
for any backlog, that fills up again ten times a second.
"""

from __future__ import annotations

from collections.abc import Callable

from bridge.backoff import RETRY_AFTER_CAP_SECONDS, full_jitter

#: Between two requests that brought nothing new, from beginning to beginning.
CALM_SECONDS = 1.0
BASE_SECONDS = 1.0
CAP_SECONDS = 60.0

_MOST_AT_ONCE = 500.0
_AT_ONCE_A_SECOND = 10.0


class Pacing:
    """The delays of one channel; *random* returns a number in [0, 1)."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._failures = 0
        self._left_at_once = _MOST_AT_ONCE
        self._counted_at: float | None = None

    def after_news(self, now: float) -> float:
        """Return the seconds until the next request after an answer with a greater index, at monotonic *now*."""
        self._failures = 0
        since = 0.0 if self._counted_at is None else now - self._counted_at
        self._counted_at = now
        self._left_at_once = min(_MOST_AT_ONCE, self._left_at_once + since * _AT_ONCE_A_SECOND)
        self._left_at_once -= 1.0
        return max(0.0, -self._left_at_once / _AT_ONCE_A_SECOND)

    def after_nothing(self, now: float, *, began_at: float) -> float:
        """Return the same after any other good answer to a request that began at *began_at*."""
        self._failures = 0
        return max(0.0, began_at + CALM_SECONDS - now)

    def after_failure(self, retry_after_seconds: float | None) -> float:
        """Return the same after one more failure; the portal's own wish wins, for up to an hour.

        A wish of 0 is none: five thousand VMs would come back together, at once.
        """
        self._failures += 1
        if retry_after_seconds:
            return min(retry_after_seconds, RETRY_AFTER_CAP_SECONDS)
        return full_jitter(self._failures, base_seconds=BASE_SECONDS, cap_seconds=CAP_SECONDS, random=self._random)
