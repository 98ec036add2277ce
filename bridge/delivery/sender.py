"""Calls a sink, and enforces a deadline even if the sink's SDK hangs.

Each sink has its own thread, and the delivery loop runs on this thread. Another thread, the watching thread, measures
the time of each call into the sink. If a call passes its deadline, the watching thread abandons the sink's thread and
closes the sink on a third thread. The next call uses a new instance of the sink on a new thread.

An abandoned thread ends when its call returns, and the result of the call is ignored. A sink with eight abandoned
threads does not receive any records until one of them ends, so it cannot use up the resources of other sinks.

Time during which the VM is frozen does not count toward the deadline. Otherwise, the agent might kill a sink's program
halfway through and then run it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from bridge.errors import DeliveryError, DeliveryFailed, DeliveryRejected, RetryReason
from bridge.sink import Sink, TransitionRecord
from bridge.system.threads import RunningTime

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The factor by which the agent's deadline exceeds the sink's deadline, so that the sink reports a timeout first.
GRACE = 1.04
_CLOSE_SECONDS = 1.0
#: The share of `timeout_seconds` for which a new instance waits until the last instance is closed.
_CLOSE_SHARE = 0.25
_MOST_ABANDONED = 8
_CUT = "The send was cut before it began."
_NO_THREAD = "No thread can start. Raise the task limit (TasksMax, pids.max), or end the tasks that use it up."


class Sender:
    """Runs calls on the thread of one sink. Only `cut` is thread-safe.

    *build* creates the sink. *configuration* returns a digest of the sink's configuration, and can read files to
    compute it.
    """

    def __init__(
        self,
        build: Callable[[], Sink],
        *,
        name: str,
        timeout_seconds: float,
        configuration: Callable[[], str] = str,
    ) -> None:
        self._build = build
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._configuration = configuration
        self._current: SinkThread | None = None
        self._abandoned: list[SinkThread] = []
        self.is_cut = False
        """True after a call to `cut`. The sender then sends no more records."""

    def run(self, work: Callable[[SinkThread], T]) -> T:
        """Run *work*. Raise DeliveryFailed if a call is overdue or no thread can start."""
        began_at = time.monotonic()
        if self._abandoned:
            self._reap_abandoned()
        current = self._current = self._current or self._begin()
        current.spent_seconds = time.monotonic() - began_at
        if self.is_cut:
            raise DeliveryFailed(_CUT, reason=RetryReason.CUT)
        try:
            return current.run(work)
        except _Overdue:
            self._current = None
            self._abandoned.append(current)
            current.end()
            current.begin_closing()
            message = f"No response within {self._timeout_seconds:g} s. The send was cut."
            raise DeliveryFailed(message, reason=RetryReason.TIMEOUT) from None

    def send(self, batch: Sequence[TransitionRecord]) -> bool:
        """Send *batch* on the sink's thread."""
        return self.run(lambda thread: thread.send(batch))

    def check(self) -> None:
        """Test the destination on the sink's thread."""
        self.run(lambda thread: thread.check())

    def cut(self) -> None:
        """Reject further calls, and close the sink to end the current call (thread-safe)."""
        self.is_cut = True  # before the next line, because `run` sets its thread before it reads this value
        current = self._current
        if current is not None:
            current.cut()

    def close(self) -> None:
        """Close the sink, and wait for at most one second."""
        current, self._current = self._current, None
        if current is not None:
            current.end()
            if not current.is_gone(_CLOSE_SECONDS):
                current.begin_closing()

    def _begin(self) -> SinkThread:
        try:
            return SinkThread(
                self._build,
                name=f"sink:{self._name}",
                deadline_seconds=self._timeout_seconds * GRACE,
                configuration=self._configuration,
            )
        except RuntimeError as error:
            raise DeliveryFailed(_NO_THREAD, needs_attention=True) from error

    def _reap_abandoned(self) -> None:
        """Wait briefly for the newest abandoned thread. Raise DeliveryFailed if too many remain."""
        self._abandoned[-1].wait_closed(min(_CLOSE_SECONDS, self._timeout_seconds * _CLOSE_SHARE))
        self._abandoned = [each for each in self._abandoned if not each.is_gone(0)]
        for each in self._abandoned:
            each.begin_closing()  # the last attempt might have failed to start a thread
        if len(self._abandoned) >= _MOST_ABANDONED:
            raise DeliveryFailed(
                f"{len(self._abandoned)} send attempts exceeded their deadline and cannot be stopped. The sink sends "
                "nothing until one of them ends. Restart the agent, and report the problem to the author of the sink.",
                needs_attention=True,
                reason=RetryReason.HANGING,
            )


class _Overdue(Exception):
    """A call into the sink passed its deadline."""


class _Abandoned(BaseException):
    """Ends an abandoned thread.

    It derives from BaseException, so that ``except Exception`` does not catch it.
    """


