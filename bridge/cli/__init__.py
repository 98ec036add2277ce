"""Implements the command line of the agent. No other package prints messages or ends the process.

The module `commands` defines the options and the help of every command. The module with the name of a command
implements the command. `main` is the entry point of the program `scheduled-events-bridge`.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command and exit."""
    if "run" in sys.argv[1:]:
        from bridge.cli.signals import exit_on_stop_while_importing  # noqa: PLC0415  # before the slow imports

        exit_on_stop_while_importing()
        gc.disable()  # collections take a tenth of the startup time and free nothing
    from bridge.cli import commands  # noqa: PLC0415  # a package imports nothing until it is used

    commands.main()
