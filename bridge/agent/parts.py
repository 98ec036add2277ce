"""The parts of an agent that work on one outbox: who this VM is, the poll, the workers, the approver, and the tasks.

They are built and started together, and end together when another outbox takes the place of theirs
(`bridge.agent.loading`). Start, in this order: one try to learn the identity of this VM, since ids and filters depend
on it, and the sinks of what is stored (`prepare`); then the workers, so that what was pending before goes out even
while IMDS is silent; then the approver and the portal's poller, which wait for the first answer; then the poll.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.agent.command_files import CommandFiles
from bridge.agent.periodic import PeriodicTasks
from bridge.agent.upkeep import OutboxUpkeep
from bridge.approval.service import ApprovalService
from bridge.config.loader import Settings
from bridge.config.settings import SinkSettings
from bridge.delivery.pool import CUT_SECONDS, WorkerPool
from bridge.delivery.router import Router
from bridge.errors import BridgeError
from bridge.events.event import VmIdentity
from bridge.imds.client import attested_tokens, client_of
from bridge.metrics.metrics import Metrics
from bridge.outbox import deliveries
from bridge.outbox.locks import DirectoryLock
from bridge.outbox.outbox import Outbox, result_or_stop
from bridge.polling.identity import IdentityResolver
from bridge.polling.poller import Poller
from bridge.polling.seen import SeenDocuments
from bridge.system.boot import boot_id, seconds_since_boot
from bridge.system.ephemeral_disk import EphemeralDiskWatch
from bridge.system.threads import LoopWatch

if TYPE_CHECKING:
    from bridge.outbox.unloaded import Taken

logger = logging.getLogger(__name__)

TEND_SECONDS = 5.0
CLEAN_SECONDS = 60.0
JOIN_SECONDS = 1.0
_LEAST_WAIT_SECONDS = 0.05
_RETRY_DISK_SECONDS = 0.5
#: So long after the beginning of a poll a turn comes; a poll takes less, mostly.
_POLLED_SECONDS = 0.005


class Parts:
    """The parts that work on *outbox*; *lock* is that of its directory, None while one in memory has its place.

    *known_vm* is what IMDS has said already of this VM. With *on_request_only* rules begin nothing and the portal is
    not asked; the sinks in *without_sinks* get nothing. *turn* is set when a command has touched a file.
    """

    def __init__(
        self,
        settings: Settings,
        outbox: Outbox,
        *,
        directory: Path,
        lock: DirectoryLock | None,
        metrics: Metrics,
        turn: threading.Event,
        on_request_only: bool = False,
        without_sinks: Collection[str] = (),
        known_vm: VmIdentity | None = None,
    ) -> None:
        self.settings = settings
        self.outbox = outbox
        self.is_loaded = lock is not None
        self._directory = directory
        self._metrics = metrics
        self._without_sinks = without_sinks
        self.imds = client_of(settings.imds)
        self.identity = IdentityResolver(self.imds, outbox, settings.vm, boot_id=boot_id(), found=known_vm)
        self.pool = WorkerPool(
            outbox,
            metrics,
            has_seen_document=self._has_seen_document,
            attested=attested_tokens(self._attested_document),
        )
        self.approvals = ApprovalService(
            outbox, metrics, vm=lambda: self.identity.vm, directory=directory, on_request_only=on_request_only
        )
        self.poller: Poller | None = None
        self.stop_polling = threading.Event()
        self.poll_thread: threading.Thread | None = None
        self.periodic = PeriodicTasks(is_calm=lambda: self._is_calm)
        self._turn = turn
        self.files = CommandFiles(directory, turn)
        self.upkeep = OutboxUpkeep(
            outbox,
            keep_delivered_seconds=settings.state.keep_delivered_seconds,
            is_watched=lambda: self.files.is_watched,
        )
        if lock is not None:
            self.files.follow(
                lock,
                outbox,
                self.upkeep,
                nudged=self.wake,
                switched=self.approvals.wake,
                has_switch=lambda: self.approvals.approver is not None,
            )

    @property
    def vm_name(self) -> str | None:
        """This VM's name, None while it is unknown."""
        return self.identity.vm.name

    @property
    def has_seen_changes(self) -> bool:
        """Whether more than one document was seen while the outbox is being loaded: the next agent sees the last."""
        seen = None if self.poller is None else self.poller.seen
        return seen is not None and len(seen) > 1

    @property
    def _is_calm(self) -> bool:
        """Whether all is as it should be, and the kernel tells of what changes."""
        is_at_work = self.is_loaded and not self.outbox.in_memory and self.pool.has_all(self._wanted_sinks)
        return is_at_work and self.approvals.approver is None and self.files.is_watched

    def _has_seen_document(self) -> bool:
        return self.poller is not None and self.poller.good_at is not None

    def _attested_document(self, nonce: str) -> str:
        return self.imds.attested_document(nonce)  # of the service that is asked now

    # Start.

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Learn who this VM is, and choose the sinks of what is stored; give up as soon as *stop* returns True."""
        self.identity.start(stop, timeout_seconds=self.settings.imds.timeout_seconds)
        self.outbox.on_added = self.pool.notify
        self.outbox.on_memory = self._turn.set  # from now on the disk is tried every few seconds
        self.route(stop)

    def start(self, stop: Callable[[], bool], *, seen: SeenDocuments | None = None, taken: Taken | None = None) -> None:
        """Deliver, approve and poll, unless *stop* returns True.

        *seen* and *taken* are from before the outbox was loaded: nobody else knows what was seen, so it is stored in
        any case.
        """
        if stop():
            if seen is None:
                return
            self.stop_polling.set()
        else:
            self.start_workers()
        self._start_approvals_and_poll(seen, taken)
        if not stop():
            self._start_periodic_tasks()

    def start_workers(self) -> None:
        """Start a worker for each sink that has none."""
        self.pool.start_missing(self._wanted_sinks)

    @property
    def _wanted_sinks(self) -> list[SinkSettings]:
        return [sink for sink in self.settings.sinks if sink.name not in self._without_sinks]

    def _start_approvals_and_poll(self, seen: SeenDocuments | None, taken: Taken | None) -> None:
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
        if not self.is_loaded:
            self.poller.seen = SeenDocuments()
        elif seen is not None and taken is not None:
            self.poller.begin_with(seen, known_ids=taken.sinks)
        self.approvals.start()
        self.poll_thread = threading.Thread(target=self.poller.run, args=(self.stop_polling,), name="poll", daemon=True)
        self.poll_thread.start()
        self.periodic.count_from(time.monotonic() + _POLLED_SECONDS)

    def _configure_approvals(self) -> None:
        if not self.is_loaded:
            return  # nothing is approved from memory
        settings = self.settings
        self.approvals.configure(
            settings.approval,
            self.imds,
            configuration=settings.file,
            secret_variables=settings.secret_variables,
            imds_timeout_seconds=settings.imds.timeout_seconds,
        )

    def _start_periodic_tasks(self) -> None:
        if self.is_loaded:
            disk = EphemeralDiskWatch(
                self._directory,
                os_disk_is_ephemeral=lambda: self.identity.os_disk_is_ephemeral,
                show=lambda is_ephemeral: self._metrics.state_is_ephemeral(is_ephemeral=is_ephemeral),
            )
            disk.check()
            self.periodic.every(TEND_SECONDS, disk.check)
            self.periodic.every(TEND_SECONDS, self.approvals.check_files)
            self.periodic.every(TEND_SECONDS, self.upkeep.tend)
            self.periodic.every(CLEAN_SECONDS, self.upkeep.clean)
        self.periodic.every(TEND_SECONDS, self.start_workers)
        self.periodic.every(lambda: self.settings.heartbeat.interval_seconds, self.send_heartbeat, now=True)

    def watch_directory(self) -> None:
        """Have SIGIO, whose handler sets the turn, tell of what commands touch; on the thread that looks at it."""
        if not self.is_loaded:
            return  # a disk that hangs would hang this thread
        self.periodic.every(CLEAN_SECONDS, self.files.renew)
        self.files.renew()

    # While it runs.

    def route(self, stop: Callable[[], bool]) -> None:
        """Have the outbox choose among the sinks that are configured, unless *stop* returns True before it has."""
        sinks = self.settings.sinks
        routes = Router([sink.config for sink in sinks])
        configured = self.outbox.write(
            self.outbox.records.configure, routes, [sink.name for sink in sinks], labels=dict(self.settings.labels)
        )
        result_or_stop(configured, stop)

    def wake(self) -> None:
        """Let the workers and the approver read the outbox at once: a command has written to it."""
        self.pool.notify(by_command=True)
        self.approvals.wake()

    def send_heartbeat(self) -> None:
        """Send a heartbeat to the sinks that want it: silence alone cannot be told from a dead agent."""
        if self.poller is not None:
            self.outbox.write(self.outbox.records.append_heartbeat, incarnation=self.poller.incarnation)

    def exchange_imds(self, stop: Callable[[], bool]) -> None:
        """Ask another service from now on; where there is no thread for it, raise RuntimeError and keep the old one."""
        settings = self.settings
        imds = client_of(settings.imds)
        self.identity.stop(timeout_seconds=CUT_SECONDS)
        # Who this VM is was confirmed, or it is not known yet under the new configuration either.
        known_boot = None if self.identity.is_found else boot_id()
        identity = IdentityResolver(imds, self.outbox, settings.vm, boot_id=known_boot)
        identity.start(stop, timeout_seconds=settings.imds.timeout_seconds)
        old, self.imds, self.identity = self.imds, imds, identity
        if self.poller is not None:
            interval_seconds = settings.imds.poll_interval_seconds
            self.poller.reconfigure(self.imds, self.identity, poll_interval_seconds=interval_seconds)
        old.close()

    def exchange_approver(self, stop: Callable[[], bool]) -> None:
        """End one approver before another may start on the same decisions."""
        self.approvals.stop()
        self.approvals.drain(self.settings.imds.timeout_seconds, stop)
        if stop():
            return
        self._configure_approvals()
        if self.poller is not None:
            self.poller.approvals = self.approvals.approver
        self.approvals.start()

    def pending(self, wait_seconds: float) -> Mapping[str, int] | None:
        """Return how many records each sink has pending; None when the outbox does not answer in time."""
        try:
            accounts = self.outbox.read(deliveries.accounts).result(wait_seconds)
        except (BridgeError, FutureTimeout):
            return None
        return {name: account.pending for name, account in accounts.items()}

    @property
    def loop_watches(self) -> Mapping[str, LoopWatch]:
        """What tells of each loop whether it turns, by its name."""
        poll = {} if self.poller is None else {"poll": self.poller.loop_watch}
        return {**poll, **self.pool.loop_watches, **self.approvals.loop_watches, "outbox": self.outbox.loop_watch}

    # Stop.

    def stop_watching(self, deadline: float) -> None:
        """Stop the poll and what approves; give up each at the monotonic time *deadline*."""
        self.stop_polling.set()
        if self.poller is not None:
            self.poller.wake()
        self.approvals.stop()
        self.imds.close()
        self.identity.stop(timeout_seconds=time_left(deadline))
        if self.poll_thread is not None:
            # What was seen before the outbox was loaded is known to nobody else.
            is_storing = self.poller is not None and self.poller.is_storing_seen
            self.poll_thread.join(time_left(deadline, at_most=math.inf if is_storing else JOIN_SECONDS))
        self.approvals.join(time_left(deadline))

    def return_to_disk(self, deadline: float) -> None:
        """Spend what is left of the grace on a disk that refuses: what is pending would be lost with this process."""
        if not self.is_loaded:
            return
        while self.outbox.in_memory and time.monotonic() < deadline and self._has_pending(time_left(deadline)):
            with suppress(BridgeError, FutureTimeout):
                self.outbox.tend().result(time_left(deadline))
            time.sleep(time_left(deadline, at_most=_RETRY_DISK_SECONDS))

    def _has_pending(self, wait_seconds: float) -> bool:
        pending = self.pending(wait_seconds)
        return pending is None or any(pending.values())


def time_left(deadline: float, *, at_most: float = JOIN_SECONDS) -> float:
    """Return the seconds until *deadline*, at most *at_most*, but never none."""
    return min(max(deadline - time.monotonic(), _LEAST_WAIT_SECONDS), at_most)
