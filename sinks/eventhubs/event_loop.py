"""An event loop on a thread of its own, whose calls end at their deadline whatever they wait for.

The Event Hubs SDK waits for ever in several places (a peer that accepts and stays silent, an outcome it does not know,
a missing acknowledgement), and cancelling it is not always enough. So a call gets a loop that is good for one
connection, and at the deadline the loop is cut: every socket is reset, every task cancelled, the thread ends, and only
then the call raises. The next call begins with a new loop.

Reset, not closed: a socket that is shut down still sends what the kernel holds, and a record would arrive whose send
had failed. With a linger time of 0 the kernel throws that away (socket(7), SO_LINGER).

Sockets are found in the loop's selector, because one that is still connecting has no transport yet; transports are
noted when they are made, because one that has stopped reading is in no selector.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import selectors
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from bridge.sink import run_daemon

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NO_LINGER = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
#: What cutting may take: some turns of the loop.
_CUT_SECONDS = 0.05
_TURNS = 8
#: How long the loop goes on after that, so that every call that waited still gets its error.
_LAST_SECONDS = 0.005
#: How long a call waits for a loop that does not turn (a slow import blocks it), as a multiple of its deadline.
_PATIENCE = 1.1


class Overdue(Exception):
    """The call was cut at its deadline; nothing of it reaches the peer any more."""


class Ended(Exception):
    """The loop has ended, or was ended under the call."""


class LoopThread:
    """One loop on its own thread, from its first call until it is idle, ended or cut."""

    def __init__(self, name: str, *, idle_seconds: float, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._idle_seconds = idle_seconds
        self._close = close
        self._lock = threading.Lock()
        self._calls = 0
        self._has_ended = False
        self._idle: asyncio.TimerHandle | None = None
        self._selector = selectors.DefaultSelector()
        self._loop = _Loop(self._selector)
        self._own_descriptors = set(self._selector.get_map())
        self._cutting: asyncio.Task[None] | None = None
        self._own_tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Return whether it takes no more calls."""
        return self._has_ended

    def call(self, work: Callable[[], Coroutine[Any, Any, _T]], *, seconds: float) -> _T:
        """Return what *work* returns; raise Overdue at the deadline, Ended when the loop is over."""
        outcome: Future[_T] = Future()
        with self._lock:
            if self._has_ended:
                raise Ended
            self._calls += 1
            self._begin(lambda: self._serve(work, seconds, outcome))
        try:
            return outcome.result(seconds * _PATIENCE)
        except FutureTimeoutError:
            if outcome.done():
                raise  # the work's own TimeoutError, on Pythons where the two are one
            self._abandon()
            raise Overdue from None

    def end(self, *, grace_seconds: float, wait_seconds: float) -> None:
        """Close what is open, for *grace_seconds* at most, and end; wait for that *wait_seconds* at most."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self._begin(lambda: self._end(grace_seconds))
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_seconds)

    def is_connected(self) -> bool:
        """Return whether a socket still listens to its peer: one that the peer has closed is out of the selector.

        For the loop's own thread.
        """
        return any(descriptor not in self._own_descriptors for descriptor in self._selector.get_map())

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop.call_soon_threadsafe(lambda: self._start_task(work()))

    # On the loop's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with self._lock:
                self._has_ended = True
            asyncio.set_event_loop(None)
            self._loop.close()

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._own_tasks.add(task)
        task.add_done_callback(self._own_tasks.discard)

    async def _serve(self, work: Callable[[], Coroutine[Any, Any, _T]], seconds: float, outcome: Future[_T]) -> None:
        if self._idle is not None:
            self._idle.cancel()
        task = self._loop.create_task(work())
        await asyncio.wait({task}, timeout=seconds)
        is_overdue = not task.done()
        if is_overdue:
            await self._cut()
        with self._lock:
            self._calls -= 1
        if is_overdue:
            outcome.set_exception(Overdue())
        elif task.cancelled():
            outcome.set_exception(Ended())
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())
        self._idle = self._loop.call_later(self._idle_seconds, self._end_if_idle)

    def _end_if_idle(self) -> None:
        with self._lock:
            if self._calls or self._has_ended:
                return
            self._has_ended = True
        self._start_task(self._end(self._idle_seconds))

    async def _end(self, grace_seconds: float) -> None:
        if grace_seconds > 0:
            task = self._loop.create_task(self._close())
            await asyncio.wait({task}, timeout=min(grace_seconds, 1.0))
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                logger.debug("Closing an idle connection failed.", extra={"error": type(error).__name__})
        await self._cut()

    async def _cut(self) -> None:
        """Reset every socket, cancel every task, and stop the loop; a second call waits for the first."""
        if self._cutting is None:
            self._cutting = self._loop.create_task(self._cut_once())
            self._own_tasks.add(self._cutting)
        await asyncio.wait({self._cutting})

    async def _cut_once(self) -> None:
        with self._lock:
            self._has_ended = True
        try:
            self._reset_sockets()
            for _ in range(_TURNS):  # a task may swallow a cancellation; a transport closes its socket a turn later
                tasks = asyncio.all_tasks(self._loop) - self._own_tasks
                for task in tasks:
                    task.cancel()
                if tasks:
                    await asyncio.wait(tasks, timeout=_CUT_SECONDS / _TURNS)
                else:
                    await asyncio.sleep(0)
                _reset(self._selector.get_map() or {}, self._own_descriptors, shut_down=True)
        finally:
            self._loop.call_later(_LAST_SECONDS, self._loop.stop)

    def _reset_sockets(self) -> None:
        _reset(self._selector.get_map() or {}, self._own_descriptors, shut_down=False)
        for transport in list(self._loop.transports):
            # One that is closed already may raise anything: a TLS transport then has no socket any more.
            with contextlib.suppress(Exception):
                raw = transport.get_extra_info("socket")
                if raw is not None and raw.fileno() >= 0:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            with contextlib.suppress(Exception):
                transport.abort()

    def _abandon(self) -> None:
        """Cut a loop that does not turn, from the caller's thread; it ends by itself when it turns again."""
        with self._lock:
            self._has_ended = True
        with contextlib.suppress(RuntimeError):  # it turns again, or is closed
            _reset(dict(self._selector.get_map() or {}), self._own_descriptors, shut_down=True)
        with contextlib.suppress(RuntimeError):
            self._begin(self._cut)


class _Loop(asyncio.SelectorEventLoop):
    """A selector loop that notes its transports, and looks names up on daemon threads."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self.transports: weakref.WeakSet[Any] = weakref.WeakSet()
        self.set_exception_handler(_on_exception)

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        transport, protocol = await super().create_connection(*args, **kwargs)
        self.transports.add(transport)
        return transport, protocol

    async def getaddrinfo(self, host: Any, port: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(run_daemon("eventhubs:resolver", socket.getaddrinfo, host, port, **kwargs))


def _on_exception(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Log at DEBUG what asyncio would log as an error: after a reset there is always something."""
    del loop
    error = context.get("exception")
    logger.debug("%s", context.get("message"), extra={"error": type(error).__name__ if error else None})


def _reset(keys: Mapping[Any, Any], own: set[Any], *, shut_down: bool) -> None:
    for descriptor in [each for each in keys if each not in own]:
        with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as second:
            second.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            if shut_down:
                second.shutdown(socket.SHUT_RDWR)
