"""One agent a state directory: two would tell every record twice, in two orders.

The lock is on the directory's own descriptor, because a lock file cannot be made on a disk that is read-only. Windows
has no such lock; there it is on a file.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from bridge.errors import StateDirectoryError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


def prepare_directory(path: Path) -> None:
    """Make *path*, for its owner alone, where it does not exist; one that exists may be read-only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StateDirectoryError(
            f"The state directory {path} cannot be made: {error.strerror or error}. "
            "Make it, or set directory in the [state] table."
        ) from error


class DirectoryLock:
    """Holds *directory* until `release`; raise StateDirectoryError when another agent has it."""

    def __init__(self, directory: Path) -> None:
        try:
            self._descriptor = self._locked(directory)
        except OSError as error:
            raise StateDirectoryError(
                f"The state directory {directory} cannot be locked: {error.strerror or error}. "
                "Most likely another agent runs on it; stop that one, or give this one a directory of its own."
            ) from error

    def release(self) -> None:
        """Let the directory go; doing so twice is fine."""
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def _locked(self, directory: Path) -> int:
        if sys.platform == "win32":
            descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT)
        else:
            descriptor = os.open(directory, os.O_RDONLY)
        try:
            if sys.platform == "win32":
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
