"""BlockingCalls: calls of the operating system that may hang without an end, such as a write to a disk that is frozen.

They are made on a thread aside, one at a time, so that `send` keeps its deadline: what hangs costs one thread, however
often the host tries again, and the sink works again as soon as the call comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from bridge.sink import DeliveryFailed, RetryReason, run_daemon


class BlockingCalls:
    """The calls of one sink to *target*, which is what messages call it; for one thread, but for `close`."""

    def __init__(self, name: str, *, target: str) -> None:
        self._name = name
        self._target = target
        self._last: Future[None] | None = None
        self._closed: Future[Any] = Future()

    def run(self, work: Callable[[], None], *, timeout_seconds: float) -> None:
        """Call *work* and raise what it raises; raise DeliveryFailed when it is not over in time, or closed meanwhile.

        What a call from before still hangs in comes first: its end is waited for within the same time.
        """
        deadline = time.monotonic() + timeout_seconds
        if self._last is not None and not self._is_over(self._last, deadline):
            raise self._hanging(timeout_seconds)
        if self._closed.done():
            raise DeliveryFailed("The sink is closed.")
        self._last = call = run_daemon(self._name, work)
        if not self._is_over(call, deadline):
            raise self._hanging(timeout_seconds)
        self._last = None
        call.result()

    def close(self) -> None:
        """Break off the wait of another thread, and make no call any more; one that hangs is left to itself."""
        if not self._closed.done():
            self._closed.set_result(None)

    def _is_over(self, call: Future[None], deadline: float) -> bool:
        wait([call, self._closed], max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        return call.done()

    def _hanging(self, seconds: float) -> DeliveryFailed:
        if self._closed.done():
            return DeliveryFailed("The sink was closed during the send.")
        message = f"{self._target} took nothing within {seconds:g} s: the disk or the service behind it hangs."
        return DeliveryFailed(message, reason=RetryReason.TIMEOUT)
