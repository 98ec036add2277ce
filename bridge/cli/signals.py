"""Handles signals.

SIGTERM and SIGINT stop a command, and SIGHUP reloads the configuration of `run`.

On SIGHUP, the agent rereads its configuration and applies all new settings except `[state]`, `[status]`, and
`[serving]`, which need a restart. If the new configuration is invalid, the agent logs the errors and keeps the old
settings. See `bridge.cli.run`.

While a command runs, its signal handlers do nothing. Python writes each signal's number to a pipe, and a thread that
reads the pipe sets a `threading.Event`. A handler cannot set the event itself. If the handler interrupted `Event.wait`
on the main thread, it would wait forever for the event's lock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_SIGNALS = {number.name: number for number in signal.Signals}
#: A Windows console sends SIGBREAK for Ctrl-Break.
STOP_SIGNALS = tuple(_SIGNALS[name] for name in ("SIGTERM", "SIGINT", "SIGBREAK") if name in _SIGNALS)
_RELOAD = _SIGNALS.get("SIGHUP")

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

    def set_on(self, number: int, *events: threading.Event) -> None:
        """Set *events*, in this order, each time the signal *number* arrives."""
        self._events[number] = events
        signal.signal(number, lambda *_: None)

    def _set_each(self) -> None:
        while numbers := os.read(self._reader, _READ_BYTES):
            for number in dict.fromkeys(numbers):
                for event in self._events.get(number, ()):
                    event.set()


def set_by_signals() -> threading.Event:
    """Return an event that is set when a stop signal or SIGHUP arrives."""
    stop, signals = threading.Event(), SignalEvents()
    for number in (*STOP_SIGNALS, _RELOAD):
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signals.set_on(number, stop)
    return stop


class RunSignals:
    """Handles the signals of `run`.

    A stop signal that arrives before the call of `wake` ends the process immediately.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.reload_wanted = threading.Event()
        self._events = SignalEvents()
        if _RELOAD is not None:
            self._events.set_on(_RELOAD, self.reload_wanted)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: sys.exit(0))

    def wake(self, turn: threading.Event) -> None:
        """Also set *turn* when a signal arrives."""
        if _RELOAD is not None:
            self._events.set_on(_RELOAD, self.reload_wanted, turn)
        if self.reload_wanted.is_set():
            turn.set()
        for number in STOP_SIGNALS:
            self._events.set_on(number, self.stop, turn)

    @staticmethod
    def ignore() -> None:
        """Ignore signals. A second signal during the exit would look like a crash."""
        for number in (_RELOAD, *STOP_SIGNALS):
            if number is not None:
                signal.signal(number, signal.SIG_IGN)


def exit_on_stop_while_importing() -> None:
    """Exit with 0 on a stop signal, because service managers treat other codes as a failure."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))
    if _RELOAD is not None:
        signal.signal(_RELOAD, lambda *_: None)
