"""Starts, reloads, and stops all parts of the agent in a fixed order.

At startup, the agent first locks the state directory, because two agents must not use the same directory. It then opens
the status pages and the control socket, so that both respond while the outbox loads. Next, it requests the identity of
this VM, which record IDs and sink filters depend on. Finally, it starts the workers, the approver, and the poller.

On shutdown, the agent first stops the poller and the approver, because both create records. The workers can then send
pending records until the grace period (`stop_grace_seconds`) ends. Finally, the agent saves the outbox and releases the
lock. Every wait has a time limit, so the agent exits within one second after the grace period even if a call hangs.

If the disk hangs, the periodic tasks in `run_due` also hang, but polling and delivery continue. The service manager's
watchdog does not monitor these tasks, because restarting the agent cannot repair a disk.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.agent.control_requests import Source, read_status
from bridge.agent.control_socket import ControlClient, ControlServer, RequestRefused
from bridge.agent.messages import log_running, warn_unconfigured_sinks
from bridge.approval.service import ApprovalService
from bridge.clock import parse_time, utc_now
from bridge.config.loader import Settings
from bridge.config.secret_keys import readable_secrets
from bridge.delivery.pool import CUT_SECONDS, WorkerPool
from bridge.delivery.router import Router
from bridge.errors import BridgeError, StateDirectoryError
from bridge.events.record import Transition, new_record
from bridge.health.reporter import HealthReporter
from bridge.health.server import HealthServer
from bridge.health.serving import Serving
from bridge.http.lean_requests import import_requests
from bridge.imds.client import ImdsClient, attested_tokens
from bridge.impact.downtime import Stamp, downtime_after, read_stamp, stamp_stop, write_stamp
from bridge.impact.sampler import Sampler
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import Metrics
from bridge.outbox import deliveries, retention
from bridge.outbox.lock import DirectoryLock
from bridge.outbox.outbox import Outbox
from bridge.polling.identity import IdentityResolver
from bridge.polling.poller import Poller
from bridge.system.boot import boot_id, seconds_since_boot
from bridge.system.ephemeral_disk import warn_if_ephemeral
from bridge.system.systemd import SystemdNotifier
from bridge.system.threads import LoopWatch

if TYPE_CHECKING:
    from bridge.metrics.otlp_push import MetricsPush

logger = logging.getLogger(__name__)

TURN_SECONDS = 1.0
_OFF = ("", 0)
_TEND_SECONDS = 5.0
_FORGET_SECONDS = 3600.0
_LOCK_SECONDS = 10.0
_LOAD_TICK_SECONDS = 0.5
_LOAD_REPORT_SECONDS = 4.0
_LOAD_REPEAT_SECONDS = 30.0
_LOADING_SECONDS = 15.0
_JOIN_SECONDS = 1.0
_LEAST_WAIT_SECONDS = 0.05
#: How much of the second after the grace period the agent uses. The interpreter needs the rest to log and to exit.
_END_SECONDS = 0.55
#: systemd waits this much longer than the grace period, because a stop can take one second longer.
_STOP_MARGIN_SECONDS = 5.0


class Agent:
    """Runs the agent. Raises StateDirectoryError if the state directory is unusable."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings = self._started_with = settings
        self._in_force: Settings | None = settings
        """None if a reload failed halfway. The next reload then applies every setting again."""
        self._directory = directory
        self._lock = DirectoryLock(directory, wait_seconds=_LOCK_SECONDS, give_up=lambda: _responds(directory))
        self._is_displaced = False
        """True if the state directory was replaced and another agent has locked the new directory."""
        self.turn = threading.Event()
        """Set this event to call `run_due` at once."""
        self._ran_at: dict[str, float] = {}
        self._log = ThrottledLog(logger)
        self.metrics = Metrics()
        self.outbox = Outbox(
            directory,
            max_bytes=settings.state.max_bytes,
            max_pending_bytes=settings.state.max_pending_bytes,
            keep_delivered_seconds=settings.state.keep_delivered_seconds,
            boot_id=boot_id(),
            configured_vm_id=settings.vm.vm_id,
            has_portal=settings.approval is not None and settings.approval.remote is not None,
            claim=self._lock.claim,
        )
        self.imds = ImdsClient(settings.imds)
        self.identity = IdentityResolver(self.imds, self.outbox, settings.vm)
        self._sampler = Sampler(on_pause=self.metrics.paused)
        self.poller = Poller(
            self.imds,
            self.outbox,
            self.identity,
            metrics=self.metrics,
            boot_id=boot_id(),
            poll_interval_seconds=settings.imds.poll_interval_seconds,
            sampler=self._sampler,
            seconds_since_boot=seconds_since_boot(),
        )
        self.stop_polling = threading.Event()
        self.poll_thread = threading.Thread(target=self.poller.run, args=(self.stop_polling,), name="poll", daemon=True)
        self.pool = WorkerPool(
            self.outbox,
            self.metrics,
            has_seen_document=lambda: self.poller.good_at is not None,
            # The lambda reads the attribute at each call, because a reload replaces the client.
            attested=attested_tokens(lambda nonce: self.imds.attested_document(nonce)),  # noqa: PLW0108
        )
        self.outbox.on_due = self.pool.notify
        self.approvals = ApprovalService(self.outbox, self.metrics, vm=lambda: self.identity.vm, directory=directory)
        self._push: MetricsPush | None = None
        self._loop_watch = LoopWatch()
        self.health = HealthReporter(
            outbox=self.outbox,
            metrics=self.metrics,
            directory=directory,
            loop_watches=self._loop_watches,
            sinks=self._sink_names,
            imds=self.poller,
            imds_endpoint=lambda: self.imds.endpoint,
            vm_name=self.vm_name,
            configuration=lambda: str(self._settings.file.absolute()) if self._settings.file else "",
        )
        self._serving = Serving(self.outbox, self.poller, settings=settings.serving, vm_name=self.vm_name)
        if settings.serving.address is not None:
            self.poller.on_records = self._serving.observe
        self._health_server = HealthServer(*(settings.status.address or _OFF), self.health.pages)
        pages = {"/serving": self._serving.page}
        self._serving_server = HealthServer(
            *(settings.serving.address or _OFF), pages, setting="serving.listen", accepts_any_host=True
        )
        source = Source(
            directory,
            self.outbox,
            readiness=self.health.report,
            sinks=self._sink_names,
            on_retry=self.pool.resume,
            on_decision=self.approvals.wake,
            is_approving=lambda: self._settings.approval is not None,
        )
        self._control = ControlServer(directory, source.answer)
        self.notifier = SystemdNotifier(os.environ)

    def vm_name(self) -> str | None:
        """Return this VM's name, or None while the name is unknown."""
        return self.identity.vm.name

    def _sink_names(self) -> tuple[str, ...]:
        return tuple(sink.name for sink in self._settings.sinks)

    def _loop_watches(self) -> Mapping[str, LoopWatch]:
        loops = {"poll": self.poller.loop_watch, "main": self._loop_watch}
        return {**loops, **self.pool.loop_watches, **self.approvals.loop_watches}

    # Start.

    def start(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Load the outbox, and start the threads. Return early if *stop* returns True."""
        self.metrics.watch_outbox(self.outbox, self._sink_names)
        self.metrics.watch_vm(self.vm_name)
        self._control.open()
        self._health_server.open()
        if not self._load(stop):
            return
        good_at = self.outbox.read(lambda state: state.get("last_good_at"))
        self.imds.answered_at = None if good_at is None else parse_time(good_at).timestamp()
        self._serving_server.open()
        self.identity.start(stop, timeout_seconds=self._settings.imds.timeout_seconds)
        self._route()
        if stop():
            return
        is_ephemeral = warn_if_ephemeral(self._directory)
        self.metrics.state_is_ephemeral(is_ephemeral=is_ephemeral)
        self.poller.downtime = downtime_after(
            read_stamp(self._directory),
            current_boot_id=boot_id(),
            now=self._sampler.began_at,
            seconds_since_boot=seconds_since_boot(),
            is_ephemeral=is_ephemeral,
        )
        stamp_stop(self._directory, is_near=False)  # so that the next start does not measure this boot again
        self.pool.start_missing(self._settings.sinks)
        self._start_approvals()
        self._sampler.start()
        self.poll_thread.start()
        self._start_push()
        count = len(self._settings.sinks)
        self.notifier.ready(f"Started with {count} sink{'' if count == 1 else 's'}. See scheduled-events-bridge status")
        warn_unconfigured_sinks(self._settings, self._pending())
        for sentence in readable_secrets(self._settings.secret_files):
            logger.warning("%s", sentence)
        log_running(self._settings, self._directory, vm_name=self.vm_name(), imds=self.imds.endpoint)

    def _load(self, stop: Callable[[], bool]) -> bool:
        began_at = time.monotonic()
        report_at = began_at + _LOAD_REPORT_SECONDS
        while not self.outbox.wait_loaded(_LOAD_TICK_SECONDS):
            now = time.monotonic()
            if stop():
                return False
            self.notifier.starting("Loading the outbox", _LOADING_SECONDS)
            if now >= report_at:
                report_at = now + _LOAD_REPEAT_SECONDS
                logger.warning(
                    "The agent does not poll IMDS yet, because the outbox is still loading. Check the disk.",
                    extra={"directory": str(self._directory), "seconds": round(now - began_at)},
                )
        return not stop()

    def _route(self) -> None:
        sinks = self._settings.sinks
        self.outbox.configure(
            Router([sink.config for sink in sinks]),
            [sink.name for sink in sinks],
            labels=dict(self._settings.labels),
            current_state_only=[sink.name for sink in sinks if sink.sink_class.current_state_only(sink.config)],
        )

    def _start_approvals(self) -> None:
        self.approvals.configure(self._settings, self.imds)
        self.poller.approvals = self.approvals.approver
        self.approvals.start()

    def _start_push(self) -> None:
        """Apply the settings of the metrics push if they have changed."""
        settings, push = self._settings.push, self._push
        if settings == (None if push is None else push.settings):
            return
        if push is not None:
            push.close()
        self._push = None
        if settings is not None:
            import_requests()
            from bridge.metrics.otlp_push import MetricsPush  # noqa: PLC0415  # imports requests, which takes 5 MB

            about = lambda: (self.identity.vm, self._settings.labels)  # noqa: E731  # a reload replaces both
            self._push = MetricsPush(settings, self.metrics, self.outbox, about=about)

    # While the agent runs.

    def wait_for_turn(self, stop: threading.Event) -> bool:
        """Wait until `run_due` should be called again. Return False if *stop* is set."""
        self.turn.wait(TURN_SECONDS)
        self.turn.clear()
        return not stop.is_set()

    def run_due(self) -> None:
        """Check the lock on the state directory, and run all due tasks. Call this every second.

        Raises StateDirectoryError if the state directory was replaced and another agent has locked the new one.
        """
        self._loop_watch.expect_within(TURN_SECONDS)
        try:
            if self._lock.claim():
                self.outbox.saver.wake(soon=True)
        except StateDirectoryError:
            self._is_displaced = True
            raise
        except OSError as error:
            logger.debug("The state directory cannot be locked: %s", error)  # the saver reports the disk
        self._control.open()
        self._health_server.open()
        self._serving_server.open()
        if self._serving_server.port is not None:
            self._run_every(0.0, "serving", self._serving.out_of_service_reason)
        if self._sampler.is_near:
            write_stamp(self._directory, Stamp(at=time.time(), boot_id=boot_id()))
        self._run_every(_TEND_SECONDS, "approval files", self.approvals.check_files)
        self._run_every(_TEND_SECONDS, "workers", lambda: self.pool.start_missing(self._settings.sinks))
        heartbeat_seconds = self._settings.heartbeat.interval_seconds
        if heartbeat_seconds:
            self._run_every(heartbeat_seconds, "heartbeat", self._send_heartbeat)
        self._run_every(_FORGET_SECONDS, "old events", lambda: self.outbox.change(retention.forget_old, time.time()))

    def _run_every(self, seconds: float, name: str, task: Callable[[], object]) -> None:
        now = time.monotonic()
        if now - self._ran_at.get(name, -math.inf) < seconds:
            return
        self._ran_at[name] = now
        try:
            task()
        except Exception as error:  # noqa: BLE001  # logged with its traceback; the other tasks must run
            message = f"A periodic task failed: {name}. The agent tries again. {error}"
            self._log.problem(name, logging.ERROR, message, kind=repr(type(error)), exc_info=error)
        else:
            self._log.recovered(name, f"The periodic task succeeded again: {name}.")

    def _send_heartbeat(self) -> None:
        last = self.poller.incarnation
        heartbeat = new_record(Transition.HEARTBEAT, utc_now(), incarnation=last, previous_incarnation=last)
        self.outbox.append([heartbeat])

    def feed_watchdog(self) -> None:
        """Notify the service manager that the agent is alive, unless polling is overdue.

        Call this method at least once every `notifier.feed_within_seconds`. Otherwise, the service manager restarts the
        agent. Call it from the main thread, not from the thread that calls `run_due`, because a hung disk can block
        that thread.
        """
        if not self.poller.loop_watch.late_seconds:
            self.notifier.alive()

    # Reload.

    def reload(self, settings: Settings, stop: Callable[[], bool] = lambda: False) -> None:
        """Apply *settings*. Warn if a change needs a restart. Return early if *stop* returns True."""
        before, self._in_force = self._in_force, None
        self._loop_watch.expect_call_within(max(self._settings.imds.timeout_seconds, settings.imds.timeout_seconds) * 2)
        self._settings = settings
        self._warn_of_restart()
        is_imds_new = before is None or (before.imds, before.vm) != (settings.imds, settings.vm)
        if is_imds_new:
            self._exchange_imds(stop)
        if is_imds_new or before is None or _approval_settings(before) != _approval_settings(settings):
            self._exchange_approver(stop)
        self._route()
        self.pool.end_all_but(settings.sinks, grace_seconds=settings.stop_grace_seconds)
        if stop():
            return
        self.pool.start_missing(settings.sinks)
        self._start_push()
        self._in_force = settings
        warn_unconfigured_sinks(self._settings, self._pending())
        self.metrics.reloaded(is_right=True)
        logger.info("The configuration was reloaded.", extra={"sinks": [sink.name for sink in settings.sinks]})

    def _exchange_imds(self, stop: Callable[[], bool]) -> None:
        """Replace the IMDS client.

        Raises RuntimeError if no thread can be started. The old client then stays in use.
        """
        settings = self._settings
        imds = ImdsClient(settings.imds)
        imds.answered_at = self.imds.answered_at
        self.identity.stop(timeout_seconds=CUT_SECONDS)
        identity = IdentityResolver(imds, self.outbox, settings.vm)
        identity.start(stop, timeout_seconds=settings.imds.timeout_seconds)
        old, self.imds, self.identity = self.imds, imds, identity
        self.poller.reconfigure(imds, identity, poll_interval_seconds=settings.imds.poll_interval_seconds)
        old.close()

    def _exchange_approver(self, stop: Callable[[], bool]) -> None:
        """Replace the approver. The old one stops first, so that two never run at the same time."""
        self.approvals.stop()
        longest_post_seconds = self._settings.imds.timeout_seconds * 1.1
        self.approvals.join(longest_post_seconds + _JOIN_SECONDS)
        if not stop():
            self._start_approvals()

    def _warn_of_restart(self) -> None:
        for key in ("state", "status", "serving"):
            if getattr(self._started_with, key) != getattr(self._settings, key):
                logger.warning("A change of [%s] takes effect after a restart. All other changes are in effect.", key)

    def _pending(self) -> Mapping[str, int]:
        return {name: row.pending for name, row in self.outbox.read(deliveries.totals).sinks.items()}

    # Stop.

    def stop(self, *, spent_seconds: float = 0.0) -> None:
        """Stop polling, drain the sinks, save the outbox, and unlock the directory.

        The workers keep sending pending records until the grace period (`stop_grace_seconds`) ends. *spent_seconds* of
        it have already passed. If another agent has locked the state directory, the workers send nothing.
        """
        grace_seconds = 0.0 if self._is_displaced else max(self._settings.stop_grace_seconds - spent_seconds, 0.0)
        deadline = time.monotonic() + grace_seconds
        end = deadline + _END_SECONDS
        self.notifier.stopping(self._settings.stop_grace_seconds + _STOP_MARGIN_SECONDS)
        self._loop_watch.idle()
        self._stop_parts(deadline)
        if self._push is not None:
            self._push.stop()  # the last push runs while the outbox saves
        logger.info("The agent stopped.", extra={"pending": self._pending()})
        if self.outbox.close(_time_left(end, at_most=math.inf)):
            self._control.close()
            self._lock.release()
        else:  # keep the lock, because the saver may still write, and the socket, because deleting it may hang
            why = self.outbox.saver.behind_reason or "The disk is slow."
            logger.error("The outbox could not be saved. The last changes are lost at the next start. %s", why)
        if self._push is not None:
            self._push.close(_time_left(end))
        self._health_server.close()
        self._serving_server.close()
        self.notifier.close()

    def _stop_parts(self, deadline: float) -> None:
        self._sampler.stop()
        stamp_stop(self._directory, is_near=self._sampler.is_near)
        self.stop_polling.set()
        self.poller.wake()
        self.approvals.stop()
        self.imds.close()
        self.identity.stop(timeout_seconds=_time_left(deadline))
        if self.poll_thread.is_alive():
            self.poll_thread.join(_time_left(deadline))
        self.approvals.join(_time_left(deadline))
        self.pool.drain(deadline)


def _time_left(deadline: float, *, at_most: float = _JOIN_SECONDS) -> float:
    return min(max(deadline - time.monotonic(), _LEAST_WAIT_SECONDS), at_most)


def _responds(directory: Path) -> bool:
    try:
        ControlClient(directory, seconds=1.0).ask(read_status)
    except RequestRefused:  # the agent is still loading its outbox, or has another version
        return True
    except BridgeError:
        return False
    return True


def _approval_settings(settings: Settings) -> tuple[object, ...]:
    return settings.approval, settings.file, settings.secret_variables