class SinkThread:
    """An instance of a sink, and the thread that makes all calls to the instance."""

    def __init__(
        self,
        build: Callable[[], Sink],
        *,
        name: str,
        deadline_seconds: float,
        configuration: Callable[[], str],
    ) -> None:
        self._build = build
        self._deadline_seconds = deadline_seconds
        self._read_configuration = configuration
        self.configuration = ""
        """The digest of the configuration with which the sink was built."""
        self.spent_seconds = 0.0
        """How much of its deadline the next call has already used."""
        self._sink: Sink | None = None
        self._changed = threading.Condition(threading.Lock())
        self._call_began_at: float | None = None
        self._is_cut = self._is_abandoned = False
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closer: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # On the sink's thread.

    def send(self, batch: Sequence[TransitionRecord], following: Sequence[TransitionRecord] = ()) -> bool:
        """Send *batch*, and return whether the sink made a request.

        *following* contains the records of the next call, which the sink can prepare early. Every exception except
        DeliveryRejected is raised as DeliveryFailed.
        """
        return self._call(lambda sink: self._send(sink, batch, following))

    def _send(self, sink: Sink, batch: Sequence[TransitionRecord], following: Sequence[TransitionRecord]) -> bool:
        if following:
            with suppress(Exception):  # only a hint; the send of these records reports the error
                sink.prepare_next(following)
            self._refuse_if_cut()  # the call above may have hung
        sink.send(batch)
        return not sink.sent_nothing

    def check(self) -> None:
        """Test the destination."""
        self._call(lambda sink: sink.check())

    def warm_up(self) -> None:
        """Call the sink's `warm_up` and ignore its errors."""
        with suppress(DeliveryError):
            self._call(lambda sink: sink.warm_up())

    def _call(self, call: Callable[[Sink], T]) -> T:
        with self._changed:
            self._call_began_at = time.monotonic()
        try:
            result = call(self._instance())
        except BaseException as error:  # noqa: BLE001  # the worker handles it
            self._end_call()
            problem = _as_delivery_error(error)
            raise problem from problem.__cause__
        self._end_call()
        return result

    def _end_call(self) -> None:
        with self._changed:
            if self._is_abandoned:
                raise _Abandoned
            self._call_began_at = None

    def _instance(self) -> Sink:
        self._refuse_if_cut()
        if self._sink is None:
            self.configuration = self._read_configuration()
            self._sink = self._build()
            self._refuse_if_cut()
        return self._sink

    def _refuse_if_cut(self) -> None:
        """Raise DeliveryFailed if this instance was canceled.

        A new instance might already be sending the same records.
        """
        if self._is_cut or self._is_abandoned:
            raise DeliveryFailed(_CUT, reason=RetryReason.CUT)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()
            del work  # an idle thread keeps no batch in memory
        self._close()

    def _close(self) -> None:
        if self._sink is not None:
            try:
                self._sink.close()
            except BaseException as error:  # noqa: BLE001  # the sink is abandoned in any case
                logger.info("Closing a sink failed.", extra={"sink": self._thread.name, "error": _describe(error)})

    # On the watching thread.

    def run(self, work: Callable[[SinkThread], T]) -> T:
        """Run *work*, and return its result. Raise _Overdue if a call exceeds its deadline."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work(self))
            except _Abandoned:
                return  # the watching thread has continued without this result
            except BaseException as error:  # noqa: BLE001  # handed to the watching thread
                done.set_exception(error)
            with self._changed:
                self._changed.notify()

        self._works.put(run)
        self._watch(done)
        return done.result()

    def _watch(self, done: Future[T]) -> None:
        limit, watched, waited = RunningTime(self._deadline_seconds), 0.0, 0.0
        with self._changed:
            while not done.done():
                began_at = self._call_began_at
                if began_at is None:  # the start of a call does not wake this thread, to save CPU time
                    waited = self._deadline_seconds / 4
                    self._changed.wait(waited)
                    continue
                if began_at != watched:
                    # If the delay exceeds the last wait, this process was frozen. The excess does not count.
                    watched, late_seconds = began_at, min(time.monotonic() - began_at, waited)
                    limit = RunningTime(self._deadline_seconds - late_seconds - self.spent_seconds)
                    self.spent_seconds = 0.0
                waited = limit.next_wait()
                if waited <= 0:
                    self._is_abandoned = True
                    raise _Overdue
                self._changed.wait(waited)

    def cut(self) -> None:
        """Reject further calls, and close the sink to end the current call (thread-safe)."""
        self._is_cut = True
        self.begin_closing()

    def end(self) -> None:
        """Close the sink on its own thread after the current work."""
        self._works.put(None)

    def begin_closing(self) -> None:
        """Close the sink on a separate thread. Do nothing if no thread can start."""
        if self._closer is None:
            closer = threading.Thread(target=self._close, name=f"{self._thread.name}:close", daemon=True)
            with suppress(RuntimeError):
                closer.start()
                self._closer = closer

    def wait_closed(self, timeout_seconds: float) -> None:
        """Wait for at most *timeout_seconds* until the sink is closed."""
        if self._closer is not None:
            self._closer.join(timeout_seconds)

    def is_gone(self, timeout_seconds: float) -> bool:
        """Wait up to *timeout_seconds*. Return whether all threads of this instance have ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive() and (self._closer is None or not self._closer.is_alive())


def _as_delivery_error(error: BaseException) -> DeliveryError:
    if isinstance(error, DeliveryRejected | DeliveryFailed):
        return error
    failed = DeliveryFailed(_describe(error), reason=RetryReason.EXCEPTION)
    failed.__cause__ = error
    return failed


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
