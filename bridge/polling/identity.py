"""Requests this VM's identity from IMDS, on a separate thread so that polls do not wait.

At startup, the agent requests the identity. If IMDS does not return it within 2 s, the agent uses the stored identity
and retries every minute. In two cases, it waits longer:

- If no identity is stored, the agent does not compare documents until IMDS returns the identity. The sinks and the
  record IDs depend on it. The wait lasts at most 60 s, or 5 s if IMDS responds without an identity.
- If the VM has booted since the identity was stored, the stored state might come from the image of another VM. Until
  IMDS returns the vmId, the agent does not send stored records, compare the stored document, or approve events. This
  wait has no limit. If IMDS returns another vmId, the agent starts with an empty state.

In both cases, the agent still records Preempt and Terminate events after 2 s, because these events give little notice.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from bridge.clock import REAL_CLOCK, Clock
from bridge.errors import DocumentInvalid, ImdsError
from bridge.events.event import VmIdentity
from bridge.imds.client import ImdsClient
from bridge.logs import ThrottledLog
from bridge.outbox.outbox import Outbox

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 60.0
_UNTRUSTED_RETRY_SECONDS = 2.0
_UNTRUSTED_ERROR_SECONDS = 30.0
#: The start of the agent waits at most this long, although the first request can take longer.
_START_SECONDS = 2.0
_TICK_SECONDS = 0.05
_WAIT_SECONDS = 60.0
_WAIT_SECONDS_WHEN_REFUSED = 5.0
#: With one of these statuses, IMDS reports that it has no identity. Other errors mean that IMDS is unavailable.
_PLAIN_REFUSALS = frozenset({400, 403, 404, 405, 501})
_NO_NAME = "The name of this VM is unknown, so sinks with scope 'mine' receive every event. Set vm.name."


class IdentityResolver:
    """Requests this VM's identity and saves it. *configured* values override IMDS."""

    def __init__(
        self,
        imds: ImdsClient,
        outbox: Outbox,
        configured: VmIdentity,
        *,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._imds = imds
        self._outbox = outbox
        self._configured = configured
        self._clock = clock
        self._report = ThrottledLog(logger)
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._tried = threading.Event()
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="identity", daemon=True)
        self._started_at = clock.monotonic()
        self._is_waiting = False
        self._wait_until = math.inf
        self.is_found = False
        """Whether IMDS has returned the identity to this agent."""
        self.vm = VmIdentity().with_overrides(configured)
        """The known part of the identity."""

    def start(self, stop: Callable[[], bool] = lambda: False, *, timeout_seconds: float = math.inf) -> None:
        """Wait up to *timeout_seconds* (at most 2 s), and then use the stored identity.

        Returns early if *stop* returns True. The thread keeps requesting the identity.
        """
        self._started_at = self._clock.monotonic()
        self._thread.start()
        give_up_at = time.monotonic() + min(timeout_seconds, _START_SECONDS)
        while not (self._tried.wait(_TICK_SECONDS) or stop() or time.monotonic() >= give_up_at):
            pass
        if not stop():
            self._use_stored()
        self._has_started.set()

    @property
    def is_waiting(self) -> bool:
        """Return whether the first document still waits for the identity."""
        return self._is_waiting and self._clock.monotonic() < self._wait_until

    def wake(self) -> None:
        """Check immediately whether the next request is due."""
        self._woken.set()

    def stop(self, *, timeout_seconds: float = 1.0) -> None:
        """Stop requesting the identity."""
        self._stop.set()
        self._has_started.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def _use_stored(self) -> None:
        with self._lock:
            if self.is_found:
                return
            stored = self._outbox.read(lambda state: state.vm)
            if not self._outbox.is_trusted:
                self._outbox.use_vm(self.vm)
                logger.warning(
                    "After a boot, the agent sends no stored records until IMDS confirms the identity of this VM.",
                    extra={"stored": None if stored is None else stored.name},
                )
            elif stored is not None or self._configured.name is not None:
                self.vm = (stored or VmIdentity()).with_overrides(self._configured)
                self._outbox.identify(self.vm)
            else:
                self._outbox.use_vm(self.vm)
                self._is_waiting = True
                self._wait_until = min(self._wait_until, self._started_at + _WAIT_SECONDS)

    def _run(self) -> None:
        pause = 1.0
        while not self._stop.is_set():
            self._try()
            self._tried.set()
            if self.is_found:
                return
            self._has_started.wait()
            if not self._outbox.is_trusted:
                self._report_untrusted()
                pause = _UNTRUSTED_RETRY_SECONDS
            elif self.is_waiting:
                pause = min(pause * 2, self._wait_until - self._clock.monotonic())
            else:
                pause = _RETRY_SECONDS
                if self.vm.name is None:
                    self._report.problem("name", logging.WARNING, _NO_NAME)
            self._pause(pause)

    def _pause(self, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while not self._stop.is_set() and self._clock.monotonic() < until:
            self._woken.wait(max(until - self._clock.monotonic(), 0.01))
            self._woken.clear()

    def _try(self) -> None:
        try:
            found = self._imds.identity()
        except ImdsError as error:
            self._failed(error)
            return
        if self._stop.is_set():
            return  # another resolver might have taken over
        with self._lock:
            self.vm = found.with_overrides(self._configured)
            if not (self._outbox.is_trusted or self.vm.vm_id):
                self._outbox.use_vm(self.vm)
                self._failed(
                    DocumentInvalid(
                        "The instance document has no vmId. The agent needs the vmId to check its stored state."
                    )
                )
                return
            self._outbox.identify(self.vm)
            self.is_found, self._is_waiting = True, False
        self._report.recovered("identity", "The identity of this VM is known.", vm=self.vm.name)

    def _failed(self, error: ImdsError) -> None:
        if error.status in _PLAIN_REFUSALS or isinstance(error, DocumentInvalid):
            self._wait_until = min(self._wait_until, self._clock.monotonic() + _WAIT_SECONDS_WHEN_REFUSED)
        if not self._stop.is_set():
            name = self._configured.name
            meanwhile = "" if name is None else f" The configured name {name!r} is used."
            message = f"IMDS does not return the identity of this VM: {error}{meanwhile}"
            self._report.problem("identity", logging.WARNING, message, kind=repr(type(error)))

    def _report_untrusted(self) -> None:
        if self._clock.monotonic() - self._started_at >= _UNTRUSTED_ERROR_SECONDS:
            message = "Stored records are not sent and nothing is approved until IMDS returns the identity of this VM."
            self._report.problem("untrusted", logging.ERROR, message)
