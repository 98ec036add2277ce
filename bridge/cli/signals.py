"""The signals of the commands: which signals stop a command, and how `run` receives SIGHUP.

SIGTERM and SIGINT stop a command. On SIGHUP, `run` reads the configuration again and applies it while it runs
(`bridge.cli.run.reload_configuration`). An invalid configuration is logged and changes nothing.

A Python signal handler runs on the main thread between two steps of this thread. If the main thread is inside
`threading.Event.wait`, it holds the lock of the event, and a handler that calls `Event.set` waits for the lock forever.
If the system delivers a signal to another thread, the wait of the main thread does not end, and the handler runs only
after the wait. Therefore handlers do nothing: `signal.set_wakeup_fd` writes the signal number into a pipe, and a thread
that reads the pipe sets the events.
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
    """Sets events when signals arrive. Create it on the main thread, because only this thread can set handlers."""

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
    """Return an event that a stop signal or the end of the terminal sets. Signals that are ignored stay ignored."""
    stop, signals = threading.Event(), SignalEvents()
    for number in (*STOP_SIGNALS, _RELOAD):
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signals.set_on(number, stop)
    return stop


class RunSignals:
    """The signals of `run`: a stop signal sets *stop*, and SIGHUP sets *reload_wanted*.

    Until `wake`, a stop signal exits with 0 at once: opening the outbox can wait for a lock, and nothing runs yet.
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
        """Set *turn* as well when a signal arrives, and also if a reload is already wanted."""
        if _RELOAD is not None:
            self._events.set_on(_RELOAD, self.reload_wanted, turn)
        if self.reload_wanted.is_set():
            turn.set()
        for number in STOP_SIGNALS:
            self._events.set_on(number, self.stop, turn)

    @staticmethod
    def ignore() -> None:
        """Ignore all signals of `run`: during the interpreter's exit, a second signal would look like a crash."""
        for number in (_RELOAD, *STOP_SIGNALS):
            if number is not None:
                signal.signal(number, signal.SIG_IGN)


def exit_on_stop_while_importing() -> None:
    """Exit with 0 on a stop signal while modules are imported, and ignore SIGHUP.

    A service manager reports any other exit of a service that it stops as a failure.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))
    if _RELOAD is not None:
        signal.signal(_RELOAD, lambda *_: None)
