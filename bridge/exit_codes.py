"""The exit codes of all commands. The codes 73 and 78 come from the Unix header `sysexits.h`."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a command. `sysexits.h` defines the codes 73 and 78."""

    OK = 0
    FAILED = 1
    """The command failed. Standard error contains the reason."""
    WRONG_USAGE = 2
    """The command line is invalid. click returns this code."""
    STATE_DIRECTORY = 73
    """The agent cannot use its state directory. The directory cannot be created or locked, another agent holds the lock
    of the directory, or the service's agent already watches this VM.

    A full or read-only disk does not cause this code, because the agent then continues from memory."""
    CONFIGURATION = 78
    """78: The configuration is invalid."""
    INTERRUPTED = 130
    """A signal interrupted a command other than `run`."""
