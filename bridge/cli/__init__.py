"""The command line: the commands, what they print, and the exit codes. Nothing else in `bridge` prints or exits.

Public: `main`, the entry point of the command `scheduled-events-bridge`. `commands` has every command's options; what a
command does stands in the module of its name.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command and exit; see `bridge.cli.commands`."""
    if "run" in sys.argv[1:]:
        from bridge.cli.signals import exit_on_stop_while_importing  # noqa: PLC0415  # before the slow imports

        exit_on_stop_while_importing()
        gc.disable()  # until the agent runs: collections take a tenth of the start and find nothing
    from bridge.cli import commands  # noqa: PLC0415  # a package imports nothing until it is used

    commands.main()
