"""The exit codes of all commands, and the conditions for each code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a command. The codes 73 and 78 come from `sysexits.h`."""

    OK = 0
    FAILED = 1
    WRONG_USAGE = 2
    """The command line is invalid. click uses this code."""
    STATE_DIRECTORY = 73
    """The state directory cannot be created, or another `run` holds it, at the start or after the directory was
    replaced, or the service on this machine already watches the same VM. A full or read-only disk is no reason."""
    CONFIGURATION = 78
    """The configuration is invalid."""
    INTERRUPTED = 130
