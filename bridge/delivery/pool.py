"""Starts, replaces, and ends the delivery workers. Each sink has one worker.

A new worker for a sink starts only after the previous worker has ended or was cut. A worker that was cut sends nothing
more. On a stop or a reload, all workers have the same deadline and are then cut together, so that several hanging sinks
do not add up their delays.
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

#: After the wait, hanging sends are cut, and a command and its children are killed.
CUT_SECONDS = 0.4
_TICK_SECONDS = 0.05
_RELOAD_SECONDS = 2.0


class WorkerPool:
    """One worker for each configured sink. One thread owns the pool; other threads may read and notify it.

    *has_seen_document* returns whether this run has received a good document. Before the first good document, the agent
    does not send active events again. *attested* provides tokens of a portal for this VM.
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
        self._workers: dict[str, tuple[SinkSettings, DeliveryWorker]] = {}

    @property
    def loop_watches(self) -> Mapping[str, LoopWatch]:
        """Return the watch over the loop of each worker by the name ``delivery:SINK``."""
        return {f"delivery:{name}": worker.loop_watch for name, (_, worker) in list(self._workers.items())}

    def notify(self) -> None:
        """Wake every worker, because there may be new rows."""
        for _, worker in list(self._workers.values()):
            worker.notify()

    def resume(self, sink: str | None = None) -> None:
        """End the pause of *sink*, or of every sink if *sink* is None, because a person requested a retry."""
        for name, (_, worker) in list(self._workers.items()):
            if sink in {None, name}:
                worker.resume()

    def start_missing(self, sinks: Sequence[SinkSettings]) -> None:
        """Start a worker for each sink without a worker; raise RuntimeError if no thread can be started."""
        for sink in sinks:
            if sink.name not in self._workers:
                self._start(sink)

    def _start(self, sink: SinkSettings) -> None:
        metrics = self._metrics.sink(sink.name)
        metrics.set_needs_attention(needed=False)  # the cause may be fixed in the new configuration
        worker = DeliveryWorker(
            config=sink.config,
            sink_class=sink.sink_class,
            outbox=self._outbox,
            metrics=metrics,
            has_seen_document=self._has_seen_document,
            attested=self._attested,
        )
        worker.start()  # first: without a thread there is no worker, and the caller tries again
        self._workers[sink.name] = (sink, worker)

    def end_all_but(self, sinks: Sequence[SinkSettings], *, grace_seconds: float, stop: Callable[[], bool]) -> None:
        """End the worker of each sink that is not in *sinks* or has changed, in at most two seconds."""
        wanted = {sink.name: sink for sink in sinks}
        names = [name for name, (sink, _) in self._workers.items() if wanted.get(name) != sink]
        workers = [self._workers.pop(name)[1] for name in names]
        for worker in workers:
            worker.stop(grace_seconds=0.0)
        wait_seconds = min(grace_seconds, _RELOAD_SECONDS - CUT_SECONDS)
        for worker in _end(workers, time.monotonic() + wait_seconds, stop):
            logger.error("A sink hangs. The agent continues without waiting for it.", extra={"sink": worker.name})
        for name in names:
            if name not in wanted:
                self._metrics.forget_sink(name)

    def drain(self, deadline: float) -> None:
        """Let every worker send due records until *deadline* (monotonic), and then cut the workers."""
        workers = [worker for _, worker in list(self._workers.values())]
        for worker in workers:
            worker.stop(grace_seconds=max(deadline - time.monotonic(), 0.0))
        _end(workers, max(deadline, time.monotonic() + _TICK_SECONDS))


def _end(
    workers: Sequence[DeliveryWorker], deadline: float, stop: Callable[[], bool] = lambda: False
) -> list[DeliveryWorker]:
    """Wait until *deadline* or until *stop* returns True. Then cut the workers, and return those that did not end."""
    running = list(workers)
    while running and time.monotonic() < deadline and not stop():
        running[0].join(max(min(deadline - time.monotonic(), _TICK_SECONDS), 0.0))
        running = [worker for worker in running if not worker.join(0.0)]
    for worker in running:
        worker.cut()
    cut_at = time.monotonic() + CUT_SECONDS
    return [worker for worker in running if not worker.join(max(cut_at - time.monotonic(), 0.0))]
