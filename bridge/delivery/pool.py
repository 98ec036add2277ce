"""Starts, replaces, and ends the delivery workers. Each sink has one worker.

Before the pool replaces a worker, it waits for the worker to end. If the worker does not end in time, the pool cancels
it, so that it sends no more records. When the agent stops or reloads its configuration, all workers share one deadline,
so several hanging sinks delay the agent no longer than a single one would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from bridge.config.settings import SinkSettings
from bridge.delivery.worker import DeliveryWorker
from bridge.metrics.metrics import Metrics
from bridge.outbox.outbox import Outbox
from bridge.sink import AttestedTokens
from bridge.system.threads import LoopWatch

logger = logging.getLogger(__name__)

#: How long the pool waits for canceled workers to end. In this time, command sinks kill their programs.
CUT_SECONDS = 0.4
_LEAST_WAIT_SECONDS = 0.05
_RELOAD_SECONDS = 2.0


class WorkerPool:
    """Manages the delivery workers of all sinks.

    The methods that start or end workers are not thread-safe. Call all of them from the same thread.

    *has_seen_document* returns whether the agent has received a valid Scheduled Events document. Until it returns True,
    the workers do not resend the records of active events. *attested* provides the access tokens that an ops portal
    issues for this VM.
    """

    def __init__(
        self,
        outbox: Outbox,
        metrics: Metrics,
        *,
        has_seen_document: Callable[[], bool] = lambda: True,
        attested: AttestedTokens | None = None,
    ) -> None:
        self._outbox = outbox
        self._has_seen_document = has_seen_document
        self._attested = attested
        self._metrics = metrics
        self._workers: dict[str, DeliveryWorker] = {}

    @property
    def loop_watches(self) -> Mapping[str, LoopWatch]:
        """Return the loop watch of each worker, with the name ``delivery:SINK`` as the key."""
        return {f"delivery:{name}": worker.loop_watch for name, worker in list(self._workers.items())}

    def notify(self) -> None:
        """Wake every worker, because new rows might exist."""
        for worker in list(self._workers.values()):
            worker.notify()

    def resume(self, sink: str | None = None) -> None:
        """End the pause of *sink*, or of every sink if *sink* is None."""
        for name, worker in list(self._workers.items()):
            if sink in {None, name}:
                worker.resume()

    def start_missing(self, sinks: Sequence[SinkSettings]) -> None:
        """Start a worker for each sink that has none. Raise RuntimeError if no thread can start."""
        for sink in sinks:
            if sink.name in self._workers:
                continue
            metrics = self._metrics.sink(sink.name)
            metrics.set_needs_attention(needed=False)  # the new configuration may fix the cause
            worker = DeliveryWorker(
                sink,
                outbox=self._outbox,
                metrics=metrics,
                has_seen_document=self._has_seen_document,
                attested=self._attested,
            )
            worker.start()  # raises an error if no thread can start; the caller retries later
            self._workers[sink.name] = worker

    def end_all_but(self, sinks: Sequence[SinkSettings], *, grace_seconds: float) -> None:
        """End the workers of removed and changed sinks. *sinks* contains the new settings."""
        wanted = {sink.name: sink for sink in sinks}
        names = [name for name, worker in self._workers.items() if wanted.get(name) != worker.settings]
        workers = [self._workers.pop(name) for name in names]
        for worker in workers:
            worker.stop(grace_seconds=0.0)
        wait_seconds = min(grace_seconds, _RELOAD_SECONDS - CUT_SECONDS)
        for worker in _end(workers, time.monotonic() + wait_seconds):
            logger.error("A sink hangs. The agent continues without waiting for it.", extra={"sink": worker.name})
        for name in names:
            if name not in wanted:
                self._metrics.forget_sink(name)

    def drain(self, deadline: float) -> None:
        """Send due records until *deadline* (monotonic), then cancel the remaining workers."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.stop(grace_seconds=max(deadline - time.monotonic(), 0.0))
        _end(workers, max(deadline, time.monotonic() + _LEAST_WAIT_SECONDS))


def _end(workers: Sequence[DeliveryWorker], deadline: float) -> list[DeliveryWorker]:
    """Wait until *deadline*, then cancel workers. Return those still running."""
    running = _join(workers, deadline)
    for worker in running:
        worker.cut()
    return _join(running, time.monotonic() + CUT_SECONDS)


def _join(workers: Sequence[DeliveryWorker], deadline: float) -> list[DeliveryWorker]:
    return [worker for worker in workers if not worker.join(max(deadline - time.monotonic(), 0.0))]
