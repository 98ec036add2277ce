"""The exit codes of all commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a command. The Unix header `sysexits.h` defines the codes 73 and 78."""

    OK = 0
    FAILED = 1
    """The command failed. Standard error contains the reason."""
    WRONG_USAGE = 2
    """The command line is invalid. The library click returns this code."""
    STATE_DIRECTORY = 73
    """`run` cannot create, open, or lock the state directory, or another agent holds the lock. Without
    `--allow-second-agent`, `run` also returns this code if the system service already runs an agent on this VM, or if
    the user cannot check this. On a full or read-only disk, `run` returns this code only if the state directory does
    not exist yet. If the directory exists, the agent starts and keeps its state in memory."""
    CONFIGURATION = 78
    """The configuration is invalid."""
    INTERRUPTED = 130
    """A signal interrupted a command other than `run`."""
