"""One send with a deadline that holds, whatever the sink's SDK does.

Some SDK calls hang for ever, also with a timeout of their own. So a sink lives on a thread of its own, and the worker
waits for it no longer than `timeout_seconds` and a little: the little is there so that a sink that keeps the deadline
itself can say what happened. A sink that does not is abandoned: it is closed on yet another thread, and a new instance
is built for the next try. Threads that never come back are counted; with too many of them the sink is left alone
until one ends, because a leak would take the healthy sinks down with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue

from bridge.errors import DeliveryFailed
from bridge.sink import Sink, TransitionRecord

logger = logging.getLogger(__name__)

#: The host's own deadline, as a multiple of the sink's; what is promised is 1.1.
GRACE = 1.04
_CLOSE_SECONDS = 1.0
_MOST_ABANDONED = 8

_Call = Callable[[Sink], None]


class Sender:
    """Calls one sink, built by *build* when it is first needed; raise whatever the sink raises."""

    def __init__(self, build: Callable[[], Sink], *, name: str, timeout_seconds: float) -> None:
        self._build = build
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._lane: _Lane | None = None
        self._abandoned: list[threading.Thread] = []

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send *batch*; raise DeliveryFailed when the deadline passes."""
        self._call(lambda sink: sink.send(batch))

    def check(self) -> None:
        """Try the destination; raise DeliveryFailed when the deadline passes."""
        self._call(lambda sink: sink.check())

    def close(self) -> None:
        """Close the sink, waiting a second at most."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def _call(self, call: _Call) -> None:
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= _MOST_ABANDONED:
            raise DeliveryFailed(
                f"{len(self._abandoned)} sends hang beyond their deadline and cannot be cut; "
                "nothing is sent until one of them ends. Restart the agent, and report this to the sink's author.",
                needs_attention=True,
            )
        if self._lane is None:
            self._lane = _Lane(self._build, name=f"sink:{self._name}")
        future = self._lane.call(call)
        try:
            future.result(self._timeout_seconds * GRACE)
        except FutureTimeoutError as error:
            if future.done():  # the sink's own TimeoutError, which is the same class from Python 3.11 on
                raise DeliveryFailed(f"{type(error).__name__}: {error}") from error
            self._abandon()
            raise DeliveryFailed(f"No answer within {self._timeout_seconds:g} s; the send was cut.") from error

    def _abandon(self) -> None:
        if self._lane is not None:
            self._abandoned.extend(self._lane.abandon())
            self._lane = None


class _Lane:
    """One sink instance on one thread."""

    def __init__(self, build: Callable[[], Sink], *, name: str) -> None:
        self._build = build
        self._sink: Sink | None = None
        self._calls: SimpleQueue[tuple[_Call, Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, call: _Call) -> Future[None]:
        future: Future[None] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Close the sink from its own thread if that is free, else from another."""
        self._calls.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self.abandon()

    def abandon(self) -> list[threading.Thread]:
        """Close the sink under its hanging call; return the threads that did not end within a second."""
        self._calls.put(None)
        closer = threading.Thread(target=self._close, name=f"{self._thread.name}:close", daemon=True)
        closer.start()
        closer.join(_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS / 10)
        return [thread for thread in (self._thread, closer) if thread.is_alive()]

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                if self._sink is None:
                    self._sink = self._build()
                call(self._sink)
            except BaseException as error:  # noqa: BLE001  # handed to the worker, who tells what it means
                future.set_exception(error)
            else:
                future.set_result(None)
        self._close()

    def _close(self) -> None:
        if self._sink is not None:
            try:
                self._sink.close()
            except Exception as error:  # noqa: BLE001  # a sink that fails to close is gone all the same
                logger.info("Closing a sink failed.", extra={"sink": self._thread.name, "error": repr(error)})
