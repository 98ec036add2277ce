"""The sink `file`: each record as one line at the end of a file, which is rotated by its size.

For a collector that reads files, and for users who want the records on the VM itself. When `send` returns, the lines
are synced to the disk. The file is opened for each send, because events are rare. Other tools may therefore move or
rotate the file (max_bytes = 0) without a signal to the agent.

Several tables, or `send-test` and the agent, may write to one file: the file is locked (flock) during a write and a
rotation. Half a line, which a kill or a full disk leaves, is removed or ended before the next line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from bridge.sink import DeliveryFailed, Sink, SinkConfig, TransitionRecord
from sinks.blocking import BlockingCalls
from sinks.sentence import line_of

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

_MODE = 0o640
#: O_NONBLOCK, because opening a pipe without a reader would hang. O_BINARY, because Windows writes CRLF otherwise.
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class FileConfig(SinkConfig, frozen=True, kw_only=True):
    """The keys of a ``[[sinks]]`` table of type file."""

    path: str
    """The absolute path of the file. Its directory must exist."""
    format: Literal["json", "text"] = "json"
    """json: one record per line, in the record's schema. text: one readable line per record."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0)] = 10 * 1024 * 1024
    """Rotate the file before it exceeds this size: PATH becomes PATH.1, PATH.1 becomes PATH.2, and so on. 0: never."""
    keep: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 5
    """The number of rotated files to keep."""

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute() or self.path.endswith(("/", os.sep)):
            raise ValueError(f"path is {self.path!r}. Write the absolute path of a file.")
        if "\0" in self.path:
            raise ValueError("path contains a NUL character.")


class FileSink(Sink):
    """Appends each record to a file as one line."""

    Config: ClassVar[type[SinkConfig]] = FileConfig

    def __init__(self, config: FileConfig) -> None:
        super().__init__(config)
        self._line = line_of(config.format)
        self._calls = BlockingCalls(f"file:{config.name}", target=config.path)
        self._cannot_rotate = False

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Append *batch*; raise DeliveryFailed if the file cannot be written in time."""
        lines = b"".join(map(self._line, batch))
        self._calls.run(partial(self._append, lines), timeout_seconds=self.config.timeout_seconds)

    def check(self) -> None:
        """Raise DeliveryFailed if the file cannot be written. The check creates and writes nothing."""
        self._calls.run(self._look, timeout_seconds=self.config.timeout_seconds)

    def close(self) -> None:
        """End a send in another thread."""
        self._calls.close()

    def _append(self, lines: bytes) -> None:
        try:
            path = self._path()
            with _locked(path) as descriptor:
                if not (self._is_full(descriptor, len(lines)) and self._rotate(path)):
                    _write(descriptor, lines)
                    return
            with _locked(path) as descriptor:
                _write(descriptor, lines)
        except OSError as error:
            raise self._failure(error) from error

    def _look(self) -> None:
        try:
            path = self._path()
            if path.exists():
                os.close(_opened(path, create=False))
            elif not os.access(path.parent, os.W_OK | os.X_OK):
                path.parent.stat()  # reports a missing directory
                raise PermissionError(0, f"its directory {path.parent} may not be written")
        except OSError as error:
            raise self._failure(error) from error

    def _path(self) -> Path:
        """Return the target of the path, so that a rotation does not replace a link."""
        return Path(os.path.realpath(self.config.path))

    def _is_full(self, descriptor: int, more_bytes: int) -> bool:
        size = os.fstat(descriptor).st_size
        return size > 0 and 0 < self.config.max_bytes < size + more_bytes

    def _rotate(self, path: Path) -> bool:
        """Rotate the files; return False if the system refuses this, for example because a reader holds the file."""
        try:
            _shift(path, keep=self.config.keep)
        except OSError as error:
            if not self._cannot_rotate:
                logger.warning(
                    "%s cannot be rotated: %s. The file grows beyond max_bytes until you fix this. "
                    "Set max_bytes = 0 if another tool rotates the file.",
                    self.config.path,
                    error.strerror or error,
                )
            self._cannot_rotate = True
            return False
        self._cannot_rotate = False
        return True

    def _failure(self, error: OSError) -> DeliveryFailed:
        reason = error.strerror or str(error)
        return DeliveryFailed(f"{self.config.path} cannot be written: {reason}.", needs_attention=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Yield a descriptor of the current file, locked if the system and the file system support locks."""
    while True:
        descriptor = _opened(path, create=True)
        try:
            if sys.platform != "win32":
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_current(path, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _opened(path: Path, *, create: bool) -> int:
    is_new = create and not path.exists()
    descriptor = os.open(path, _FLAGS | (os.O_CREAT if create else 0), _MODE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file")
    try:
        if is_new:
            _sync_directory(path.parent)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_current(path: Path, descriptor: int) -> bool:
    """Return whether *path* is still the file of *descriptor*, and was not rotated during the wait for the lock."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _shift(path: Path, *, keep: int) -> None:
    """Rename *path* to PATH.1, PATH.1 to PATH.2, and so on, up to a free number; raise OSError on failure.

    The oldest file is deleted last, so that a failed rename loses no file.
    """

    def kept(number: int) -> Path:
        return path.with_name(f"{path.name}.{number}")

    free = next((number for number in range(1, keep + 1) if not kept(number).exists()), keep + 1)
    for number in range(free - 1, 0, -1):
        kept(number).replace(kept(number + 1))
    path.replace(kept(1))
    with contextlib.suppress(OSError):
        kept(keep + 1).unlink(missing_ok=True)
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, lines: bytes) -> None:
    """Append *lines* and sync them. On an error, remove the written part."""
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
