"""Runs an event loop in a separate thread, with a deadline for every call.

The Event Hubs SDK can wait indefinitely, for example if a server accepts a connection but never sends any data. Each
connection therefore has its own event loop. If a call exceeds its deadline, the loop resets its connections, cancels
all tasks, and ends.

The loop resets connections instead of closing them. The kernel still sends the buffered data of a closed socket, so a
record could arrive after its send has failed. A linger time of 0 makes the kernel discard the data (socket(7),
SO_LINGER).
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
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from bridge.sink import run_daemon

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NO_LINGER = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
#: A task can ignore a cancellation, and an aborted transport closes its socket later.
_TURNS = 8
_TURN_SECONDS = 0.006
_LONGEST_GRACE_SECONDS = 1.0


class Overdue(Exception):
    """The call exceeded its deadline. Its connections were reset, so they send no more data."""


class Ended(Exception):
    """The event loop ended before or during the call."""


class LoopThread:
    """Runs one event loop in a separate thread. Call all methods except `end` from one thread."""

    def __init__(self, name: str, *, idle_seconds: float, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._idle_seconds = idle_seconds
        self._close = close
        self._lock = threading.Lock()
        self.has_ended = self._is_busy = False
        self._idle: asyncio.TimerHandle | None = None
        self._call: Future[Any] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._selector = selectors.DefaultSelector()
        self._loop = _Loop(self._selector)
        self._own_descriptors = set(self._selector.get_map())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Coroutine[Any, Any, _T]], *, seconds: float, end_seconds: float) -> _T:
        """Return the result of *work*. Raise Overdue at the deadline, or Ended if the loop ended.

        After the deadline, this method waits up to *end_seconds* for the loop to end.
        """
        with self._lock:
            if self.has_ended:
                raise Ended
            self._is_busy = True
            self._call = call = asyncio.run_coroutine_threadsafe(self._serve(work), self._loop)
        try:
            return call.result(seconds)
        except CancelledError:
            raise Ended from None
        except FutureTimeoutError:
            if call.done():  # *work* returned at the deadline, or raised a TimeoutError
                return call.result()
            self.end(grace_seconds=0.0, wait_seconds=end_seconds)
            raise Overdue from None

    def end(self, *, grace_seconds: float, wait_seconds: float) -> None:
        """Close the connection and end the loop.

        The connection has up to *grace_seconds* to close properly. This method waits up to *wait_seconds* for the
        thread to end.
        """
        with self._lock:
            if not self.has_ended:
                self.has_ended = True
                self._loop.call_soon_threadsafe(self._begin_end, grace_seconds)
        self._thread.join(wait_seconds)

    def is_connected(self) -> bool:
        """Return whether the connection is open. The loop stops reading if the server closes it."""
        return any(descriptor not in self._own_descriptors for descriptor in self._selector.get_map())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()
            if self._call is not None and not self._call.done():
                self._call.set_exception(Ended())

    async def _serve(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        if self._idle is not None:
            self._idle.cancel()
        try:
            return await work()
        finally:
            self._is_busy = False
            if not self.has_ended:
                self._idle = self._loop.call_later(self._idle_seconds, self._end_if_idle)

    def _end_if_idle(self) -> None:
        with self._lock:
            if self._is_busy or self.has_ended:
                return
            self.has_ended = True
        self._begin_end(self._idle_seconds)

    def _begin_end(self, grace_seconds: float) -> None:
        self._tasks.add(self._loop.create_task(self._end(grace_seconds)))

    async def _end(self, grace_seconds: float) -> None:
        if grace_seconds > 0:
            closing = self._loop.create_task(self._close())
            await asyncio.wait({closing}, timeout=min(grace_seconds, _LONGEST_GRACE_SECONDS))
        for _ in range(_TURNS):
            self._loop.reset_connections()
            tasks = asyncio.all_tasks(self._loop) - self._tasks
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_TURN_SECONDS)
            else:
                await asyncio.sleep(0)
        self._loop.stop()


class _Loop(asyncio.SelectorEventLoop):
    """An event loop with resettable connections and host name lookups in daemon threads.

    The loop does not use asyncio's default resolver, because the resolver's threads can keep the process running.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        # By default, asyncio logs an error for each reset connection.
        self.set_exception_handler(lambda _, context: logger.debug("%s", context.get("message")))

    def reset_connections(self) -> None:
        for transport in list(self._connections):
            with contextlib.suppress(Exception):  # a closed TLS transport has no socket
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            with contextlib.suppress(Exception):
                transport.abort()

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        transport, protocol = await super().create_connection(*args, **kwargs)
        self._connections.add(transport)
        return transport, protocol

    async def getaddrinfo(self, host: Any, port: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(run_daemon("eventhubs:resolver", socket.getaddrinfo, host, port, **kwargs))
