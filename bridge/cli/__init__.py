"""The command line: the commands, what they print, and the exit codes. Nothing else in `bridge` prints or exits.

Public: `main`, the entry point of the command `scheduled-events-bridge`. `commands` has every command's options; what a
command does stands in the module of its name.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command and exit; see `bridge.cli.commands`."""
    if "run" in sys.argv[1:]:
        _stop_while_starting()
    from bridge.cli import commands  # noqa: PLC0415  # a package imports nothing until it is used

    commands.main()


def _stop_while_starting() -> None:
    """Have a stop that comes while the agent is being imported end with 0; a reload has nothing to do yet.

    A service manager takes any other end of a service that it stopped for a failure.
    """
    for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: os._exit(0))
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: None)
