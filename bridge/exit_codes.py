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
    """`run` cannot create, open, or lock the state directory, or another agent holds the lock. Unless you use
    `--allow-second-agent`, `run` also returns this code if the system service already runs an agent on this VM.
    If the disk is full or read-only and the state directory is missing, `run` returns this code, because it cannot
    create the directory. If the directory exists, the agent starts on such a disk and keeps its state in memory."""
    CONFIGURATION = 78
    """The configuration is invalid."""
    INTERRUPTED = 130
    """A signal interrupted a command other than `run`."""
