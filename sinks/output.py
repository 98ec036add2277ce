"""Whole lines to the process's standard output, within a deadline.

`sys.stdout` cannot be used for this: it buffers (lines are lost at a kill), and it blocks for ever once its reader
stalls. So lines go straight to the descriptor, on POSIX only while `poll` says that there is room and at most
PIPE_BUF bytes at a time: that much a pipe with room takes without blocking, and a shorter line is never cut (POSIX,
write). What is written to ``sys.stdout`` beside this should be flushed by whoever writes it.

A line that is cut all the same is finished before the next one starts, or two lines would become a broken one.
Standard output belongs to the process, not to one sink, and so does that rest; hence one `OUTPUT` for all. Windows
has no `poll`: there a write may block, and the host cuts it.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import time
from typing import TextIO

from bridge.sink import DeliveryFailed

_PIPE_BUF = getattr(select, "PIPE_BUF", 512)
_CAN_POLL = hasattr(select, "poll")
_RETRY_SECONDS = 0.01
_LONGEST_POLL_SECONDS = 3_600


class Output:
    """Standard output as every sink of this process shares it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = b""
        self._rest_of: tuple[int, int, int] | None = None
        self._never = threading.Event()

    def write_line(self, line: bytes, *, deadline: float) -> None:
        """Write *line*; *deadline* is on the monotonic clock. Raise DeliveryFailed when it was not written whole."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeliveryFailed("Standard output is held up by another sink. Does its reader still read?")
        try:
            stream, descriptor = opened()
            if descriptor is None:
                _write_text(stream, line)
            else:
                self._finish(descriptor, deadline)
                self._write(descriptor, line, deadline)
        except OSError as exc:
            raise failure(exc) from exc
        finally:
            self._lock.release()

    def _finish(self, descriptor: int, deadline: float) -> None:
        """Write what is left of a line that was cut, if this is still the same pipe or file."""
        rest, self._rest = self._rest, b""
        if rest and self._rest_of == _identity(descriptor):
            self._write(descriptor, rest, deadline, is_rest=True)

    def _write(self, descriptor: int, line: bytes, deadline: float, *, is_rest: bool = False) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[self._write_some(descriptor, left, deadline) :]
        finally:
            if left and (is_rest or len(left) < len(line)):
                self._rest, self._rest_of = bytes(left), _identity(descriptor)

    def _write_some(self, descriptor: int, left: memoryview, deadline: float) -> int:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise DeliveryFailed("Standard output took nothing in time: its reader has stalled. Let it read on.")
        if not _has_room(descriptor, min(seconds, _LONGEST_POLL_SECONDS)):
            return 0
        try:
            return os.write(descriptor, left[:_PIPE_BUF])
        except BlockingIOError:
            # Somebody made it non-blocking, and there is some room, but not enough.
            self._never.wait(_RETRY_SECONDS)
            return 0


def _identity(descriptor: int) -> tuple[int, int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return descriptor, found.st_dev, found.st_ino


def _has_room(descriptor: int, seconds: float) -> bool:
    if not _CAN_POLL:
        return True
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    # Anything counts: the write that follows says better what is wrong with a hung-up or closed descriptor.
    return bool(waiting.poll(max(1, round(seconds * 1000))))


def opened() -> tuple[TextIO, int | None]:
    """Return ``sys.stdout`` and its descriptor, None for a stream in memory; raise DeliveryFailed if it is closed."""
    stream: TextIO | None = sys.stdout
    if stream is None or stream.closed:
        raise DeliveryFailed(
            "Standard output is closed. Start the agent with one, or take the stdout sink out of the configuration.",
            needs_attention=True,
        )
    try:
        return stream, stream.fileno()
    except (io.UnsupportedOperation, AttributeError):
        return stream, None


def _write_text(stream: TextIO, line: bytes) -> None:
    try:
        binary = stream.buffer
    except AttributeError:
        stream.write(line.decode())
    else:
        stream.flush()
        binary.write(line)
    stream.flush()


def check() -> None:
    """Raise DeliveryFailed when standard output is closed or its reader is gone; nothing is written."""
    _, descriptor = opened()
    if descriptor is None:
        return
    try:
        os.fstat(descriptor)
        if _CAN_POLL:
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            if any(event & (select.POLLERR | select.POLLNVAL) for _, event in waiting.poll(0)):
                raise BrokenPipeError
    except OSError as exc:
        raise failure(exc) from exc


def failure(exc: OSError) -> DeliveryFailed:
    """Return what a person reads of *exc*."""
    if isinstance(exc, BrokenPipeError):
        said = "Standard output is a pipe whose reader has gone. Start the agent again with a reader."
    else:
        said = f"Standard output cannot be written: {exc.strerror or exc}. Free space, or mend where it leads."
    return DeliveryFailed(said, needs_attention=True)


#: The one standard output of this process.
OUTPUT = Output()
