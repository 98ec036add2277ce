"""The pool of delivery workers: one for each sink, started, exchanged and ended together.

A worker ends, or is cut, before another may start on the same rows: one that was cut sends nothing any more, whatever
it had read ahead and wherever it hangs. However many hang, all of them get the same wait, and then are cut: a stop and
a reload have promised when they end.
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

#: After the wait: what hangs is cut, a command and its children are killed, and the exit is still in time.
CUT_SECONDS = 0.4
_TICK_SECONDS = 0.05
_RELOAD_SECONDS = 2.0


class WorkerPool:
    """One worker for each configured sink; for one thread, but for `notify`, `loop_watches` and `drain`.

    *has_seen_document*: whether the document was seen since the start; until then no sink is told anything again,
    and one that skips what is over is told nothing that was pending before, for a few seconds. *attested* is how sinks
    get a portal's tokens for this VM.
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
        """The watch over each worker's loop, as ``delivery:SINK``."""
        return {f"delivery:{name}": worker.loop_watch for name, (_, worker) in list(self._workers.items())}

    def notify(self, *, by_command: bool = False) -> None:
        """Tell every worker that there may be new rows; *by_command*: that a command has written to the outbox."""
        for _, worker in list(self._workers.values()):
            worker.notify(by_command=by_command)

    def start_missing(self, sinks: Sequence[SinkSettings]) -> None:
        """Start a worker for each of *sinks* that has none; raise OutboxError when the outbox does not answer."""
        for sink in sinks:
            if sink.name not in self._workers:
                self._start(sink)

    def has_all(self, sinks: Sequence[SinkSettings]) -> bool:
        """Return whether each of *sinks* has a worker."""
        return all(sink.name in self._workers for sink in sinks)

    def _start(self, sink: SinkSettings) -> None:
        metrics = self._metrics.sink(sink.name)
        metrics.set_needs_attention(needed=False)  # what the worker before needed a person for may be mended
        worker = DeliveryWorker(
            config=sink.config,
            sink_class=sink.sink_class,
            outbox=self._outbox,
            metrics=metrics,
            has_seen_document=self._has_seen_document,
            attested=self._attested,
        )
        worker.start()  # first: where no thread is to be had, there is no worker, and it is tried again
        self._workers[sink.name] = (sink, worker)

    def end_all_but(self, sinks: Sequence[SinkSettings], *, grace_seconds: float, stop: Callable[[], bool]) -> None:
        """End every worker whose sink is not among *sinks* unchanged, within two seconds, or when *stop* says so."""
        wanted = {sink.name: sink for sink in sinks}
        names = [name for name, (sink, _) in self._workers.items() if wanted.get(name) != sink]
        workers = [self._workers.pop(name)[1] for name in names]
        for worker in workers:
            worker.stop(grace_seconds=0.0)
        wait_seconds = min(grace_seconds, _RELOAD_SECONDS - CUT_SECONDS)
        for worker in _end(workers, time.monotonic() + wait_seconds, stop):
            logger.error("A sink hangs and was left behind.", extra={"sink": worker.name})
        for name in names:
            if name not in wanted:
                self._metrics.forget_sink(name)

    def drain(self, deadline: float) -> None:
        """Let every worker send what is due until *deadline*, in monotonic seconds, then cut who still sends."""
        workers = [worker for _, worker in list(self._workers.values())]
        for worker in workers:
            worker.stop(grace_seconds=max(deadline - time.monotonic(), 0.0))
        _end(workers, max(deadline, time.monotonic() + _TICK_SECONDS))


def _end(
    workers: Sequence[DeliveryWorker], deadline: float, stop: Callable[[], bool] = lambda: False
) -> list[DeliveryWorker]:
    """Wait until *deadline*, or until *stop* returns True, then cut who is left; return who hangs even then."""
    running = list(workers)
    while running and time.monotonic() < deadline and not stop():
        running[0].join(max(min(deadline - time.monotonic(), _TICK_SECONDS), 0.0))
        running = [worker for worker in running if not worker.join(0.0)]
    for worker in running:
        worker.cut()
    cut_at = time.monotonic() + CUT_SECONDS
    return [worker for worker in running if not worker.join(max(cut_at - time.monotonic(), 0.0))]
