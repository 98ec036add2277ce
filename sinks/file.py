"""The sink `file`: each record as one line at the end of a file, which is rotated by its size.

For a collector that reads files, and for whoever wants the records on the VM itself. Returning means that the lines are
on the disk: the file is synced after each batch. It is opened for each send, since events are rare: so it may be moved
or rotated by others too (max_bytes = 0), and nothing has to tell the agent.

Several tables, or `send-test` beside the agent, may write to one file: it is locked (flock) while it is written and
rotated. Half a line, which a kill or a full disk leaves, is taken back or ended before the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from bridge.sink import DeliveryFailed, RetryReason, Sink, SinkConfig, TransitionRecord
from sinks.blocking import BlockingCalls
from sinks.sentence import line_of

if sys.platform != "win32":
    import fcntl

_MODE = 0o640
#: Not blocking: to open a pipe that nobody reads would hang. Binary: Windows would write two characters a line break.
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_RETRY_SECONDS = 0.02
#: The share of the deadline after which a lock is not waited for any more.
_LOCK_SHARE = 0.9


class FileConfig(SinkConfig, frozen=True, kw_only=True):
    """The keys of a ``[[sinks]]`` table of type file."""

    path: str
    """The file, with its whole path; its directory must be there."""
    format: Literal["json", "text"] = "json"
    """json: one record a line, as the schema says. text: one line a person can read."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0)] = 10 * 1024 * 1024
    """Rotate the file before it would be larger: it becomes PATH.1, that one PATH.2 and so on. 0: never."""
    keep: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 5
    """How many rotated files are kept."""

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute() or self.path.endswith(("/", os.sep)):
            raise ValueError(f"path is {self.path!r}. Write the whole path of a file: a service is started elsewhere.")
        if "\0" in self.path:
            raise ValueError("path has a character that no path may have.")


class FileSink(Sink):
    """Appends each record to a file as one line."""

    Config: ClassVar[type[SinkConfig]] = FileConfig

    def __init__(self, config: FileConfig) -> None:
        super().__init__(config)
        self._line = line_of(config.format)
        self._calls = BlockingCalls(f"file:{config.name}", target=config.path)
        self._stop = threading.Event()

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Append *batch*; raise DeliveryFailed when the file cannot be written, or is not written in time."""
        lines = b"".join(map(self._line, batch))
        limit = self.config.timeout_seconds
        give_up_at = time.monotonic() + limit * _LOCK_SHARE
        self._calls.run(partial(self._append, lines, give_up_at), timeout_seconds=limit)

    def check(self) -> None:
        """Raise DeliveryFailed when the file could not be written; it is not made, and nothing is written."""
        self._calls.run(self._look, timeout_seconds=self.config.timeout_seconds)

    def close(self) -> None:
        """End a send in another thread."""
        self._stop.set()
        self._calls.close()

    def _append(self, lines: bytes, give_up_at: float) -> None:
        try:
            descriptor = self._locked(give_up_at)
            try:
                if self._is_full(descriptor, len(lines)) and self._rotate():
                    os.close(descriptor)
                    descriptor = self._locked(give_up_at)
                _write(descriptor, lines)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._failure(error) from error

    def _look(self) -> None:
        path = Path(self.config.path)
        try:
            if path.exists():
                os.close(self._opened(create=False))
            elif not os.access(path.parent, os.W_OK | os.X_OK):
                path.parent.stat()  # raises what is wrong, if it is not there
                raise PermissionError(0, f"its directory {path.parent} may not be written")
        except OSError as error:
            raise self._failure(error) from error

    def _locked(self, give_up_at: float) -> int:
        """Return a descriptor of the file as it is now, locked; raise DeliveryFailed when others hold it too long."""
        while True:
            descriptor = self._opened(create=True)
            try:
                if _lock(descriptor) and self._is_current(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if time.monotonic() >= give_up_at or self._stop.wait(_RETRY_SECONDS):
                raise DeliveryFailed(f"{self.config.path} is locked by another process.", reason=RetryReason.TIMEOUT)

    def _opened(self, *, create: bool) -> int:
        is_new = create and not Path(self.config.path).exists()
        descriptor = os.open(self.config.path, _FLAGS | (os.O_CREAT if create else 0), _MODE)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(0, "it is no plain file")
        if is_new:
            self._sync_directory()
        return descriptor

    def _is_current(self, descriptor: int) -> bool:
        """Return whether the path still leads to *descriptor*: it may have been rotated while it was waited for."""
        try:
            return os.path.samestat(Path(self.config.path).stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _is_full(self, descriptor: int, more_bytes: int) -> bool:
        size = os.fstat(descriptor).st_size
        return size > 0 and 0 < self.config.max_bytes < size + more_bytes

    def _rotate(self) -> bool:
        """Move the files along; return whether the first has moved: on Windows a reader may hold it."""
        path = self.config.path
        with contextlib.suppress(OSError):
            for number in range(self.config.keep - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{path}.{number}").replace(f"{path}.{number + 1}")
            Path(path).replace(f"{path}.1")
            self._sync_directory()
            return True
        return False

    def _sync_directory(self) -> None:
        if sys.platform != "win32":
            directory = os.open(Path(self.config.path).parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _failure(self, error: OSError) -> DeliveryFailed:
        reason = error.strerror or str(error)
        return DeliveryFailed(f"{self.config.path} cannot be written: {reason}.", needs_attention=True)


def _write(descriptor: int, lines: bytes) -> None:
    """Append *lines* and sync them; what of them was written before an error is taken back."""
    size = os.fstat(descriptor).st_size
    if size and _last_byte(descriptor, size) != b"\n":
        lines = b"\n" + lines
    left = memoryview(lines)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _last_byte(descriptor: int, size: int) -> bytes:
    os.lseek(descriptor, size - 1, os.SEEK_SET)
    return os.read(descriptor, 1)


def _lock(descriptor: int) -> bool:
    """Return whether the file is locked now, or cannot be: on Windows, and on file systems without locks.

    It is freed with its descriptor.
    """
    if sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
    return True
