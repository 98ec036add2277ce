"""The sender: calls a sink with a deadline that holds, whatever the sink's SDK does.

Some SDK calls hang for ever, also with a timeout of their own. So a sink lives on a thread of its own, and the worker
waits for it no longer than `timeout_seconds` and a little: the little is there so that a sink that keeps the deadline
itself can report what happened. A sink that does not is abandoned: it is closed on yet another thread, and the next
try, which waits for that within its own deadline, builds a new instance. Threads that never come back are counted; with
too many of them the sink is left alone until one ends, because a leak would take the healthy sinks down with it.

Time in which the VM was frozen is not counted: a command that is half done would be cut for it, and run again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from queue import SimpleQueue

from bridge.errors import DeliveryError, DeliveryFailed, DeliveryRejected, RetryReason
from bridge.sink import AttestedTokens, Sink, TransitionRecord
from bridge.system.threads import RunningTime

logger = logging.getLogger(__name__)

#: The host's own deadline, as a multiple of the sink's; what is promised is 1.1.
GRACE = 1.04
_CLOSE_SECONDS = 1.0
#: How much of a try's time may go into waiting until the one before is closed.
_CLOSE_SHARE = 0.25
_MOST_ABANDONED = 8
#: How long a send that gives way is left alone, and how often it is asked for from then on.
_UNDISTURBED_SECONDS = 0.5
_LOOK_SECONDS = 0.1
_CUT = "The send was cut before it began."
_NO_THREAD = "No thread can be started: raise the limit of tasks (TasksMax, pids.max), or end what uses them up."

_Call = Callable[[Sink, "_SinkThread"], None]


class Sender:
    """Calls one sink, built by *build* when it is first needed; *attested* is how it gets a portal's tokens.

    Raises DeliveryRejected as the sink does; anything else it raises is a DeliveryFailed, caused by it. For one thread.
    """

    def __init__(
        self,
        build: Callable[[], Sink],
        *,
        name: str,
        timeout_seconds: float,
        configuration: Callable[[], str] = str,
        on_stall: Callable[[float], None] = lambda _seconds: None,
        attested: AttestedTokens | None = None,
    ) -> None:
        self._build = build
        self._attested = attested
        self._on_stall = on_stall
        """Called with the seconds in which this process did not run."""
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._configuration = configuration
        """Called on the sink's thread: it may read files."""
        self.configuration = ""
        """What *configuration* returned right before the last send, or right after it when it was rejected."""
        self._current: _SinkThread | None = None
        self._abandoned: list[_SinkThread] = []
        self.is_cut = False
        """Whether `cut` was called: then nothing is sent any more."""

    def send(
        self,
        batch: Sequence[TransitionRecord],
        following: Sequence[TransitionRecord] = (),
        *,
        gives_way: Callable[[], bool] | None = None,
    ) -> bool:
        """Send *batch*, which *following* probably follows; raise DeliveryFailed when the deadline passes.

        Return whether a request was made: False when the sink had nothing to say of these records. The send is cut
        as well when it has no answer after half a second and *gives_way* returns True.
        """
        made_request: list[bool] = []
        configurations: list[str] = []

        def call(sink: Sink, thread: _SinkThread) -> None:
            configurations.append(self._configuration())
            if following:
                with suppress(Exception):  # a hint; what is wrong with these records shows when they are sent
                    sink.prepare_next(following)
            thread.refuse_if_abandoned()  # both may have hung
            try:
                sink.send(batch)
            except DeliveryRejected:
                # What changed meanwhile may have been what was refused, but not what was accepted.
                configurations.append(self._configuration())
                raise
            made_request.append(not sink.sent_nothing)

        try:
            self._call(call, gives_way)
        finally:
            self.configuration = configurations[-1] if configurations else self.configuration
        return all(made_request)

    def check(self) -> str:
        """Try the destination and return what that has shown, "" for nothing; raise DeliveryFailed at the deadline."""
        shown: list[str] = []

        def call(sink: Sink, _thread: _SinkThread) -> None:
            sink.check()
            shown.append(sink.shown)

        self._call(call)
        return "".join(shown)

    def cut(self) -> None:
        """Send nothing any more, and close the sink under the send that is under way, which fails; from any thread."""
        self.is_cut = True  # before the look at what is under way: a send that begins just now looks after it is seen
        current = self._current
        if current is not None:
            current.abandon()

    def close(self) -> None:
        """Close the sink, waiting a second at most."""
        current, self._current = self._current, None
        if current is not None:
            current.end()
            if not current.is_gone(_CLOSE_SECONDS):
                current.abandon()

    def _call(self, call: _Call, gives_way: Callable[[], bool] | None = None) -> None:
        if self.is_cut:
            raise DeliveryFailed(_CUT, reason=RetryReason.CUT)
        limit = RunningTime(self._timeout_seconds * GRACE)
        if self._abandoned:
            self._reap_abandoned()
        current = self._current
        if current is None:
            current = self._current = self._begin()
        if self.is_cut:
            raise DeliveryFailed(_CUT, reason=RetryReason.CUT)
        future = current.call(call)
        if not self._is_done(future, limit, gives_way):
            self._abandon(current)
            message = f"No answer within {self._timeout_seconds:g} s; the send was cut."
            if limit.left_seconds > 0:
                message = "No answer so far, and something new is to be sent; this was cut."
            raise DeliveryFailed(message, uncertain=True, reason=RetryReason.TIMEOUT)
        error = future.exception()
        if error is not None:
            raise _as_delivery_error(error)

    def _begin(self) -> _SinkThread:
        try:
            return _SinkThread(self._build, self._attested, name=f"sink:{self._name}")
        except RuntimeError as error:
            raise DeliveryFailed(_NO_THREAD, needs_attention=True) from error

    def _is_done(self, future: Future[None], limit: RunningTime, gives_way: Callable[[], bool] | None) -> bool:
        """Wait until *future* is done; return False when *limit* is over before, or the send *gives_way*."""
        stalled = 0.0
        undisturbed_until = limit.left_seconds - _UNDISTURBED_SECONDS
        while not future.done():
            wait_seconds = limit.next_wait() if gives_way is None else limit.next_wait(_LOOK_SECONDS)
            if wait_seconds <= 0:
                return False
            if gives_way is not None and limit.left_seconds <= undisturbed_until and gives_way():
                return False
            if limit.stalled_seconds > stalled:
                self._on_stall(limit.stalled_seconds - stalled)
                stalled = limit.stalled_seconds
            with suppress(FutureTimeoutError):
                future.exception(wait_seconds)
        return True

    def _reap_abandoned(self) -> None:
        """Wait a little until what was cut is closed; raise DeliveryFailed when too much of it stays."""
        until = time.monotonic() + min(_CLOSE_SECONDS, self._timeout_seconds * _CLOSE_SHARE)
        self._abandoned[-1].is_closed(until - time.monotonic())
        self._abandoned = [each for each in self._abandoned if not each.is_gone(0)]
        if any(not each.is_being_closed() for each in self._abandoned):
            raise DeliveryFailed(f"A send that was cut cannot be closed. {_NO_THREAD}", needs_attention=True)
        if len(self._abandoned) >= _MOST_ABANDONED:
            raise DeliveryFailed(
                f"{len(self._abandoned)} sends hang beyond their deadline and cannot be cut; "
                "nothing is sent until one of them ends. Restart the agent, and report this to the sink's author.",
                needs_attention=True,
                reason=RetryReason.HANGING,
            )

    def _abandon(self, current: _SinkThread) -> None:
        self._current = None
        self._abandoned.append(current)
        current.abandon()


