"""The agent: the parts of `run`, started, reloaded and stopped in an order that has reasons.

Start: the directory's lock first, so that nothing is touched that another agent uses; then the outbox; then what works
on it (`bridge.agent.parts`); last what others read: the health server, and systemd, which learns that the agent is
ready before a first answer of IMDS that may take two minutes. Where the lock and the outbox take over 2 s, all of that
begins on an outbox in memory, and anew once the own one is there (`bridge.agent.loading`).

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
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.agent.loading import HANDOVER_SECONDS, OpenOutbox, OutboxLoad, hand_over
from bridge.agent.parts import JOIN_SECONDS, TEND_SECONDS, Parts, time_left
from bridge.agent.periodic import CALM_SECONDS
from bridge.config.loader import Settings
from bridge.config.secret_keys import readable_secrets
from bridge.health.reporter import HealthReporter
from bridge.health.server import HealthServer
from bridge.metrics.metrics import Metrics, own_version
from bridge.system.systemd import SystemdNotifier
from bridge.system.threads import LoopWatch

if TYPE_CHECKING:
    from bridge.events.event import VmIdentity
    from bridge.outbox.outbox import Outbox

logger = logging.getLogger(__name__)

#: While the outbox is being loaded: how long the hold lasts is looked at in each turn.
_LOAD_TURN_SECONDS = 1.0
#: After the grace, all in all; the interpreter and its last log lines need the rest of the second.
_END_SECONDS = 0.55
#: With less of the grace left, a stop does not begin a handover; it waits for the load no longer than until then.
_LEAST_HANDOVER_SECONDS = 3 * HANDOVER_SECONDS
#: systemd is told so anew every five seconds while the outbox is being loaded.
_LOADING_SECONDS = 15.0
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
        self._is_watch_wanted = False
        self._handover = threading.Lock()
        """Held while one outbox takes the place of another: a stop ends the parts of one of them."""
        self._stop_is_wanted: Callable[[], bool] = lambda: False
        self.metrics = Metrics()
        if on_request_only or load.is_done_soon():
            self.parts = self._parts(load.result())
        else:
            self._load = load
            load.when_done(self.turn)
            self.parts = self._parts(load.substitute())
        self._loop_watch = LoopWatch()
        self.health = self._new_health_reporter()
        self._notifier = SystemdNotifier({} if on_request_only else os.environ)
        self._health_server = self._new_health_server()

    def _parts(self, on: OpenOutbox | Outbox, *, known_vm: VmIdentity | None = None) -> Parts:
        """Build the parts that work *on* an outbox, one alone is in memory; *known_vm* is what IMDS has said of it."""
        if isinstance(on, OpenOutbox):
            self._opened = on
        return Parts(
            self._settings,
            on.outbox if isinstance(on, OpenOutbox) else on,
            directory=self._directory,
            lock=on.lock if isinstance(on, OpenOutbox) else None,
            metrics=self.metrics,
            turn=self.turn,
            on_request_only=self._on_request_only,
            without_sinks=self._without_sinks,
            known_vm=known_vm,
        )

    def _new_health_reporter(self) -> HealthReporter:
        health = HealthReporter(
            outbox=self.outbox,
            metrics=self.metrics,
            directory=self._directory,
            loop_watches=self._loop_watches,
            sinks=lambda: [sink.name for sink in self._settings.sinks],
        )
        health.vm_name = self.vm_name
        health.imds = lambda: self.parts.imds.endpoint
        health.configuration = lambda: str(self._settings.file.absolute()) if self._settings.file else ""
        health.refused_answer = lambda: None if self.parts.poller is None else self.parts.poller.refused_answer
        health.is_loading = lambda: self._load is not None
        return health

    def _new_health_server(self) -> HealthServer | None:
        address = self._settings.status.address
        if address is None or self._on_request_only:
            return None
        return HealthServer(*address, self.health.pages)

    @property
    def outbox(self) -> Outbox:
        """The outbox that the agent works on: its own, or the one in memory that has its place."""
        return self.parts.outbox

    def vm_name(self) -> str | None:
        """Return this VM's name, None while it is unknown."""
        return self.parts.vm_name

    def start(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Start to watch and to deliver; give up, so that `stop` can follow, as soon as *stop* returns True."""
        self._stop_is_wanted = stop
        self.metrics.watch_outbox(self.health.outbox)
        self.metrics.watch_vm(self.vm_name)
        self.parts.prepare(stop)
        self.parts.start(stop)
        if stop():
            return
        self._show()
        if self._load is None:
            self._note_running()
        else:
            self.parts.periodic.every(TEND_SECONDS, self._notify_loading, now=True)

    def _show(self) -> None:
        """Let others see the parts that are there now."""
        self.health.polled = self.parts.poller
        if self._health_server is not None:
            self._health_server.open()
            self.parts.periodic.every(TEND_SECONDS, self._health_server.open)

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
                "imds": self.parts.imds.endpoint,
                "state_directory": str(self._directory),
                "sinks": [sink.name for sink in self._settings.sinks],
            },
        )
        if self._settings.file is None:  # then nobody has read what the page of a first VM says
            logger.info(
                "There is no configuration file, so the defaults count. The first request turns Scheduled Events on "
                "for this VM: a reboot or redeploy that you ask for may then wait up to 15 minutes to be approved."
            )

    def watch_directory(self) -> None:
        """Have SIGIO, whose handler sets `turn`, tell of what commands touch; on the thread that calls `run_due`."""
        self._is_watch_wanted = True
        self.parts.watch_directory()

    def wait_for_turn(self, stop: threading.Event) -> bool:
        """Wait until `run_due` has something to do; return False when *stop* is set instead."""
        seldom = CALM_SECONDS if self._load is None else _LOAD_TURN_SECONDS
        self.parts.files.wait(stop, min(self.parts.periodic.seconds_to_next(), seldom))
        return not stop.is_set()

    def run_due(self) -> None:
        """Look at what commands touch, and run the tasks that are due; called after `wait_for_turn`, by one thread.

        Raises StateDirectoryError when another agent has the state directory.
        """
        self._loop_watch.expect_within(CALM_SECONDS)
        if self._load is not None:
            self._look_at_load(self._load)
        self.parts.files.look()
        self.parts.periodic.run_due()

    # While the outbox is being loaded.

    def _notify_loading(self) -> None:
        if self.outbox.records.hold is None:
            return  # the agent counts as started
        status = f"Watching {self.vm_name() or 'this VM'}; the outbox is still being loaded"
        self._notifier.starting(status, _LOADING_SECONDS)

    def _look_at_load(self, load: OutboxLoad) -> None:
        """Go on with the outbox if it is loaded; if that takes too long, let nothing wait for it any more."""
        if load.may_hand_over(self.parts):
            with self._handover:
                if not self._stop_is_wanted():
                    self._go_on_with(load.result())
        elif load.end_hold_if_late(self.parts):
            self._note_running()

    def _go_on_with(self, opened: OpenOutbox) -> None:
        """Begin anew, with the outbox that is loaded now; what was seen and sent without it is taken along."""
        before, is_noted = self.parts, self.outbox.records.hold is None
        self._loop_watch.expect_within(HANDOVER_SECONDS)
        after, seen, taken = hand_over(before, opened, build=self._parts)
        self.parts, self._load = after, None
        self.health.use(after.outbox)
        before.outbox.close(JOIN_SECONDS)
        logger.warning("The outbox is loaded now; what was seen meanwhile is stored.")
        after.start(self._stop_is_wanted, seen=seen, taken=taken)
        if self._is_watch_wanted:
            after.watch_directory()
        if self._stop_is_wanted():
            return
        self._show()
        if not is_noted:
            self._note_running()

    @property
    def feed_within_seconds(self) -> float:
        """Return how often to call `feed_watchdog`; 0 where there is no watchdog."""
        return self._notifier.feed_within_seconds

    def feed_watchdog(self) -> None:
        """Tell the service manager that the agent lives, while the poll turns: its first turn may take long.

        For another thread than `run_due`: that one hangs with the files that it looks at, and polls and sinks do not.
        """
        poller = self.parts.poller
        if poller is not None and not poller.loop_watch.late_seconds:
            self._notifier.alive()

    def _loop_watches(self) -> Mapping[str, LoopWatch]:
        return {**self.parts.loop_watches, "main": self._loop_watch}

    def stop(self, *, spent_seconds: float = 0.0) -> None:
        """Stop polling, let the sinks drain for `stop_grace_seconds`, commit, release the directory.

        *spent_seconds* of the grace are over already.
        """
        deadline = time.monotonic() + max(self._settings.stop_grace_seconds - spent_seconds, 0.0)
        end = deadline + _END_SECONDS
        self._notifier.stopping(self._settings.stop_grace_seconds + _STOP_MARGIN_SECONDS)
        self._loop_watch.idle()
        if self._handover.acquire(timeout=time_left(deadline, at_most=math.inf)):
            if self._load is not None:
                self._store_seen(self._load, latest=deadline - _LEAST_HANDOVER_SECONDS)
            self._handover.release()  # none begins any more
        parts = self.parts
        parts.files.close()
        parts.outbox.take_slow_disk()
        parts.stop_watching(deadline)
        parts.pool.drain(deadline)
        parts.return_to_disk(deadline)
        logger.info("The agent stopped.", extra={"pending": parts.pending(time_left(end))})
        if self._load is not None:
            logger.warning(
                "The outbox was not loaded yet. What was seen meanwhile and is still there is seen by the next agent."
            )
            self._load.abandon(time_left(end))
        self._close(parts.outbox, end)
        if self._health_server is not None:
            self._health_server.close()
        self._notifier.close()

    def _store_seen(self, load: OutboxLoad, *, latest: float) -> None:
        """Go on with the outbox, if it comes before *latest*: only so is what was seen meanwhile stored."""
        has_time = time.monotonic() <= latest
        if self.parts.has_seen_changes:
            load.wait(latest - time.monotonic())
        if has_time and load.is_loaded:
            self._go_on_with(load.result())

    def _close(self, outbox: Outbox, end: float) -> None:
        if outbox.close(time_left(end, at_most=math.inf)):
            if self._opened is not None:
                self._opened.lock.release()
        elif outbox.is_committed:
            logger.warning("The outbox is stored, but its file was not closed in time.")
        else:  # the outbox's thread may still write: the lock goes with the process
            logger.error("The outbox hangs and was left behind; what it has not committed is not stored.")

    def reload(self, settings: Settings, stop: Callable[[], bool] = lambda: False) -> None:
        """Go on with *settings*; what cannot change in a running agent is logged and stays as it was.

        Gives up, so that `stop` can follow, as soon as *stop* returns True.
        """
        before, self._in_force = self._in_force, None
        self._loop_watch.expect_call_within(max(self._settings.imds.timeout_seconds, settings.imds.timeout_seconds) * 2)
        parts = self.parts
        self._settings = parts.settings = settings
        self._warn_what_needs_a_restart()
        is_imds_new = before is None or (before.imds, before.vm) != (settings.imds, settings.vm)
        if is_imds_new:
            parts.exchange_imds(stop)
        if is_imds_new or before is None or _approving(before) != _approving(settings):
            parts.exchange_approver(stop)
        # Before any worker ends: if the outbox refuses, those that are there go on.
        parts.route(stop)
        parts.pool.end_all_but(settings.sinks, grace_seconds=settings.stop_grace_seconds, stop=stop)
        if stop():
            return
        parts.start_workers()
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

    def _warn_readable_secrets(self) -> None:
        for sentence in readable_secrets(self._settings.secret_files):
            logger.warning("%s", sentence)

    def _warn_unconfigured_sinks(self) -> None:
        """Warn of records that are pending for sinks which the configuration does not name any more."""
        configured = {sink.name for sink in self._settings.sinks}
        for name, pending in (self.parts.pending(JOIN_SECONDS) or {}).items():
            if name not in configured and pending:
                logger.warning(
                    "Records are owed to a sink that is no longer configured. Put it back, or give them up with "
                    "`outbox discard --sink %s`.",
                    name,
                    extra={"sink": name, "pending": pending},
                )


def _approving(settings: Settings) -> tuple[object, ...]:
    """Return what the approver is made of."""
    return settings.approval, settings.file, settings.secret_variables
