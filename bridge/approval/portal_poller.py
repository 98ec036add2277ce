"""The outbound long poll that brings signed decisions from the ops portal (PROTOCOL.md, sections 2 to 4).

A thread of its own, with nothing shared but `offer`: whatever happens here delays neither the poll nor a sink. The
channel trusts nothing that it brings and judges none of it. It keeps the index in memory only; starting over brings
decisions that are known already, which are passed over in silence, while an index that outlived a lost database would
leave decisions out. For the same reason the index moves on only after `offer` has returned.

Each request ends by its deadline, and `stop` breaks it off. The one thing out of reach is a resolver that hangs
(see `bridge.deadline`): then the thread is left behind, and what it still brings is not offered.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from bridge.approval.credentials import PortalCredential
from bridge.approval.pacing import Pacing
from bridge.approval.portal_client import GRACE_SECONDS, PortalClient
from bridge.clock import Clock
from bridge.config.approval import RemoteSettings
from bridge.errors import PortalFailed
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import ChannelMetrics

logger = logging.getLogger(__name__)

_IDENTITY_SECONDS = 1.0
_STOP_SECONDS = 1.0
_STOP_LOOK_SECONDS = 0.05


class PortalPoller:
    """Holds a request open to the portal of *remote* and hands the tokens of every answer to *offer*.

    *vm_id* returns who this VM is, null while that is unknown: then nobody is asked. *offer* is called from the
    channel's thread, must not block, and may be given what it knows already; when it raises, the same tokens come
    again. *wait* is how the thread rests: given an event and seconds, it returns whether the event is set. *clock*
    gives Unix time. Raises ConfigurationError for plain http to another machine.
    """

    def __init__(
        self,
        remote: RemoteSettings,
        *,
        vm_id: Callable[[], str | None],
        offer: Callable[[Sequence[str]], None],
        metrics: ChannelMetrics | None = None,
        report: ThrottledLog | None = None,
        credential: PortalCredential | None = None,
        grace_seconds: float = GRACE_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._client = PortalClient(remote, credential=credential, grace_seconds=grace_seconds)
        self._vm_id = vm_id
        self._offer = offer
        self._metrics = metrics
        self._report = report or ThrottledLog(logger, clock=Clock(monotonic=monotonic))
        self._clock = clock
        self._monotonic = monotonic
        self._wait = wait
        self._pace = Pacing(chance)
        self._asked_for: str | None = None
        self._index = 0
        self._was_asked = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="approval-channel", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """End within a second, also while the portal holds a request; stopping twice, or before the start, is fine."""
        self._stop.set()
        deadline = time.monotonic() + _STOP_SECONDS
        self._client.stop_waiting()
        while self._thread.is_alive() and time.monotonic() < deadline:
            # A moment first: a connection cut before its handshake begins is left to the garbage collector by `ssl`.
            self._thread.join(_STOP_LOOK_SECONDS)
            self._client.close()  # again and again: the thread may just have been about to ask
        self._client.close()
        if self._metrics is not None:
            self._metrics.failed()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                delay_seconds = self._turn()
                if delay_seconds > 0:
                    self._wait(self._stop, delay_seconds)
        finally:
            self._client.close()

    def _turn(self) -> float:
        """Ask once, and return the seconds until the next time."""
        try:
            vm_id = self._vm_id()
            if not vm_id:
                self._report.problem(
                    "vm_id", logging.INFO, "The portal is not asked before this VM's vmId is known; set vm.vm_id."
                )
                return _IDENTITY_SECONDS
            self._report.recovered("vm_id", "This VM's vmId is known now, and the portal is asked.")
            return self._asked(vm_id)
        except PortalFailed as error:
            return self._failed(error)
        except Exception as error:  # noqa: BLE001 - the top of the thread, which must outlive whatever it is
            what = "Decisions of the portal could not be handed on; they will come again."
            # Not the exception's own words: they may quote a decision.
            wordless = RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
            self._report.problem("offer", logging.ERROR, what, exc_info=wordless)
            return self._pace.after_failure(None)

    def _asked(self, vm_id: str) -> float:
        if vm_id != self._asked_for:
            self._asked_for, self._index = vm_id, 0
        began_at = self._monotonic()
        answer = self._client.ask(vm_id, index=self._index)
        if self._stop.is_set():
            return 0.0
        self._answered()
        if answer.decisions:
            self._offer(answer.decisions)
            self._report.recovered("offer", "Decisions of the portal are handed on again.")
        before, self._index = self._index, answer.index
        if answer.index > before:
            return self._pace.after_news(self._monotonic())
        if answer.index < before:
            self._report.problem("index", logging.INFO, "The portal started over, so it is asked from the beginning.")
            self._index = 0
        return self._pace.after_nothing(self._monotonic(), began_at=began_at)

    def _answered(self) -> None:
        if self._metrics is not None:
            self._metrics.answered(self._clock())
        if not self._was_asked:
            self._was_asked = True
            logger.info("The portal answers.", extra={"portal": self._client.origin})
        self._report.recovered("portal", "The portal answers again.", portal=self._client.origin)

    def _failed(self, error: PortalFailed) -> float:
        if self._stop.is_set():
            return 0.0
        self._was_asked = True
        if self._metrics is not None:
            self._metrics.failed()
        self._client.start_afresh()
        level = logging.ERROR if error.needs_attention else logging.WARNING
        self._report.problem("portal", level, f"{error} It is asked again.")
        return self._pace.after_failure(error.retry_after_seconds)
