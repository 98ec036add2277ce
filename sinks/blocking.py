"""BlockingCalls: calls that may block without end, such as a write to a frozen disk, with a deadline.

The calls run on a thread, one at a time, so that `send` keeps its deadline. A blocked call costs one thread, no matter
how often the host tries again, and the sink works again as soon as the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from bridge.sink import DeliveryFailed, RetryReason, run_daemon


class BlockingCalls:
    """The calls of one sink to *target*, its name in messages. For one thread, except `close`."""

    def __init__(self, name: str, *, target: str) -> None:
        self._name = name
        self._target = target
        self._last: Future[None] | None = None
        self._closed: Future[Any] = Future()

    def run(self, work: Callable[[], None], *, timeout_seconds: float) -> None:
        """Call *work* and raise its exceptions; raise DeliveryFailed if it does not return in time.

        A call that still blocks comes first, and the wait for its end counts.
        """
        deadline = time.monotonic() + timeout_seconds
        if self._last is not None and not self._is_over(self._last, deadline):
            raise self._blocked(timeout_seconds)
        if self._closed.done():
            raise DeliveryFailed("The sink is closed.")
        self._last = call = run_daemon(self._name, work)
        if not self._is_over(call, deadline):
            raise self._blocked(timeout_seconds)
        self._last = None
        call.result()

    def close(self) -> None:
        """End the wait of another thread, and refuse further calls. A blocked call continues."""
        if not self._closed.done():
            self._closed.set_result(None)

    def _is_over(self, call: Future[None], deadline: float) -> bool:
        wait([call, self._closed], max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        return call.done()

    def _blocked(self, seconds: float) -> DeliveryFailed:
        if self._closed.done():
            return DeliveryFailed("The sink was closed during the send.")
        message = f"{self._target} did not respond within {seconds:g} s."
        return DeliveryFailed(message, reason=RetryReason.TIMEOUT)
