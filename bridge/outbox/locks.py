"""Locks on the state directory, and the file ``nudge`` in it: how agents and commands know of each other.

- `DirectoryLock`: one agent a directory, since two would tell every record twice, in two orders. The lock is on the
  directory's own descriptor, because a lock file cannot be made on a disk that is read-only. Windows has no such lock;
  there it is on a file. The system releases it when the process dies, however it dies. A directory that is deleted,
  moved or replaced takes the lock along with it: `claim` locks what is at the path then.
- `is_locked`: whether an agent runs there. It asks for the shared lock and releases it at once, so that two commands
  that ask at the same time do not take each other for an agent.
- `notify_agent`: a command touches the file ``nudge`` after a write; the agent sees that within a second.
- `write_note`, `read_note`: what an agent leaves in that file for the next one; it says how it ended.
- `InMemoryFlag`: a lock that the agent has on that file while it works from memory. What a command wrote to the disk
  then would be lost, because the agent knows more. It is not on the database, whose locks are SQLite's own.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from bridge.errors import StateDirectoryError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = logging.getLogger(__name__)

NUDGE_FILE = "nudge"
#: While this file is in the state directory, nothing is approved.
DISABLED_FILE = "approvals.disabled"
#: The agent may be root, and what is in the directory another's: it follows no link there and waits for no pipe.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
#: `is_locked` has the lock for an instant.
_PATIENCE_SECONDS = 0.2
_NOTE_BYTES = 4096


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
    """The lock on *directory*, until `release`; raise StateDirectoryError when another agent has it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = str(_lock_path(directory))
        self._gate = threading.Lock()
        self._moved: list[int] = []
        """Directories that were moved away: no other agent may go on from what is in them while this one does."""
        give_up_at = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                self._descriptor: int | None = _lock_directory(directory)
            except OSError as error:
                if not _is_taken(error) or time.monotonic() >= give_up_at:
                    raise StateDirectoryError(_why(directory, error)) from error
                time.sleep(_PATIENCE_SECONDS / 10)
            else:
                return

    def claim(self) -> bool:
        """Lock what is at the path now, made if need be, where that is no longer the directory that was locked.

        Return whether it had to be locked again. From any thread. Raises StateDirectoryError when another agent has it,
        OSError when it cannot be had for now.
        """
        with self._gate:
            if self._descriptor is None or self._is_in_place(self._descriptor):
                return False
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                descriptor = _lock_directory(self._directory)
            except OSError as error:
                if not _is_taken(error):
                    raise
                kept = self._take_back()
                if kept is None:
                    raise StateDirectoryError(_why(self._directory, error)) from error
                descriptor = kept
            old, self._descriptor = self._descriptor, descriptor
            self._let_go_if_deleted(old)
        logger.error(
            "The state directory was deleted, moved or replaced under the agent. What is there now is locked again, "
            "and the outbox begins anew there with what the agent still has of it.",
            extra={"directory": str(self._directory)},
        )
        return True

    def release(self) -> None:
        """Release the lock; doing so twice is fine."""
        with self._gate:
            descriptors = [*self._moved, *([] if self._descriptor is None else [self._descriptor])]
            self._moved, self._descriptor = [], None
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)

    def _is_in_place(self, descriptor: int) -> bool:
        locked = os.fstat(descriptor)
        try:
            found = os.stat(self._path)  # noqa: PTH116  # each second, in an agent that has little else to do
        except FileNotFoundError:
            return False
        except OSError:  # it cannot be seen for now, which is no sign that it has gone
            return True
        return (found.st_dev, found.st_ino) == (locked.st_dev, locked.st_ino)

    def _take_back(self) -> int | None:
        """Return the lock on a directory that was moved away and is at the path again; None when there is none."""
        found = os.stat(self._path)  # noqa: PTH116
        for descriptor in self._moved:
            if os.path.samestat(os.fstat(descriptor), found):
                self._moved.remove(descriptor)
                return descriptor
        return None

    def _let_go_if_deleted(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_nlink:
            self._moved.append(descriptor)
        else:
            os.close(descriptor)


def is_locked(directory: Path) -> bool | None:
    """Return whether an agent has the lock on *directory*; None when that cannot be seen, for want of rights."""
    try:
        descriptor = _open_directory(directory)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        _lock(descriptor, shared=True)
    except OSError as error:
        # Windows has no BlockingIOError for a range that somebody else has locked.
        return True if isinstance(error, BlockingIOError) or sys.platform == "win32" else None
    finally:
        with suppress(OSError):
            os.close(descriptor)
    return False


def prepare_nudge(directory: Path) -> None:
    """Make the file ``nudge`` where it can be made."""
    with suppress(OSError):
        _make_nudge(directory)


def notify_agent(directory: Path) -> None:
    """Have a running agent look into its outbox."""
    with suppress(OSError):
        try:
            if os.utime in os.supports_follow_symlinks:
                os.utime(directory / NUDGE_FILE, follow_symlinks=False)
            else:
                os.utime(directory / NUDGE_FILE)
        except FileNotFoundError:
            _make_nudge(directory)


def read_note(directory: Path) -> str:
    """Return what is in the file ``nudge``; "" when that is nothing, or cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        descriptor = _open_note(directory, os.O_RDONLY)
        try:
            return os.read(descriptor, _NOTE_BYTES).decode()
        finally:
            os.close(descriptor)
    return ""


def write_note(directory: Path, text: str) -> None:
    """Write *text* into the file ``nudge``, for good, if the disk allows it."""
    with suppress(OSError):
        descriptor = _open_note(directory, os.O_RDWR)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_nudge(directory: Path) -> None:
    """Have the disk make a change of the file ``nudge`` durable; nothing where it says that it cannot."""
    with suppress(OSError):
        descriptor = _open_note(directory, os.O_RDWR)
        try:
            os.utime(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_note(directory: Path, flags: int) -> int:
    descriptor = os.open(directory / NUDGE_FILE, flags | _NO_LINK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:  # a hard link to another's is not written to
        os.close(descriptor)
        raise PermissionError(directory / NUDGE_FILE)
    return descriptor


def _make_nudge(directory: Path) -> None:
    """Make the file for the user whose directory it is: made by root for root alone, the agent could not lock it."""
    # O_EXCL: a file that is there already may be a hard link to another's, which root would give away.
    descriptor = os.open(directory / NUDGE_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NO_LINK, 0o600)
    try:
        owner = directory.stat()
        if sys.platform != "win32" and os.geteuid() == 0 and owner.st_uid != 0:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    finally:
        os.close(descriptor)


class InMemoryFlag:
    """Set while the agent in *directory* works from memory; on Windows it is never seen."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NUDGE_FILE
        self._descriptor: int | None = None

    def set(self) -> None:
        """Lock the file ``nudge`` if the disk allows it."""
        if self._descriptor is None:
            with suppress(OSError):
                self._descriptor = _lock_nudge(self._path, shared=False)

    def clear(self) -> None:
        """Release the lock; doing so twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_in_memory(directory: Path) -> bool:
    """Return whether an agent works from memory in *directory*, as far as can be seen."""
    try:
        os.close(_lock_nudge(directory / NUDGE_FILE, shared=True))
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _lock_path(directory: Path) -> Path:
    return directory / "lock" if sys.platform == "win32" else directory


def _open_directory(directory: Path, *, create: bool = False) -> int:
    if sys.platform == "win32":
        return os.open(_lock_path(directory), os.O_RDWR | (os.O_CREAT if create else 0))
    return os.open(_lock_path(directory), os.O_RDONLY)


def _lock_directory(directory: Path) -> int:
    return _locked(_open_directory(directory, create=True), shared=False)


def _lock_nudge(path: Path, *, shared: bool) -> int:
    descriptor = os.open(path, os.O_RDONLY | _NO_LINK)
    return descriptor if sys.platform == "win32" else _locked(descriptor, shared=shared)


def _locked(descriptor: int, *, shared: bool) -> int:
    """Return *descriptor* with the lock on it, or close it and raise."""
    try:
        _lock(descriptor, shared=shared)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, *, shared: bool) -> None:
    if sys.platform != "win32":
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    else:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        if shared:  # there is none on Windows: it is released at once
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)


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
