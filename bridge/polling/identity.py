"""The identity of this VM: asked of IMDS on a thread of its own, so that no poll is ever delayed.

One try at the start, on a thread, so that a stop need not wait for it; then what was stored, then a try each minute.
While this VM was never known, tries come faster, because records wait for the answer: a minute at most, 5 s where the
service answers plainly that it does not know, 2 s when a record is about an eviction or a deletion. Then sinks are
chosen without it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from bridge.clock import REAL_CLOCK, Clock
from bridge.errors import BridgeError, DocumentInvalid, ImdsError, ImdsStatus
from bridge.events.event import VmIdentity
from bridge.imds.client import ImdsClient
from bridge.logs import ThrottledLog
from bridge.outbox import meta
from bridge.outbox.outbox import Outbox, result_or_stop

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 60.0
_TICK_SECONDS = 0.05
_WAIT_SECONDS = 60.0
_WAIT_SECONDS_WHEN_REFUSED = 5.0
_WAIT_SECONDS_WHEN_URGENT = 2.0
#: Answers that mean "no such thing here" rather than "not now".
_PLAIN_REFUSALS = frozenset({400, 403, 404, 405, 501})


class IdentityResolver:
    """Stores the identity of this VM in the outbox; *configured* wins over the service's answer."""

    def __init__(self, imds: ImdsClient, outbox: Outbox, configured: VmIdentity, *, clock: Clock = REAL_CLOCK) -> None:
        self._imds = imds
        self._outbox = outbox
        self._configured = configured
        self._clock = clock
        self._report = ThrottledLog(logger)
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._tried = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="identity", daemon=True)
        self._is_identified = False
        self._is_found = False
        self._wait_until = float("inf")
        self.is_waiting = False
        self.vm = VmIdentity().with_overrides(configured)
        """Who this VM is, as far as it is known."""

    @property
    def os_disk_is_ephemeral(self) -> bool | None:
        """Return whether a redeploy makes the OS disk anew; None until the service has answered.

        It is not stored: a VM whose name was stored, or is configured, still asks until it is answered.
        """
        return self._imds.os_disk_is_ephemeral

    def start(self, stop: Callable[[], bool] = lambda: False, *, timeout_seconds: float = math.inf) -> None:
        """Try once; fall back on what is stored; go on trying on a thread when that was in vain.

        Waits *timeout_seconds* for that try at most, and returns at once when *stop* returns True.
        """
        started = self._clock.monotonic()
        self._thread.start()
        give_up_at = time.monotonic() + timeout_seconds
        while not (self._tried.wait(_TICK_SECONDS) or stop() or time.monotonic() >= give_up_at):
            pass
        if not (self._is_found or stop()):
            self._fall_back(started, stop)
        self._started.set()

    def _fall_back(self, started: float, stop: Callable[[], bool]) -> None:
        state = result_or_stop(self._outbox.read(meta.load), stop)
        if state is None:
            return
        with self._lock:
            if self._is_identified:  # the first try came to an answer after all
                return
            if state.vm is None and not self._configured.name:
                self._outbox.records.await_identity()
                self.is_waiting = True
                self._wait_until = min(self._wait_until, started + _WAIT_SECONDS)
                return
            identified = self._identify(state.vm or VmIdentity())
        result_or_stop(identified, stop)

    def expedite(self) -> None:
        """Wait no longer than 2 s more: a record is about an eviction or a deletion."""
        if self.is_waiting:
            self._wait_until = min(self._wait_until, self._clock.monotonic() + _WAIT_SECONDS_WHEN_URGENT)
            self.wake()

    def wake(self) -> None:
        """Let the thread check at once whether the waiting is over."""
        self._woken.set()

    def stop(self, *, timeout_seconds: float = 1.0) -> None:
        """Stop trying; records that still wait get their sinks now."""
        self._stop.set()
        self._started.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        self._give_up_waiting()

    def _run(self) -> None:
        self._try()
        self._tried.set()
        self._started.wait()
        pause, next_try = 1.0, self._clock.monotonic() + 1.0
        while not self._stop.is_set() and not self._is_found:
            now = self._clock.monotonic()
            if self.is_waiting and now >= self._wait_until:
                self._give_up_waiting()
            if now >= next_try:
                self._try()
                pause = min(pause * 2, _RETRY_SECONDS) if self.is_waiting else _RETRY_SECONDS
                next_try = self._clock.monotonic() + pause
            until = min(next_try, self._wait_until) if self.is_waiting else next_try
            self._woken.wait(max(until - self._clock.monotonic(), 0.01))
            self._woken.clear()

    def _try(self) -> None:
        try:
            found = self._imds.identity()
        except ImdsError as error:
            self._failed(error)
            return
        if self._stop.is_set():
            return  # another resolver may have taken over
        try:
            with self._lock:
                identified = self._identify(found)
            identified.result()
        except BridgeError as error:
            self._is_identified = False
            if not self._stop.is_set():
                self._report.problem("identity", logging.ERROR, f"This VM's identity could not be stored: {error}")
            return
        self._is_found = True
        self._report.recovered("identity", "This VM's identity is known now.", vm=self.vm.name)

    def _failed(self, error: ImdsError) -> None:
        """Wait 5 s more at most when the service plainly does not know this VM."""
        is_refusal = isinstance(error, ImdsStatus) and error.status in _PLAIN_REFUSALS
        if (is_refusal or isinstance(error, DocumentInvalid)) and (self.is_waiting or not self._tried.is_set()):
            self._wait_until = min(self._wait_until, self._clock.monotonic() + _WAIT_SECONDS_WHEN_REFUSED)
        if not self._stop.is_set():
            self._report.problem("identity", logging.WARNING, f"This VM's own name is not known yet: {error}")

    def _identify(self, found: VmIdentity) -> Future[bool]:
        self.vm = found.with_overrides(self._configured)
        self.is_waiting, self._is_identified = False, True
        return self._outbox.identify(self.vm)

    def _give_up_waiting(self) -> None:
        if self.is_waiting:
            self.is_waiting = False
            self._outbox.write(self._outbox.records.stop_waiting)
            if not self._stop.is_set():
                logger.warning(
                    "The name of this VM is not known: sinks of scope 'mine' get every event. Set vm.name to be sure."
                )