class _SinkThread:
    """One sink instance on a thread of its own."""

    def __init__(self, build: Callable[[], Sink], attested: AttestedTokens | None, *, name: str) -> None:
        self._build = build
        self._attested = attested
        self._sink: Sink | None = None
        self._is_abandoned = False
        self._calls: SimpleQueue[tuple[_Call, Future[None]] | None] = SimpleQueue()
        self._closer: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, call: _Call) -> Future[None]:
        future: Future[None] = Future()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        """Close the sink from its own thread, once that is free."""
        self._calls.put(None)

    def abandon(self) -> None:
        """Begin to close the sink under its hanging call."""
        self._is_abandoned = True
        self._calls.put(None)
        self.is_being_closed()

    def is_being_closed(self) -> bool:
        """Return whether closing has begun, and begin it if it has not: there may have been no thread for it."""
        if self._closer is None:
            closer = threading.Thread(target=self._close, name=f"{self._thread.name}:close", daemon=True)
            with suppress(RuntimeError):
                closer.start()
                self._closer = closer
        return self._closer is not None

    def is_closed(self, timeout_seconds: float) -> bool:
        """Return whether `abandon` is done with closing, after *timeout_seconds* at most."""
        if not self.is_being_closed() or self._closer is None:
            return False
        self._closer.join(timeout_seconds)
        return not self._closer.is_alive()

    def is_gone(self, timeout_seconds: float) -> bool:
        """Return whether no thread of it is left, after *timeout_seconds* at most."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive() and (self._closer is None or not self._closer.is_alive())

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                self._serve(call)
            except BaseException as error:  # noqa: BLE001  # handed to the worker, which decides what it means
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, call, future  # an idle one keeps no batch in memory
        self._close()

    def _serve(self, call: _Call) -> None:
        if self._sink is None:
            self._sink = self._build()
            if self._attested is not None:
                self._sink.attest_by(self._attested)
        self.refuse_if_abandoned()
        call(self._sink, self)

    def refuse_if_abandoned(self) -> None:
        """Raise DeliveryFailed when this was cut: another instance may have sent its records since, and later ones."""
        if self._is_abandoned:
            raise DeliveryFailed(_CUT, reason=RetryReason.CUT)

    def _close(self) -> None:
        if self._sink is not None:
            try:
                self._sink.close()
            except BaseException as error:  # noqa: BLE001  # a sink that fails to close is gone all the same
                logger.info("Closing a sink failed.", extra={"sink": self._thread.name, "error": _describe(error)})


def _as_delivery_error(error: BaseException) -> DeliveryError:
    """Return *error* as one of the two that the worker understands."""
    if isinstance(error, DeliveryRejected | DeliveryFailed) and _is_whole(error):
        return error
    failed = DeliveryFailed(_describe(error), uncertain=True, reason=RetryReason.EXCEPTION)
    failed.__cause__ = error
    return failed


def _is_whole(error: DeliveryRejected | DeliveryFailed) -> bool:
    """Return whether *error* has what the worker reads: a sink may raise a subclass with a constructor of its own."""
    try:
        str(error)
        if isinstance(error, DeliveryRejected):
            return (
                isinstance(error.records, tuple) and isinstance(error.may_be_endpoint, bool) and _is_word(error.reason)
            )
        return (
            isinstance(error.retry_after, int | float | None)
            and isinstance(error.held, bool)
            and _is_word(error.reason)
        )
    except Exception:  # noqa: BLE001  # whatever a stranger's exception does when it is read
        return False


def _is_word(reason: object) -> bool:
    return isinstance(reason, str) and reason.isascii() and reason.isprintable()


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # likewise
        return type(error).__name__
