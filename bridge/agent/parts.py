"""The parts of an agent that work on the outbox: identity, poll, workers, and approver.

Start order: one attempt to learn the identity of this VM, because ids and filters depend on it (`prepare`). Then the
workers, so that pending records are sent even if IMDS does not respond. Then the approver and the portal poller, which
wait for the first document. Then the poll.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bridge.approval.service import ApprovalService
from bridge.config.loader import Settings
from bridge.delivery.pool import CUT_SECONDS, WorkerPool
from bridge.delivery.router import Router
from bridge.imds.client import attested_tokens, client_of
from bridge.metrics.metrics import Metrics
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.polling.identity import IdentityResolver
from bridge.polling.poller import Poller
from bridge.system.boot import boot_id, seconds_since_boot
from bridge.system.threads import LoopWatch

JOIN_SECONDS = 1.0
_LEAST_WAIT_SECONDS = 0.05


class Parts:
    """The parts that work on *outbox*; *directory* is the state directory."""

    def __init__(self, settings: Settings, outbox: Outbox, *, directory: Path, metrics: Metrics) -> None:
        self.settings = settings
        self.outbox = outbox
        self._metrics = metrics
        self.imds = client_of(settings.imds)
        self.identity = IdentityResolver(self.imds, outbox, settings.vm)
        self.pool = WorkerPool(
            outbox,
            metrics,
            has_seen_document=lambda: self.poller is not None and self.poller.good_at is not None,
            attested=attested_tokens(self._attested_document),
        )
        self.approvals = ApprovalService(outbox, metrics, vm=lambda: self.identity.vm, directory=directory)
        self.poller: Poller | None = None
        self.poll_thread: threading.Thread | None = None
        self.stop_polling = threading.Event()
        outbox.on_due = self.pool.notify

    def _attested_document(self, nonce: str) -> str:
        return self.imds.attested_document(nonce)  # of the current client: a reload replaces it

    # Start.

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Learn the identity of this VM and select the sinks of stored records; give up once *stop* returns True."""
        self.identity.start(stop, timeout_seconds=self.settings.imds.timeout_seconds)
        self.route()

    def start(self) -> None:
        """Deliver, approve, and poll."""
        self.start_workers()
        self._configure_approvals()
        self.poller = Poller(
            self.imds,
            self.outbox,
            self.identity,
            metrics=self._metrics,
            boot_id=boot_id(),
            poll_interval_seconds=self.settings.imds.poll_interval_seconds,
            approvals=self.approvals.approver,
            seconds_since_boot=seconds_since_boot(),
        )
        self.approvals.start()
        self.poll_thread = threading.Thread(target=self.poller.run, args=(self.stop_polling,), name="poll", daemon=True)
        self.poll_thread.start()

    def start_workers(self) -> None:
        """Start a worker for each sink that has none."""
        self.pool.start_missing(self.settings.sinks)

    def route(self) -> None:
        """Route records to the configured sinks."""
        sinks = self.settings.sinks
        self.outbox.configure(
            Router([sink.config for sink in sinks]),
            [sink.name for sink in sinks],
            labels=dict(self.settings.labels),
            current_state_only=[sink.name for sink in sinks if sink.sink_class.current_state_only(sink.config)],
        )

    def _configure_approvals(self) -> None:
        settings = self.settings
        self.approvals.configure(
            settings.approval,
            self.imds,
            configuration=settings.file,
            secret_variables=settings.secret_variables,
            imds_timeout_seconds=settings.imds.timeout_seconds,
        )

    # While the agent runs.

    def send_heartbeat(self) -> None:
        """Add a heartbeat for the sinks that request heartbeats."""
        if self.poller is not None:
            self.outbox.append_heartbeat(incarnation=self.poller.incarnation)

    def exchange_imds(self, stop: Callable[[], bool]) -> None:
        """Use the configured metadata service; raise RuntimeError, and keep the old one, if no thread is free."""
        settings = self.settings
        imds = client_of(settings.imds)
        self.identity.stop(timeout_seconds=CUT_SECONDS)
        identity = IdentityResolver(imds, self.outbox, settings.vm)
        identity.start(stop, timeout_seconds=settings.imds.timeout_seconds)
        old, self.imds, self.identity = self.imds, imds, identity
        if self.poller is not None:
            interval_seconds = settings.imds.poll_interval_seconds
            self.poller.reconfigure(self.imds, self.identity, poll_interval_seconds=interval_seconds)
        old.close()

    def exchange_approver(self, stop: Callable[[], bool]) -> None:
        """End one approver before another one may start on the same decisions."""
        self.approvals.stop()
        self.approvals.drain(self.settings.imds.timeout_seconds, stop)
        if stop():
            return
        self._configure_approvals()
        if self.poller is not None:
            self.poller.approvals = self.approvals.approver
        self.approvals.start()

    def pending(self) -> Mapping[str, int]:
        """Return the number of pending records of each sink."""
        return {name: row.pending for name, row in self.outbox.read(deliveries.totals).sinks.items()}

    @property
    def loop_watches(self) -> Mapping[str, LoopWatch]:
        """Return the watch of each loop by its name."""
        poll = {} if self.poller is None else {"poll": self.poller.loop_watch}
        return {**poll, **self.pool.loop_watches, **self.approvals.loop_watches}

    # Stop.

    def stop(self, deadline: float) -> None:
        """Stop the poll and the approver, and let the workers drain until the monotonic time *deadline*."""
        self.stop_polling.set()
        if self.poller is not None:
            self.poller.wake()
        self.approvals.stop()
        self.imds.close()
        self.identity.stop(timeout_seconds=time_left(deadline))
        if self.poll_thread is not None:
            self.poll_thread.join(time_left(deadline))
        self.approvals.join(time_left(deadline))
        self.pool.drain(deadline)


def time_left(deadline: float, *, at_most: float = JOIN_SECONDS) -> float:
    """Return the seconds until *deadline*, at most *at_most* and at least 0.05."""
    return min(max(deadline - time.monotonic(), _LEAST_WAIT_SECONDS), at_most)
