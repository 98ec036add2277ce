"""Signals as events: which signals stop a command, and how one sets an event without ever blocking.

Python runs a handler in the main thread, between any two steps of what that thread does. When it is just inside
`threading.Event.wait`, it holds the event's lock, and a handler that calls `Event.set` waits for that lock for ever.
And when the system gives a signal to another thread, as it does with the second of two that come together, nothing
ends the main thread's wait, so that the handler runs when that is over. So no handler does anything here: the number of
the signal goes into a pipe the moment it comes (see `signal.set_wakeup_fd`), and a thread that reads it sets the event.
"""

from __future__ import annotations

import os
import signal
import threading

#: SIGBREAK is what Ctrl-Break sends on a Windows console.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name))

_MOST_AT_ONCE = 256


class SignalEvents:
    """Sets an event when its signal comes; made in the main thread, where alone handlers can be set."""

    def __init__(self) -> None:
        self._events: dict[int, tuple[threading.Event, ...]] = {}
        self._reader, writer = os.pipe()
        if os.name != "nt":
            os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # 64 KiB of numbers that nobody has read
        threading.Thread(target=self._set_each, name="signals", daemon=True).start()

    def set_on(self, number: int, *events: threading.Event) -> None:
        """Set *events*, in this order, each time the signal *number* comes."""
        self._events[number] = events
        signal.signal(number, lambda *_: None)

    def _set_each(self) -> None:
        while numbers := os.read(self._reader, _MOST_AT_ONCE):
            for number in dict.fromkeys(numbers):
                for event in self._events.get(number, ()):
                    event.set()
