"""Implements the agent's command line.

Only this package prints the results of commands and exits the process.

The `commands` module defines the options and help text of every command. Each command is implemented in the module of
the same name. `main` is the entry point of `scheduled-events-bridge`.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command and exit."""
    if "run" in sys.argv[1:]:
        from bridge.cli.signals import exit_on_stop_signal  # noqa: PLC0415  # before the slow imports

        exit_on_stop_signal()
        gc.disable()  # collections take a tenth of the startup time and free nothing
    from bridge.cli import commands  # noqa: PLC0415  # a package imports nothing until it is used

    commands.main()
