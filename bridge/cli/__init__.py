"""The command line of the agent. No other package prints or exits.

The module `commands` defines the options and the help of every command. The code of a command is in the module with the
name of the command. `main` is the entry point of the program `scheduled-events-bridge`.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command and exit."""
    if "run" in sys.argv[1:]:
        from bridge.cli.signals import exit_on_stop_while_importing  # noqa: PLC0415  # before the slow imports

        exit_on_stop_while_importing()
        gc.disable()  # until the agent runs, because collections take a tenth of the start and free nothing
    from bridge.cli import commands  # noqa: PLC0415  # a package imports nothing until it is used

    commands.main()
