"""Requests decisions from the ops portal by long polling (PROTOCOL.md, sections 2 to 4).

The portal poller runs on its own thread, so that it does not delay other parts of the agent. It passes each token to
the inbox for verification.

The index of the last response is kept only in memory, so the poller requests all decisions again after a restart. The
poller also returns to index 0 in these cases:

- The portal reports another epoch or a lower index, for example after it was restored from a backup.
- The agent has replaced the state of another machine.
- The wall clock was set. The agent might have refused decisions because of the wrong clock.

Each request has a deadline, and `stop` cancels the current request. If a hanging DNS resolver prevents the cancellation
(see `bridge.http.watchdog`), the agent abandons the thread and ignores any later response.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from bridge.approval.decision_token import MAX_TOKEN_CHARACTERS
from bridge.approval.portal_client import MAX_ANSWER_BYTES, MAX_DECISIONS, PortalAnswer, PortalClient
from bridge.backoff import RETRY_AFTER_CAP_SECONDS, full_jitter
from bridge.clock import CLOCK_SKEW_SECONDS, REAL_CLOCK, Clock
from bridge.errors import ServiceFailed
from bridge.events.event import VmIdentity
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import ChannelMetrics
from bridge.system.threads import LoopWatch

logger = logging.getLogger(__name__)

_IDENTITY_SECONDS = 1.0
_STOP_SECONDS = 1.0
_STOP_POLL_SECONDS = 0.05

#: The minimum time between the starts of two requests.
_INTERVAL_SECONDS = 1.0
#: The minimum time after a response with new decisions. It is shorter, because more decisions may exist.
_NEWS_SECONDS = 0.1
_BACKOFF_BASE_SECONDS = 1.0
_BACKOFF_CAP_SECONDS = 60.0
#: Spreads the first requests over this time if many agents start together.
JITTER_SECONDS = 1.0


def _is_full(answer: PortalAnswer) -> bool:
    size = sum(map(len, answer.decisions))
    return len(answer.decisions) >= MAX_DECISIONS or size > MAX_ANSWER_BYTES - 2 * MAX_TOKEN_CHARACTERS


class PortalPoller:
    """Requests decisions through *client*, and passes the tokens to *receive*.

    *vm* returns the identity of this VM. The poller sends no request while the vmId is unknown. *receive* runs on the
    poller thread and can receive the same token again. If *receive* raises an exception, the poller requests the same
    tokens again. When the value of *stream_id* changes, the poller starts again at index 0. The poller sends the
    first request at a random time within *first_within_seconds*. Tests can replace *wait*.
    """

    def __init__(
        self,
        client: PortalClient,
        *,
        vm: Callable[[], VmIdentity],
        receive: Callable[[Sequence[str]], None],
        stream_id: Callable[[], str] = lambda: "",
        metrics: ChannelMetrics,
        first_within_seconds: float = 0.0,
        clock: Clock = REAL_CLOCK,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._client = client
        self._first_within_seconds = first_within_seconds
        self._vm = vm
        self._receive = receive
        self._stream_id = stream_id
        self._metrics = metrics
        self._clock = clock
        self._wait = wait
        self._log = ThrottledLog(logger, clock=clock)
        self._failures = 0
        self._asked_for: tuple[str, str] | None = None
        self._wall_ahead_seconds: float | None = None
        self._index = 0
        self._epoch: str | None = None
        self.read_in: str | None = None
        """The stream of the outbox during which the agent has received all decisions from index 0."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="approval-channel", daemon=True)
        self.loop_watch = LoopWatch(clock)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread within a second, even during a long poll. Further calls have no effect."""
        self._stop.set()
        deadline = time.monotonic() + _STOP_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            # Wait first: `ssl` leaks a connection that is closed before its handshake begins.
            self._thread.join(_STOP_POLL_SECONDS)
            self._client.close()  # repeat the call, because the thread might begin another request
        self._client.close()
        self._metrics.failed()

    def _run(self) -> None:
        try:
            self._rest(self._clock.random() * self._first_within_seconds)
            while not self._stop.is_set():
                self.loop_watch.expect_call_within(self._client.longest_poll_seconds)
                self._rest(self._run_once())
            self.loop_watch.idle()
        finally:
            self._client.close()

    def _rest(self, delay_seconds: float) -> None:
        if delay_seconds > 0:
            self.loop_watch.expect_within(delay_seconds)
            self._wait(self._stop, delay_seconds)

    def _run_once(self) -> float:
        try:
            vm_id = self._vm().vm_id
            if not vm_id:
                self._log.problem(
                    "vm_id",
                    logging.INFO,
                    "The agent requests decisions once it knows the vmId of this VM. You can also set vm.vm_id.",
                )
                return _IDENTITY_SECONDS
            self._log.recovered("vm_id", "The vmId of this VM is known. The agent requests decisions from the portal.")
            return self._poll(vm_id)
        except ServiceFailed as error:
            return self._failed(error)
        except Exception as error:  # noqa: BLE001 - the thread must continue
            message = "The agent could not process decisions from the portal, and requests them again."
            # Omit the message of the exception, because it may quote a decision.
            wordless = RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
            self._log.problem("offer", logging.ERROR, message, exc_info=wordless)
            return self._backoff(None)

    def _poll(self, vm_id: str) -> float:
        asked_for, is_clock_set = (vm_id, self._stream_id()), self._is_clock_set()
        if asked_for != self._asked_for or is_clock_set:
            self._asked_for, self._index, self._epoch = asked_for, 0, None
        began_at = self._clock.monotonic()
        answer = self._client.poll(vm_id, index=self._index)
        if self._stop.is_set():
            return 0.0
        self._metrics.answered(self._clock.timestamp())
        self._log.recovered("portal", "The portal responds again.", portal=self._client.origin)
        if answer.decisions:
            self._receive(answer.decisions)
            self._log.recovered("offer", "The agent processes decisions from the portal again.")
        self._failures = 0
        before, self._index = self._index, answer.index
        is_other_epoch = before > 0 and answer.epoch not in (None, self._epoch)
        self._epoch = answer.epoch or self._epoch
        if answer.index < before or is_other_epoch:
            self._log.problem(
                "index",
                logging.INFO,
                "The portal's index is no longer valid. The agent requests all decisions again.",
            )
            self._index = 0
        elif not _is_full(answer) and self.read_in != asked_for[1]:
            self.read_in = asked_for[1]
            self._receive(())  # wakes the approver
        interval_seconds = _NEWS_SECONDS if self._index > before else _INTERVAL_SECONDS
        return max(0.0, began_at + interval_seconds - self._clock.monotonic())

    def _is_clock_set(self) -> bool:
        """Return whether the wall clock was set since the last call."""
        now = self._clock.instant()
        before, self._wall_ahead_seconds = self._wall_ahead_seconds, now.wall.timestamp() - now.monotonic
        return before is not None and abs(self._wall_ahead_seconds - before) > CLOCK_SKEW_SECONDS

    def _failed(self, error: ServiceFailed) -> float:
        if self._stop.is_set():
            return 0.0
        self._metrics.failed()
        self._client.drop_connections()
        level = logging.ERROR if error.needs_attention else logging.WARNING
        self._log.problem("portal", level, f"{error} The agent tries again.", kind=repr(type(error)))
        return self._backoff(error.retry_after_seconds)

    def _backoff(self, retry_after_seconds: float | None) -> float:
        """Return the portal's Retry-After, up to an hour. Without one, return a random backoff.

        The poller ignores a Retry-After of 0, because all VMs would otherwise retry at the same time.
        """
        self._failures += 1
        if retry_after_seconds:
            return min(retry_after_seconds, RETRY_AFTER_CAP_SECONDS)
        return full_jitter(
            self._failures,
            base_seconds=_BACKOFF_BASE_SECONDS,
            cap_seconds=_BACKOFF_CAP_SECONDS,
            random=self._clock.random,
        )
