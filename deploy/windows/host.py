"""`scheduled-events-bridge run` in this process, stopped by another thread: what a service of Windows needs.

Windows sends a service no signals; the service manager calls a function on a thread of its own. So `run` keeps the
main thread, where its signal handlers must be, and `Host.stop` has Python act there as if SIGTERM had arrived
(`_thread.interrupt_main`, which is no system call and works on Windows). That way a service is the very same `run`,
with its order of stopping and its exit codes, and all of this is tested where there is no Windows.
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

#: At each start a longer file makes room; in a year an agent that has sinks writes a few MB.
LONGEST_LOG_BYTES = 10 * 1024 * 1024


class Host:
    """One run of the agent."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        """Set when the agent has ended."""
        self.exit_code = 0
        """As the README lists them, once it has."""
        self.is_stopping = False

    def run(self, *arguments: str) -> int:
        """Run the agent on the main thread until `stop`, and return its exit code."""
        # Before anything that takes time: a stop that comes before the agent listens for it must not be lost.
        signal.signal(signal.SIGTERM, _leave)
        sys.argv = ["scheduled-events-bridge", "run", *arguments]
        self.exit_code = 1
        try:
            if not self.is_stopping:
                from bridge.cli.commands import main  # noqa: PLC0415  # a second or two; the service manager is answered meanwhile

                main()
        except SystemExit as ended:
            self.exit_code = ended.code if isinstance(ended.code, int) else 0
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            logging.shutdown()  # whoever waits for the end may end the process at once
            self.finished.set()
        return self.exit_code

    def stop(self) -> None:
        """Ask the agent to stop; any thread may. Twice is fine."""
        self.is_stopping = True
        if not self.finished.is_set():
            _thread.interrupt_main(signal.SIGTERM)


def redirect_output(path: Path) -> None:
    """Let all that this process says go to the end of the file *path*; a long file is kept beside as .1.

    Through the descriptors, so that it holds for the stdout sink and for a crash of the interpreter too.
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
