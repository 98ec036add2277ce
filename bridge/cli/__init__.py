"""The command line: what a person types, what is printed, and the exit codes.

Public: `main`, the entry point of the command `scheduled-events-bridge`.
"""

from __future__ import annotations


def main() -> None:
    """Run the command; see `bridge.cli.commands`."""
    from bridge.cli import commands  # noqa: PLC0415  # a package imports nothing until it is used

    commands.main()
