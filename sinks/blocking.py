"""Enforces a deadline for calls that can block indefinitely, such as a write to a disk.

The calls run one at a time in a separate thread, so `send` can return at its deadline even if a call blocks. Retries do
not start more threads. The sink recovers when the blocked call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from bridge.sink import DeliveryFailed, RetryReason, run_daemon


class BlockingCalls:
    """Runs the blocking calls of one sink. Error messages contain *target*, such as a file."""

    def __init__(self, name: str, *, target: str) -> None:
        self._name = name
        self._target = target
        self._last: Future[None] | None = None
        self._closed: Future[Any] = Future()

    def run(self, work: Callable[[], None], *, timeout_seconds: float) -> None:
        """Call *work* in a separate thread. Raise DeliveryFailed at the timeout.

        If an earlier call is still blocked, *work* starts after that call returns, and the wait counts toward the
        timeout. If *work* raises an exception, the caller receives the exception.
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
        """Cancel a `run` in another thread, and reject further calls."""
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
