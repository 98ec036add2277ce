"""OutboxUpkeep: how often a running agent has its outbox look after its file, and delete what was kept long enough.

Each look wakes two threads, and each deletion is a transaction, so an agent that has nothing to do does both seldom:
what is made, deleted or renamed in the state directory shows at once where the kernel tells of it, and of what was
delivered nothing is due for days.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future

from bridge.clock import REAL_CLOCK, Clock
from bridge.outbox.outbox import Outbox

#: The tasks of the agent share their turns, which are never quite on time.
_EARLY_SECONDS = 1.0
_LOOK_SECONDS = 30.0
_NOTHING_TO_DELETE_SECONDS = 600.0


class OutboxUpkeep:
    """The upkeep of *outbox*; *is_watched* returns whether the kernel tells of changes in its directory.

    `tend` and `clean` are called every few seconds, on one thread.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        keep_delivered_seconds: float,
        is_watched: Callable[[], bool],
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._outbox = outbox
        self._longest_pause = min(_NOTHING_TO_DELETE_SECONDS, keep_delivered_seconds / 10)
        self._is_watched = is_watched
        self._clock = clock
        self._tended_at = self._cleaned_at = -math.inf
        self._cleaned: Future[int] | None = None

    def directory_changed(self) -> None:
        """Have the file looked at now; not in memory, where each try to leave it makes and touches files itself."""
        if not self._outbox.in_memory:
            self._tend()

    def tend(self) -> None:
        """Look after the file, each time while nobody tells or the disk has refused, else each 30 s."""
        is_calm = self._is_watched() and not self._outbox.in_memory
        if not is_calm or self._clock.monotonic() - self._tended_at >= _LOOK_SECONDS - _EARLY_SECONDS:
            self._tend()

    def _tend(self) -> None:
        self._tended_at = self._clock.monotonic()
        self._outbox.tend()

    def clean(self) -> None:
        """Delete what was kept for long enough; after a time that found nothing, each ten minutes at least."""
        now, last = self._clock.monotonic(), self._cleaned
        found_nothing = last is not None and last.done() and last.exception() is None and not last.result()
        if not found_nothing or now - self._cleaned_at >= self._longest_pause - _EARLY_SECONDS:
            self._cleaned_at, self._cleaned = now, self._outbox.clean()
