"""The agent: the parts of `run`, started, reloaded and stopped in an order that has reasons.

Start: the directory's lock first, so that nothing is touched that another agent uses; then the outbox; then one try to
learn the identity of this VM, since ids and filters depend on it; then the workers, so that what was pending before
goes out even while IMDS is silent, after a few seconds where what is over is skipped; then the approver and the
portal's poller, which wait for the first answer; then the poll; last what others read: the health server, and systemd,
which learns that the agent is ready before a first answer of IMDS that may take two minutes. Where the lock and the
outbox take over 2 s, all of that begins on an outbox in memory, and anew once the own one is there
(`bridge.agent.loading`).

Stop: the poll, the portal's poller and the approver first, so that nothing new comes; then records that wait for the
identity get their sinks; then the workers drain; then what is in memory goes back to the disk, if that takes it; then
the outbox, which commits what they did; then the lock. The health server last: it answers meanwhile.

A stop ends within `stop_grace_seconds` and one second more, whatever hangs: every wait is bounded, every thread is a
daemon, and start and reload give up when a stop is asked for.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.agent.command_files import CommandFiles
from bridge.agent.loading import HOLD_SECONDS, OpenOutbox, OutboxLoad
from bridge.agent.periodic import PeriodicTasks
from bridge.agent.upkeep import OutboxUpkeep
from bridge.approval.service import ApprovalService
from bridge.config.loader import Settings
from bridge.config.secret_keys import readable_secrets
from bridge.delivery.pool import CUT_SECONDS, WorkerPool
from bridge.delivery.router import Router
from bridge.errors import BridgeError
from bridge.events.event import VmIdentity
from bridge.health.reporter import HealthReporter
from bridge.health.server import HealthServer
from bridge.imds.client import attested_tokens, client_of
from bridge.metrics.metrics import Metrics, own_version
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox, result_or_stop
from bridge.polling.identity import IdentityResolver
from bridge.polling.poller import Poller
from bridge.polling.seen import SeenDocuments
from bridge.system.boot import boot_id, seconds_since_boot
from bridge.system.ephemeral_disk import EphemeralDiskWatch
from bridge.system.systemd import SystemdNotifier
from bridge.system.threads import LoopWatch

if TYPE_CHECKING:
    from bridge.outbox.unloaded import Taken

logger = logging.getLogger(__name__)

#: While the outbox is being loaded: how long the hold lasts is looked at in each turn.
_LOAD_TURN_SECONDS = 1.0
_TEND_SECONDS = 5.0
_CLEAN_SECONDS = 60.0
_JOIN_SECONDS = 1.0
#: After the grace, all in all; the interpreter and its last log lines need the rest of the second.
_END_SECONDS = 0.55
_LEAST_WAIT_SECONDS = 0.05
_RETRY_DISK_SECONDS = 0.5
#: systemd is told so anew every five seconds while the outbox is being loaded.
_LOADING_SECONDS = 15.0
#: What is being sent, or asked, when the outbox is loaded may take so long.
_HANDOVER_SECONDS = 2.0
#: What a stop may take beyond the grace is a second; systemd is told of a little more.
_STOP_MARGIN_SECONDS = 5.0


class Agent:
    """Everything that `run` runs; raise StateDirectoryError when the directory cannot be had.

    With *on_request_only* its rules begin nothing and its portal is not asked: a person wants one approval. The sinks
    that *without_sinks* names get nothing now; their records wait for the next agent.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        *,
        on_request_only: bool = False,
        without_sinks: Collection[str] = (),
    ) -> None:
        self._settings = self._started_with = settings
        self._in_force: Settings | None = settings
        """None after a reload that failed halfway: then nothing counts as unchanged."""
        self._on_request_only = on_request_only
        self._without_sinks = without_sinks
        self._directory = directory
        self.turn = threading.Event()
        """Set when `run_due` is to be called before its time."""
        load = OutboxLoad(settings, directory)
        self._load: OutboxLoad | None = None
        """The load of the outbox, as long as another has its place."""
        self._opened: OpenOutbox | None = None
        self._loaded_at = math.inf
        self._is_watch_wanted = False
        self._handover = threading.Lock()
        """Held while one outbox takes the place of another: a stop ends the parts of one of them."""
        self._stop_is_wanted: Callable[[], bool] = lambda: False
        if on_request_only or load.is_done_soon():
            self._opened = load.result()
        else:
            self._load = load
            load.when_done(self.turn)
        self.metrics = Metrics()
        self._build_on(load.substitute() if self._opened is None else self._opened.outbox)
        self._loop_watch = LoopWatch()
        self.health = HealthReporter(
            outbox=self.outbox,
            metrics=self.metrics,
            directory=directory,
            loop_watches=self._loop_watches,
            sinks=lambda: [sink.name for sink in self._settings.sinks],
        )
        self.health.vm_name = self.vm_name
        self.health.imds = lambda: self._imds.endpoint
        self.health.configuration = lambda: str(self._settings.file.absolute()) if self._settings.file else ""
        self.health.refused_answer = lambda: None if self._poller is None else self._poller.refused_answer
        self.health.is_loading = lambda: self._load is not None
        self._notifier = SystemdNotifier({} if on_request_only else os.environ)
        self._health_server = self._new_health_server()

    def _build_on(self, outbox: Outbox, *, known_vm: VmIdentity | None = None) -> None:
        """Build the parts that work on *outbox*; *known_vm* is what IMDS has said already of this VM."""
        self.outbox = outbox
        self._imds = client_of(self._settings.imds)
        self._identity = IdentityResolver(self._imds, outbox, self._settings.vm, boot_id=boot_id(), found=known_vm)
        self._pool = WorkerPool(
            outbox,
            self.metrics,
            has_seen_document=self._has_seen_document,
            attested=attested_tokens(self._attested_document),
        )
        self._approvals = ApprovalService(
            outbox,
            self.metrics,
            vm=lambda: self._identity.vm,
            directory=self._directory,
            on_request_only=self._on_request_only,
        )
        self._poller: Poller | None = None
        self._stop_polling = threading.Event()
        self._poll_thread: threading.Thread | None = None
        self._periodic = PeriodicTasks()
        self._files = CommandFiles(self._directory, self.turn)
        self._upkeep = OutboxUpkeep(
            outbox,
            keep_delivered_seconds=self._settings.state.keep_delivered_seconds,
            is_watched=lambda: self._files.is_watched,
        )
        if self._opened is not None:
            self._files.follow(
                self._opened.lock,
                outbox,
                self._upkeep,
                nudged=self.wake,
                switched=self._approvals.wake,
                has_switch=lambda: self._approvals.approver is not None,
            )

    def vm_name(self) -> str | None:
        """Return this VM's name, None while it is unknown."""
        return self._identity.vm.name

    def start(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Start to watch and to deliver; give up, so that `stop` can follow, as soon as *stop* returns True."""
        self._stop_is_wanted = stop
        self._begin(stop)
        if stop():
            return
        if self._load is None:
            self._note_running()

    def _begin(
        self, stop: Callable[[], bool], *, seen: SeenDocuments | None = None, taken: Taken | None = None
    ) -> None:
        """Start the parts that work on the outbox; *seen* and *taken* are from before it was loaded."""
        self.outbox.records.taken = taken
        is_told = taken is not None  # then who this VM is takes no time, and records are named by it
        self._identity.start((lambda: False) if is_told else stop, timeout_seconds=self._settings.imds.timeout_seconds)
        self.outbox.on_added = self._pool.notify
        self.metrics.watch_outbox(self.health.outbox)
        self.metrics.watch_vm(self.vm_name)
        self._route(stop)
        if stop():
            if seen is not None:
                self._stop_polling.set()  # nobody else knows what was seen: it is stored, and nothing is asked
                self._start_approvals_and_poll(seen, taken)
            return
        self._start_workers()
        self._start_approvals_and_poll(seen, taken)
        self._start_periodic_tasks()
        if self._health_server is not None:
            self._health_server.open()
            self._periodic.every(_TEND_SECONDS, self._health_server.open)

    def _note_running(self) -> None:
        self._notifier.ready(f"Watching {self.vm_name() or 'this VM'} for {len(self._settings.sinks)} sinks")
        self._warn_unconfigured_sinks()
        self._warn_readable_secrets()
        logger.info(
            "The agent is running.",
            extra={
                "version": own_version(),
                "configuration": str(self._settings.file or "none, so the defaults"),
                "vm": self.vm_name(),
                "imds": self._imds.endpoint,
                "state_directory": str(self._directory),
                "sinks": [sink.name for sink in self._settings.sinks],
            },
        )

    def _has_seen_document(self) -> bool:
        return self._poller is not None and self._poller.good_at is not None

    def _start_workers(self) -> None:
        self._pool.start_missing([sink for sink in self._settings.sinks if sink.name not in self._without_sinks])

    def _start_approvals_and_poll(self, seen: SeenDocuments | None, taken: Taken | None) -> None:
        self._configure_approvals()
        self._poller = Poller(
            self._imds,
            self.outbox,
            self._identity,
            metrics=self.metrics,
            boot_id=boot_id(),
            poll_interval_seconds=self._settings.imds.poll_interval_seconds,
            approvals=self._approvals.approver,
            seconds_since_boot=seconds_since_boot(),
        )
        if self._load is not None:
            self._poller.seen = SeenDocuments()
        elif seen is not None and taken is not None:
            self._poller.begin_with(seen, known_ids=taken.sinks)
        self._approvals.start()
        self._poll_thread = threading.Thread(
            target=self._poller.run, args=(self._stop_polling,), name="poll", daemon=True
        )
        self._poll_thread.start()
        self.health.polled = self._poller

    def _attested_document(self, nonce: str) -> str:
        return self._imds.attested_document(nonce)  # of the service that is asked now

    def _configure_approvals(self) -> None:
        if self._load is not None:
            return  # nothing is approved from memory
        settings = self._settings
        self._approvals.configure(
            settings.approval,
            self._imds,
            configuration=settings.file,
            secret_variables=settings.secret_variables,
            imds_timeout_seconds=settings.imds.timeout_seconds,
        )

    def watch_directory(self) -> None:
        """Have SIGIO, whose handler sets `turn`, tell of what commands touch; on the thread that calls `run_due`."""
        self._is_watch_wanted = True
        if self._opened is None:
            return  # a disk that hangs would hang this thread; `_go_on_with` does it then
        self._periodic.every(_CLEAN_SECONDS, self._files.renew)
        self._files.renew()

    def wait_for_turn(self, stop: threading.Event) -> bool:
        """Wait until `run_due` has something to do; return False when *stop* is set instead."""
        seldom = _TEND_SECONDS if self._load is None else _LOAD_TURN_SECONDS
        self._files.wait(stop, min(self._periodic.seconds_to_next(), seldom))
        return not stop.is_set()

    def run_due(self) -> None:
        """Look at what commands touch, and run the tasks that are due; called after `wait_for_turn`, by one thread.

        Raises StateDirectoryError when another agent has the state directory.
        """
        self._loop_watch.expect_within(_TEND_SECONDS)
        if self._load is not None:
            self._look_at_load(self._load)
        self._files.look()
        self._periodic.run_due()

    # While the outbox is being loaded.

    def _notify_loading(self) -> None:
        if self.outbox.records.hold is None:
            return  # the agent counts as started
        status = f"Watching {self.vm_name() or 'this VM'}; the outbox is still being loaded"
        self._notifier.starting(status, _LOADING_SECONDS)

    def _look_at_load(self, load: OutboxLoad) -> None:
        """Go on with the outbox if it is loaded; if that takes too long, let nothing wait for it any more."""
        if load.is_done:
            self._loaded_at = min(self._loaded_at, time.monotonic())
            is_sending = any((self._pending(_JOIN_SECONDS) or {}).values())
            if not is_sending or time.monotonic() - self._loaded_at >= HOLD_SECONDS:
                with self._handover:
                    if not self._stop_is_wanted():
                        self._go_on_with(load.result())
        elif load.is_late and self.outbox.records.hold is not None:
            self.outbox.write(self.outbox.records.end_hold).result()
            logger.error(
                "The outbox is still not loaded, and nothing waits for it any more: all that is seen is told from "
                "memory, also what may have been told before. What the outbox holds is sent once it is loaded."
            )
            self._note_running()

    def _go_on_with(self, opened: OpenOutbox) -> None:
        """Begin anew, with the outbox that is loaded now; what was seen and sent without it is taken along."""
        from bridge.outbox.unloaded import keep_taken, read_taken  # noqa: PLC0415  # hardly ever needed

        is_noted = self.outbox.records.hold is None
        self._loop_watch.expect_within(_HANDOVER_SECONDS)
        self._pool.drain(time.monotonic() + _HANDOVER_SECONDS)
        self._stop_approvals_and_poll(time.monotonic() + _HANDOVER_SECONDS)
        seen = None if self._poller is None else self._poller.seen
        taken = self.outbox.read(read_taken).result()
        self.outbox.close(_JOIN_SECONDS)
        self._opened, self._load = opened, None
        imds, identity = self._imds, self._identity
        self._build_on(opened.outbox, known_vm=identity.vm if identity.is_found else None)
        self._imds.go_on_from(imds)
        self.health.use(opened.outbox)
        skipping = {each.name for each in self._settings.sinks if each.sink_class.skips_what_is_over(each.config)}
        opened.outbox.write(keep_taken, taken, now=opened.outbox.ages.timestamp(), skipping=skipping)
        logger.warning("The outbox is loaded now; what was seen meanwhile is stored.")
        self._begin(self._stop_is_wanted, seen=seen, taken=taken)
        if self._is_watch_wanted:
            self.watch_directory()
        if not is_noted and not self._stop_is_wanted():
            self._note_running()

    def _start_periodic_tasks(self) -> None:
        if self._load is not None:
            self._periodic.every(_TEND_SECONDS, self._notify_loading, now=True)
            self._start_common_tasks()
            return
        disk = EphemeralDiskWatch(
            self._directory,
            os_disk_is_ephemeral=lambda: self._identity.os_disk_is_ephemeral,
            show=lambda is_ephemeral: self.metrics.state_is_ephemeral(is_ephemeral=is_ephemeral),
        )
        disk.check()
        self._periodic.every(_TEND_SECONDS, disk.check)
        self._periodic.every(_TEND_SECONDS, self._approvals.check_files)
        self._periodic.every(_TEND_SECONDS, self._upkeep.tend)
        self._periodic.every(_CLEAN_SECONDS, self._upkeep.clean)
        self._start_common_tasks()

    def _start_common_tasks(self) -> None:
        self._periodic.every(_TEND_SECONDS, self._start_workers)
        self._periodic.every(lambda: self._settings.heartbeat.interval_seconds, self.send_heartbeat, now=True)

    @property
    def feed_within_seconds(self) -> float:
        """Return how often to call `feed_watchdog`; 0 where there is no watchdog."""
        return self._notifier.feed_within_seconds

    def feed_watchdog(self) -> None:
        """Tell the service manager that the agent lives, while the poll turns: its first turn may take long.

        For another thread than `run_due`: that one hangs with the files that it looks at, and polls and sinks do not.
        """
        if self._poller is not None and not self._poller.loop_watch.late_seconds:
            self._notifier.alive()

    def _loop_watches(self) -> Mapping[str, LoopWatch]:
        poll = {} if self._poller is None else {"poll": self._poller.loop_watch}
        own = {"main": self._loop_watch, "outbox": self.outbox.loop_watch}
        return {**poll, **self._pool.loop_watches, **self._approvals.loop_watches, **own}

    def _new_health_server(self) -> HealthServer | None:
        address = self._settings.status.address
        if address is None or self._on_request_only:
            return None
        return HealthServer(*address, self.health.pages)

    def send_heartbeat(self) -> None:
        """Send a heartbeat to the sinks that want it: silence alone cannot be told from a dead agent."""
        if self._poller is not None:
            self.outbox.write(self.outbox.records.append_heartbeat, incarnation=self._poller.incarnation)

    def wake(self) -> None:
        """Let the workers and the approver read the outbox at once: a command has written to it."""
        self._pool.notify(by_command=True)
        self._approvals.wake()

    def stop(self, *, spent_seconds: float = 0.0) -> None:
        """Stop polling, let the sinks drain for `stop_grace_seconds`, commit, release the directory.

        *spent_seconds* of the grace are over already.
        """
        deadline = time.monotonic() + max(self._settings.stop_grace_seconds - spent_seconds, 0.0)
        end = deadline + _END_SECONDS
        self._notifier.stopping(self._settings.stop_grace_seconds + _STOP_MARGIN_SECONDS)
        self._loop_watch.idle()
        if self._handover.acquire(timeout=_left(deadline, at_most=math.inf)):
            has_time = deadline - time.monotonic() >= 3 * _HANDOVER_SECONDS
            if self._load is not None and self._load.is_loaded and has_time:
                self._go_on_with(self._load.result())  # only so is what was seen meanwhile stored
            self._handover.release()  # none begins any more
        self._files.close()
        self.outbox.take_slow_disk()
        self._stop_approvals_and_poll(deadline)
        self._pool.drain(deadline)
        self._return_to_disk(deadline)
        self._log_pending(_left(end))
        if self._load is not None:
            logger.warning(
                "The outbox was not loaded yet. What was seen meanwhile and is still there is seen by the next agent."
            )
            self._load.abandon(_left(end))
        if self.outbox.close(_left(end, at_most=math.inf)):
            if self._opened is not None:
                self._opened.lock.release()
        elif self.outbox.is_committed:
            logger.warning("The outbox is stored, but its file was not closed in time.")
        else:  # the outbox's thread may still write: the lock goes with the process
            logger.error("The outbox hangs and was left behind; what it has not committed is not stored.")
        if self._health_server is not None:
            self._health_server.close()
        self._notifier.close()

    def _stop_approvals_and_poll(self, deadline: float) -> None:
        self._stop_polling.set()
        if self._poller is not None:
            self._poller.wake()
        self._approvals.stop()
        self._imds.close()
        self._identity.stop(timeout_seconds=_left(deadline))
        if self._poll_thread is not None:
            self._poll_thread.join(_left(deadline))
        self._approvals.join(_left(deadline))

    def _return_to_disk(self, deadline: float) -> None:
        """Spend what is left of the grace on a disk that refuses: what is pending would be lost with this process."""
        if self._load is not None:
            return
        while self.outbox.in_memory and time.monotonic() < deadline and self._has_pending(_left(deadline)):
            with suppress(BridgeError, FutureTimeout):
                self.outbox.tend().result(_left(deadline))
            time.sleep(_left(deadline, at_most=_RETRY_DISK_SECONDS))

    def _has_pending(self, wait_seconds: float) -> bool:
        pending = self._pending(wait_seconds)
        return pending is None or any(pending.values())

    def reload(self, settings: Settings, stop: Callable[[], bool] = lambda: False) -> None:
        """Go on with *settings*; what cannot change in a running agent is logged and stays as it was.

        Gives up, so that `stop` can follow, as soon as *stop* returns True.
        """
        before, self._in_force = self._in_force, None
        self._loop_watch.expect_call_within(max(self._settings.imds.timeout_seconds, settings.imds.timeout_seconds) * 2)
        self._settings = settings
        self._warn_what_needs_a_restart()
        is_imds_new = before is None or (before.imds, before.vm) != (settings.imds, settings.vm)
        if is_imds_new:
            self._exchange_imds(settings, stop)
        if is_imds_new or before is None or _approving(before) != _approving(settings):
            self._exchange_approver(stop)
        # Before any worker ends: if the outbox refuses, those that are there go on.
        self._route(stop)
        self._pool.end_all_but(settings.sinks, grace_seconds=settings.stop_grace_seconds, stop=stop)
        if stop():
            return
        self._start_workers()
        self._in_force = settings
        self._warn_unconfigured_sinks()
        self.metrics.reloaded(is_right=True)
        logger.info("The configuration was read again.", extra={"sinks": [sink.name for sink in settings.sinks]})

    def _warn_what_needs_a_restart(self) -> None:
        for key in ("state", "status"):
            if getattr(self._started_with, key) != getattr(self._settings, key):
                logger.warning("A change of [%s] needs a restart; the rest is in force.", key)

    def refused_configuration(self) -> None:
        """Note that the configuration was to be read again and is wrong; nothing has changed."""
        self.metrics.reloaded(is_right=False)

    def _exchange_imds(self, settings: Settings, stop: Callable[[], bool]) -> None:
        """Ask another service from now on; where there is no thread for it, raise RuntimeError and keep the old one."""
        imds = client_of(settings.imds)
        self._identity.stop(timeout_seconds=CUT_SECONDS)
        # Who this VM is was confirmed, or it is not known yet under the new configuration either.
        known_boot = None if self._identity.is_found else boot_id()
        identity = IdentityResolver(imds, self.outbox, settings.vm, boot_id=known_boot)
        identity.start(stop, timeout_seconds=settings.imds.timeout_seconds)
        old, self._imds, self._identity = self._imds, imds, identity
        if self._poller is not None:
            interval_seconds = settings.imds.poll_interval_seconds
            self._poller.reconfigure(self._imds, self._identity, poll_interval_seconds=interval_seconds)
        old.close()

    def _exchange_approver(self, stop: Callable[[], bool]) -> None:
        """End one approver before another may start on the same decisions."""
        self._approvals.stop()
        self._approvals.drain(self._settings.imds.timeout_seconds, stop)
        if stop():
            return
        self._configure_approvals()
        if self._poller is not None:
            self._poller.approvals = self._approvals.approver
        self._approvals.start()

    def _route(self, stop: Callable[[], bool]) -> None:
        sinks = self._settings.sinks
        routes = Router([sink.config for sink in sinks])
        configured = self.outbox.write(
            self.outbox.records.configure, routes, [sink.name for sink in sinks], labels=dict(self._settings.labels)
        )
        result_or_stop(configured, stop)

    def _warn_readable_secrets(self) -> None:
        for sentence in readable_secrets(self._settings.secret_files):
            logger.warning("%s", sentence)

    def _warn_unconfigured_sinks(self) -> None:
        """Warn of records that are pending for sinks which the configuration does not name any more."""
        configured = {sink.name for sink in self._settings.sinks}
        for name, pending in (self._pending(_JOIN_SECONDS) or {}).items():
            if name not in configured and pending:
                logger.warning(
                    "Records are owed to a sink that is no longer configured. Put it back, or give them up with "
                    "`outbox discard --sink %s`.",
                    name,
                    extra={"sink": name, "pending": pending},
                )

    def _log_pending(self, wait_seconds: float) -> None:
        logger.info("The agent stopped.", extra={"pending": self._pending(wait_seconds)})

    def _pending(self, wait_seconds: float) -> Mapping[str, int] | None:
        """Return how many records each sink has pending; None when the outbox does not answer in time."""
        try:
            accounts = self.outbox.read(deliveries.accounts).result(wait_seconds)
        except (BridgeError, FutureTimeout):
            return None
        return {name: account.pending for name, account in accounts.items()}


def _approving(settings: Settings) -> tuple[object, ...]:
    """Return what the approver is made of."""
    return settings.approval, settings.file, settings.secret_variables


def _left(deadline: float, *, at_most: float = _JOIN_SECONDS) -> float:
    """Return the seconds until *deadline*, at most *at_most*, but never none."""
    return min(max(deadline - time.monotonic(), _LEAST_WAIT_SECONDS), at_most)
