"""The exit codes of all commands, and the conditions for each code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a command. `sysexits.h` defines the codes 73 and 78."""

    OK = 0
    FAILED = 1
    WRONG_USAGE = 2
    """2: The command line is invalid. The click library uses the same code."""
    STATE_DIRECTORY = 73
    """73: The state directory cannot be created, or another `run` has locked the directory. The code is also used if
    the service on this machine already watches the same VM. A full or read-only disk does not cause this code, because
    the agent continues from memory."""
    CONFIGURATION = 78
    """78: The configuration is invalid."""
    INTERRUPTED = 130
