"""Implements the `file` sink, which appends each record to a file as one line.

A record counts as delivered once its line has been synced to disk. The sink opens the file for each send, so tools such
as logrotate can rotate the file without signaling the agent.

The sink locks the file while it writes, so more than one sink can write to the same file. If the agent is killed or the
disk fills up during a write, the file can end with an incomplete line. The next write ends this line before it appends
new lines.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from bridge.sink import DeliveryFailed, SinkConfig, TransitionRecord
from sinks.blocking import BlockingSink
from sinks.sentence import line

if sys.platform != "win32":
    import fcntl

_MODE = 0o640
#: Without O_NONBLOCK, opening a pipe without a reader would hang. Without O_BINARY, Windows would write CRLF.
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class FileConfig(SinkConfig, frozen=True, kw_only=True):
    """The settings of the sink type `file`."""

    path: str
    """The absolute path of the file. Its directory must exist."""
    format: Literal["json", "text"] = "json"
    """json: each line is a record as JSON. text: each line is a readable sentence."""

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute() or self.path.endswith(("/", os.sep)) or "\0" in self.path:
            raise ValueError(f"path must be the absolute path of a file, but it is {self.path!r}.")


class FileSink(BlockingSink):
    """Appends each record to a file as one line."""

    Config: ClassVar[type[SinkConfig]] = FileConfig

    def __init__(self, config: FileConfig) -> None:
        super().__init__(config, target=config.path)
        self._path = Path(config.path)

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Append *batch* to the file. Raise DeliveryFailed if the write does not finish in time."""
        lines = b"".join(line(record, self.config.format) for record in batch)
        self.run(partial(self._append, lines))

    def check(self) -> None:
        """Raise DeliveryFailed if the file cannot be written. The check does not create the file."""
        self.run(self._look)

    def _append(self, lines: bytes) -> None:
        with self._failing():
            descriptor = _opened(self._path, create=True)
            try:
                _write(descriptor, lines)
            finally:
                os.close(descriptor)

    def _look(self) -> None:
        with self._failing():
            if self._path.exists():
                os.close(_opened(self._path, create=False))
                return
            self._path.parent.stat()  # reports a missing directory
            if not os.access(self._path.parent, os.W_OK | os.X_OK):
                raise PermissionError(0, f"its directory {self._path.parent} is not writable")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self._path} cannot be written: {error.strerror or error}."
            raise DeliveryFailed(message, needs_attention=True) from error


def _opened(path: Path, *, create: bool) -> int:
    descriptor = os.open(path, _FLAGS | (os.O_CREAT if create else 0), _MODE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is not a regular file")  # noqa: TRY301  # closed below
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write(descriptor: int, lines: bytes) -> None:
    """Append *lines* to the file and sync the file. On Windows, the file is not locked."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    size = os.fstat(descriptor).st_size
    if size and _last_byte(descriptor, size) != b"\n":
        lines = b"\n" + lines
    left = memoryview(lines)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def _last_byte(descriptor: int, size: int) -> bytes:
    os.lseek(descriptor, size - 1, os.SEEK_SET)
    return os.read(descriptor, 1)
