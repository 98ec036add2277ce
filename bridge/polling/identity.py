"""The identity of this VM: asked of IMDS on a thread of its own, so that no poll is ever delayed.

One try at the start, on a thread, so that a stop need not wait for it; then what was stored, then a try each minute.
While this VM is not known, tries come faster, because records wait for the answer: a minute at most, 5 s where the
service answers plainly that it does not know, 2 s when a record is about an eviction or a deletion. Then sinks are
chosen without it. A thread of its own counts that time, because a request may hang for longer.

A vmId that was stored may be that of another machine: the state directory may have come with an image. So nothing is
told in its name until the service says who this VM is (`bridge.outbox.doubt`). After the same minute without an answer
it is believed if the machine has not booted since it was stored; if it has, it stays in doubt. A name that is
configured counts all the while, and no record waits for one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum

from bridge.clock import REAL_CLOCK, Clock
from bridge.errors import BridgeError, DocumentInvalid, ImdsError, ImdsStatus
from bridge.events.event import VmIdentity
from bridge.imds.client import ImdsClient
from bridge.logs import ThrottledLog
from bridge.outbox import meta
from bridge.outbox.outbox import Outbox, result_or_stop
from bridge.system.boot import has_booted

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 60.0
#: The try at the start goes on for its timeout, but the agent need not: records wait for the identity by themselves.
_START_SECONDS = 2.0
_TICK_SECONDS = 0.05
_WAIT_SECONDS = 60.0
_WAIT_SECONDS_WHEN_REFUSED = 5.0
_WAIT_SECONDS_WHEN_URGENT = 2.0
#: Answers that mean "no such thing here" rather than "not now".
_PLAIN_REFUSALS = frozenset({400, 403, 404, 405, 501})


class _Doubt(Enum):
    """Whether what is stored may be another machine's."""

    NONE = "none"
    SAME_BOOT = "same boot"
    """Hardly: it is the boot under which it was stored."""
    OPEN = "open"


