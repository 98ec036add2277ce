"""Handles signals.

SIGTERM and SIGINT stop a command, and SIGHUP reloads the configuration of `run`.

While a command runs, its signal handlers do nothing. Instead, Python writes the number of each signal to a pipe, and a
thread that reads the pipe sets a `threading.Event`. A handler must not set the event itself. If it interrupted
`Event.wait` on the main thread, it would wait forever for a lock that the main thread holds.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable

_SIGNALS = {number.name: number for number in signal.Signals}
#: A Windows console sends SIGBREAK for Ctrl-Break.
STOP_SIGNALS = tuple(_SIGNALS[name] for name in ("SIGTERM", "SIGINT", "SIGBREAK") if name in _SIGNALS)
RELOAD_SIGNALS = tuple(_SIGNALS[name] for name in ("SIGHUP",) if name in _SIGNALS)

_READ_BYTES = 256


class SignalEvents:
    """Sets `threading.Event` objects when signals arrive. Create it on the main thread."""

    def __init__(self) -> None:
        self._events: dict[int, tuple[threading.Event, ...]] = {}
        self._reader, writer = os.pipe()
        if os.name != "nt":
            os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._set_each, name="signals", daemon=True).start()

    def set_on(self, numbers: Iterable[int], *events: threading.Event) -> None:
        """Set *events*, in the given order, whenever a signal with one of the *numbers* arrives."""
        for number in numbers:
            self._events[number] = events
            signal.signal(number, lambda *_: None)

    def _set_each(self) -> None:
        while numbers := os.read(self._reader, _READ_BYTES):
            for number in dict.fromkeys(numbers):
                for event in self._events.get(number, ()):
                    event.set()


def set_by_signals() -> threading.Event:
    """Return an event that is set when a stop signal or SIGHUP arrives."""
    stop = threading.Event()
    numbers = (*STOP_SIGNALS, *RELOAD_SIGNALS)
    SignalEvents().set_on([each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN], stop)
    return stop


def exit_on_stop_signal() -> None:
    """Exit with 0 on a stop signal, and ignore SIGHUP."""
    for number in STOP_SIGNALS:  # service managers treat other exit codes as a failure
        signal.signal(number, lambda *_: os._exit(0))
    for number in RELOAD_SIGNALS:
        signal.signal(number, lambda *_: None)


def ignore_signals() -> None:
    """Ignore signals. A second signal during the exit would look like a crash."""
    for number in (*STOP_SIGNALS, *RELOAD_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
