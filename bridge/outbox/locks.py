"""One agent a state directory: two would tell every record twice, in two orders.

The lock is on the directory's own descriptor, because a lock file cannot be made on a disk that is read-only. Windows
has no such lock; there it is on a file.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from bridge.errors import StateDirectoryError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

#: `status` holds the directory for an instant, to see whether an agent does.
_PATIENCE_SECONDS = 0.2


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
    """Holds *directory* until `release`; raise StateDirectoryError when another agent has it.

    The system lets go of it when the process dies, however it dies.
    """

    def __init__(self, directory: Path) -> None:
        give_up_at = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                self._descriptor: int | None = _locked(directory)
            except OSError as error:
                if not _is_taken(error) or time.monotonic() >= give_up_at:
                    raise StateDirectoryError(_why(directory, error)) from error
                time.sleep(_PATIENCE_SECONDS / 10)
            else:
                return

    def release(self) -> None:
        """Let the directory go; doing so twice is fine."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


def _locked(directory: Path) -> int:
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


def _is_taken(error: OSError) -> bool:
    # LockFileEx on Windows says EACCES or EDEADLOCK, which a missing right says too.
    return isinstance(error, BlockingIOError) or (
        sys.platform == "win32" and error.errno in (errno.EACCES, errno.EDEADLK)
    )


def _why(directory: Path, error: OSError) -> str:
    if _is_taken(error):
        return (
            f"Another agent runs on the state directory {directory}. "
            "Stop that one, or give this one a directory of its own: directory in the [state] table."
        )
    return (
        f"The state directory {directory} cannot be opened and locked: {error.strerror or error}. "
        "Let the agent's user read it, or set directory in the [state] table."
    )