class IdentityResolver:
    """Stores the identity of this VM in the outbox; *configured* wins over the service's answer.

    *boot_id* names the boot of this machine; with None an identity that is stored is trusted at once, as that of an
    agent which had it confirmed. *found* is what the service said of this machine to this very agent: it is not asked.
    """

    def __init__(
        self,
        imds: ImdsClient,
        outbox: Outbox,
        configured: VmIdentity,
        *,
        boot_id: str | None = None,
        found: VmIdentity | None = None,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._imds = imds
        self._found_before = found
        self._outbox = outbox
        if boot_id is not None:
            outbox.records.boot_id = boot_id
        self._configured = configured
        self._boot_id = boot_id
        self._clock = clock
        self._report = ThrottledLog(logger)
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._tried = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="identity", daemon=True)
        self._ask_now = threading.Event()
        self._is_identified = False
        self._is_found = False
        self._wait_until = self._believe_at = float("inf")
        self._stored = VmIdentity()
        self._doubt = _Doubt.NONE
        self.is_waiting = False
        self.vm = VmIdentity().with_overrides(configured)
        """Who this VM is, as far as it is known."""

    @property
    def is_found(self) -> bool:
        """Return whether the service has said who this VM is."""
        return self._is_found

    @property
    def os_disk_is_ephemeral(self) -> bool | None:
        """Return whether a redeploy makes the OS disk anew; None until the service has answered.

        It is not stored: a VM whose name was stored, or is configured, still asks until it is answered.
        """
        return self._imds.os_disk_is_ephemeral

    def start(self, stop: Callable[[], bool] = lambda: False, *, timeout_seconds: float = math.inf) -> None:
        """Try once; fall back on what is stored; go on trying on a thread when that was in vain.

        Waits *timeout_seconds* for that try at most, and never over 2 s; returns at once when *stop* returns True.
        """
        started = self._clock.monotonic()
        self._thread.start()
        give_up_at = time.monotonic() + min(timeout_seconds, _START_SECONDS)
        while not (self._tried.wait(_TICK_SECONDS) or stop() or time.monotonic() >= give_up_at):
            pass
        if not (self._is_found or stop()):
            self._fall_back(started, stop)
        self._started.set()

    def _fall_back(self, started: float, stop: Callable[[], bool]) -> None:
        state = result_or_stop(self._outbox.read(meta.load), stop)
        if state is None:
            return
        doubted: Future[None] | None = None
        identified: Future[bool] | None = None
        with self._lock:
            if self._is_identified:  # the first try came to an answer after all
                return
            self._doubt = self._doubt_of(state)
            if self._doubt is not _Doubt.NONE and state.vm is not None:
                self._stored = state.vm
                doubted = self._outbox.write(self._outbox.records.distrust_stored, self.vm)
                self._begin_to_wait(started)
                logger.warning(
                    "Who this VM is is not known yet. Until it is, what is stored counts as another machine's, which "
                    "may have come with an image: what was pending waits, and so do the ends of its events.",
                    extra={"stored": state.vm.name},
                )
            elif state.vm is None and not self._configured.name:
                self._outbox.records.await_identity()
                self._begin_to_wait(started)
            else:
                identified = self._identify(state.vm or VmIdentity())
        if doubted is not None:
            result_or_stop(doubted, stop)
        if identified is not None:
            result_or_stop(identified, stop)
        if self.is_waiting or self._doubt is _Doubt.SAME_BOOT:
            # Where no thread is to be had, the one that asks looks after the wait between two requests.
            with suppress(RuntimeError):
                threading.Thread(target=self._watch_the_wait, name="identity:wait", daemon=True).start()

    def _doubt_of(self, state: meta.SavedState) -> _Doubt:
        is_sure = self._boot_id is None or state.vm is None or state.vm.vm_id is None
        if is_sure or _same(self._configured.vm_id, state.vm.vm_id if state.vm is not None else None):
            return _Doubt.NONE
        # Not of one at which the service did not say who this is: it may be that of another machine.
        known = state.vm_boot_id
        is_same_boot = bool(known and self._boot_id) and not has_booted(known, self._boot_id or "")
        return _Doubt.SAME_BOOT if is_same_boot else _Doubt.OPEN

    def _begin_to_wait(self, started: float) -> None:
        self.is_waiting = self.vm.name is None
        self._believe_at = min(self._believe_at, started + _WAIT_SECONDS)
        self._wait_until = min(self._wait_until, self._believe_at)

    def expedite(self) -> None:
        """Wait no longer than 2 s more: a record is about an eviction or a deletion."""
        if self.is_waiting:
            self._wait_until = min(self._wait_until, self._clock.monotonic() + _WAIT_SECONDS_WHEN_URGENT)
            self.wake()

    def wake(self) -> None:
        """Check at once whether the waiting is over, and whether another try is due."""
        self._woken.set()
        self._ask_now.set()

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
            self._end_the_wait_in_time()
            if self._clock.monotonic() >= next_try:
                self._try()
                is_wanted = self.is_waiting or self._doubt is not _Doubt.NONE
                pause = min(pause * 2, _RETRY_SECONDS) if is_wanted else _RETRY_SECONDS
                next_try = self._clock.monotonic() + pause
            self._ask_now.wait(max(next_try - self._clock.monotonic(), 0.01))
            self._ask_now.clear()

    def _watch_the_wait(self) -> None:
        while not (self._stop.is_set() or self._is_identified):
            self._end_the_wait_in_time()
            if not self.is_waiting and self._doubt is not _Doubt.SAME_BOOT:
                return
            until = self._wait_until if self.is_waiting else self._believe_at
            self._woken.wait(max(min(until, self._believe_at) - self._clock.monotonic(), 0.01))
            self._woken.clear()

    def _end_the_wait_in_time(self) -> None:
        """Give up waiting when it is time; believe what is stored once nothing speaks against it any more."""
        now = self._clock.monotonic()
        if self._doubt is _Doubt.SAME_BOOT and now >= self._believe_at:
            self._believe_stored()
        elif self.is_waiting and now >= self._wait_until:
            self._give_up_waiting()

    def _believe_stored(self) -> None:
        with self._lock:
            if self._is_identified or self._stop.is_set():
                return
            self._identify(self._stored)
        logger.warning("The service does not say who this VM is; it has not booted since that was stored.")

    def _try(self) -> None:
        try:
            found = self._found_before or self._imds.identity()
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
            self._believe_at = min(self._believe_at, self._clock.monotonic() + _WAIT_SECONDS_WHEN_REFUSED)
            self._wait_until = min(self._wait_until, self._believe_at)
            self.wake()
        if not self._stop.is_set():
            name = self._configured.name
            meanwhile = "" if name is None else f"; it is called {name!r} here, as configured"
            message = f"The metadata service does not say who this VM is{meanwhile}: {error}"
            self._report.problem("identity", logging.WARNING, message)

    def _identify(self, found: VmIdentity) -> Future[bool]:
        self.vm = found.with_overrides(self._configured)
        self.is_waiting, self._is_identified, self._doubt = False, True, _Doubt.NONE
        self._woken.set()
        return self._outbox.identify(self.vm)

    def _give_up_waiting(self) -> None:
        with self._lock:
            if not self.is_waiting:
                return
            self.is_waiting = False
            self._outbox.write(self._outbox.records.stop_waiting)
        if self.vm.name is None and not self._stop.is_set():
            logger.warning(
                "The name of this VM is not known: sinks of scope 'mine' get every event. Set vm.name to be sure."
            )


def _same(one: str | None, other: str | None) -> bool:
    """Return whether these are the same vmId, and known."""
    return bool(one and other) and (one or "").lower() == (other or "").lower()
