"""Locks the state directory, so that only one agent uses it.

Two agents with the same state directory would send every record twice and overwrite each other's files. The operating
system releases the lock when the agent process ends.

On Linux, the agent locks the directory itself, because it cannot create a lock file on a read-only disk. On Windows,
the agent locks the file ``lock`` in the directory.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bridge.errors import StateDirectoryError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1


class _Taken(StateDirectoryError):
    """Another agent holds the lock of the directory."""


class DirectoryLock:
    """Locks *directory* until `release` is called. Creates a missing directory with mode 0700.

    The directory can be read-only. If another agent holds the lock, the constructor retries for *wait_seconds*, or
    until *give_up* returns True, and then raises StateDirectoryError (exit code 73).
    """

    def __init__(
        self, directory: Path, *, wait_seconds: float = 0.2, give_up: Callable[[], bool] = lambda: False
    ) -> None:
        self._directory = directory
        self._gate = threading.Lock()
        self._descriptor: int | None = None
        give_up_at = time.monotonic() + wait_seconds
        while self._descriptor is None:
            try:
                self._descriptor = _open_locked(directory, shared=False)
            except _Taken:
                if time.monotonic() >= give_up_at or give_up():
                    raise
                time.sleep(_RETRY_SECONDS)
            except OSError as error:
                raise StateDirectoryError(
                    f"The state directory {directory} cannot be created, opened, or locked: {error.strerror or error}. "
                    "Give the agent's user access to it (for the service, also add it to ReadWritePaths=), or set "
                    "another directory in the [state] table."
                ) from error

    def claim(self) -> bool:
        """If the directory was deleted, moved, or replaced, lock its replacement and return True.

        Any thread can call this method. Raises StateDirectoryError if another agent has locked the new directory, and
        OSError if the new directory cannot be locked.
        """
        with self._gate:
            if self._descriptor is None or self._is_in_place(self._descriptor):
                return False
            old, self._descriptor = self._descriptor, _open_locked(self._directory, shared=False)
            os.close(old)
        logger.error(
            "The state directory was deleted, moved, or replaced. The agent locked the new directory and writes its "
            "state there.",
            extra={"directory": str(self._directory)},
        )
        return True

    def release(self) -> None:
        """Release the lock."""
        with self._gate:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _is_in_place(self, descriptor: int) -> bool:
        if sys.platform == "win32":
            return True  # Windows cannot delete or move a directory that contains an open file
        try:
            return os.path.samestat(os.fstat(descriptor), self._directory.stat())
        except FileNotFoundError:
            return False
        except OSError:  # an unreadable path is not a replaced directory
            return True


def is_locked(directory: Path) -> bool | None:
    """Return whether an agent has locked *directory*, or None if this user cannot check."""
    try:
        os.close(_open_locked(directory, shared=True))
    except _Taken:
        return True
    except OSError as error:
        return False if isinstance(error, FileNotFoundError) else None
    return False


def _open_locked(directory: Path, *, shared: bool) -> int:
    if not shared:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if sys.platform == "win32":
        descriptor = os.open(directory / "lock", os.O_RDWR | (0 if shared else os.O_CREAT))
    else:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        else:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        os.close(descriptor)
        # Windows reports a taken lock as EACCES or EDEADLOCK.
        is_taken = sys.platform == "win32" and error.errno in (errno.EACCES, errno.EDEADLK)
        if not (is_taken or isinstance(error, BlockingIOError)):
            raise
        raise _Taken(
            f"Another agent runs on the state directory {directory}. "
            "Stop the other agent, or set another directory in the [state] table."
        ) from error
    return descriptor
