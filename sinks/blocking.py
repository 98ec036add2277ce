"""Provides a base class for sinks whose calls can block indefinitely.

For example, a disk write can block. Calls run one at a time in a separate thread, so `send` can return at its deadline.
A retry does not start another thread, but waits for the blocked call to return.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from bridge.sink import DeliveryFailed, RetryReason, Sink, run_daemon


class BlockingSink(Sink):
    """A sink that sends in a separate thread. Error messages name *target*, such as a file."""

    def __init__(self, config: Any, *, target: str) -> None:
        super().__init__(config)
        self._target = target
        self._last: Future[None] | None = None
        self._closed: Future[Any] = Future()

    def run(self, work: Callable[[], None]) -> None:
        """Call *work* in a separate thread. Raise DeliveryFailed after `timeout_seconds`.

        If an earlier call is still blocked, this method first waits for that call. The wait counts toward the timeout.
        If *work* raises an exception, this method raises the same exception.
        """
        deadline = time.monotonic() + self.config.timeout_seconds
        if self._last is not None:
            self._wait(self._last, deadline)
        if self._closed.done():
            raise DeliveryFailed("The sink is closed.")
        self._last = call = run_daemon(self.config.name, work)
        self._wait(call, deadline)
        self._last = None
        call.result()

    def close(self) -> None:
        """Cancel a send in another thread, and reject further calls."""
        if not self._closed.done():
            self._closed.set_result(None)

    def _wait(self, call: Future[None], deadline: float) -> None:
        wait([call, self._closed], max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        if call.done():
            return
        if self._closed.done():
            raise DeliveryFailed("The sink was closed during the send.")
        message = f"{self._target} did not respond within {self.config.timeout_seconds:g} s."
        raise DeliveryFailed(message, reason=RetryReason.TIMEOUT)
