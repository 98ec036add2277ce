"""The file ``nudge`` in the state directory: how the agent and a command beside it hear of each other.

A command touches it after a write, and the agent, which looks at its time once a second, looks into the outbox. While
the agent works from memory it holds a lock on it, because what a command wrote to the disk then would be a lie: the
agent knows more. The lock is not on the database, whose locks are SQLite's own.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

NUDGE_FILE = "nudge"


def prepare_nudge(directory: Path) -> None:
    """Make the file where it can be made."""
    with suppress(OSError):
        os.close(os.open(directory / NUDGE_FILE, os.O_CREAT | os.O_WRONLY, 0o600))


def touch_nudge(directory: Path) -> None:
    """Have a running agent look into its outbox."""
    with suppress(OSError):
        (directory / NUDGE_FILE).touch(mode=0o600)


class MemoryMark:
    """Held while the agent in *directory* works from memory; on Windows nothing can be held."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NUDGE_FILE
        self._descriptor: int | None = None

    def set(self) -> None:
        """Hold the mark if the disk allows it."""
        if self._descriptor is None:
            with suppress(OSError):
                self._descriptor = _locked(self._path, shared=False)

    def release(self) -> None:
        """Let the mark go; doing so twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_marked(directory: Path) -> bool:
    """Return whether an agent works from memory in *directory*, as far as can be seen."""
    try:
        os.close(_locked(directory / NUDGE_FILE, shared=True))
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _locked(path: Path, *, shared: bool) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
