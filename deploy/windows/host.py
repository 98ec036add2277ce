"""Runs the agent for a Windows service, which can stop the agent from another thread.

Windows does not send signals to services. Instead, the Windows service manager calls a function on a separate thread.
This function calls `Host.stop`, which simulates SIGTERM on the main thread with `_thread.interrupt_main`. The agent
therefore runs and stops the same way on Windows and Linux.
"""
# ruff: noqa: INP001  # part of a program, not of a package

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
from pathlib import Path

#: A longer log file is renamed at startup. An agent with sinks writes a few MB in a year.
LONGEST_LOG_BYTES = 10 * 1024 * 1024


class Host:
    """One run of the agent."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        """Set when the agent has stopped."""
        self.exit_code = 0
        """The agent's exit code. It is valid after `finished` is set."""
        self.is_stopping = False

    def run(self, *arguments: str) -> int:
        """Run the agent on the main thread until `stop` is called. Return the exit code."""
        # Set the handler first, so that a stop request during the imports is not lost.
        signal.signal(signal.SIGTERM, _leave)
        sys.argv = ["scheduled-events-bridge", "run", *arguments]
        self.exit_code = 1
        try:
            if not self.is_stopping:
                from bridge.cli.commands import main  # noqa: PLC0415  # takes up to 2 s

                main()
        except SystemExit as ended:
            self.exit_code = ended.code if isinstance(ended.code, int) else 0
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            logging.shutdown()  # the process can end immediately after `finished` is set
            self.finished.set()
        return self.exit_code

    def stop(self) -> None:
        """Stop the agent. This method is thread-safe and idempotent."""
        self.is_stopping = True
        if not self.finished.is_set():
            _thread.interrupt_main(signal.SIGTERM)


def redirect_output(path: Path) -> None:
    """Append standard output and standard error to *path*.

    If the file is too large, first rename it to *path*.1.

    The file replaces the descriptors 1 and 2 of the process, so it also receives the messages of a crash of the
    interpreter.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LONGEST_LOG_BYTES:
        path.replace(path.with_name(f"{path.name}.1"))
    with path.open("ab", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _leave(*_: object) -> None:
    sys.exit(0)
