"""Signals as events: which signals stop a command, and how one sets an event without ever blocking.

A handler runs in the main thread, between any two steps of what that thread does. When it is just inside
`threading.Event.wait`, it holds the event's lock, and a handler that calls `Event.set` waits for that lock for ever:
the agent would not stop. So a handler only puts the event into a queue, whose `put` may interrupt anything (see the
documentation of `queue.SimpleQueue`), and a thread sets it.
"""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue

#: SIGBREAK is what Ctrl-Break sends on a Windows console.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name))


class SignalEvents:
    """Sets an event when its signal comes; made in the main thread, where alone handlers can be set."""

    def __init__(self) -> None:
        self._came: SimpleQueue[tuple[threading.Event, ...]] = SimpleQueue()
        threading.Thread(target=self._set_each, name="signals", daemon=True).start()

    def set_on(self, number: int, *events: threading.Event) -> None:
        """Set *events*, in this order, each time the signal *number* comes."""
        signal.signal(number, lambda *_: self._came.put(events))

    def _set_each(self) -> None:
        while True:
            for event in self._came.get():
                event.set()
