"""The sink `stdout`: each record as one line on standard output, JSON for a log collector or text for a person.

The sink of the agent without a configuration, and of a container whose output is collected. Output that nobody reads
is an outage like any other: the send fails at its deadline, and the record waits in the outbox.

`sys.stdout` cannot be used for this: it buffers (lines are lost at a kill), and it blocks for ever once its reader
stalls. So lines go straight to the descriptor, on POSIX only while `poll` says that there is room and at most
PIPE_BUF bytes at a time: that much a pipe with room takes without blocking, and a shorter line is never cut (POSIX,
write). What is written to ``sys.stdout`` beside this should be flushed by its writer. Windows has no `poll`: there a
write may block, and the host cuts it.

A pipe may outlive an agent that was killed in the middle of a longer line. So the first line into a pipe begins with a
line break: a reader sees an empty line, and what was cut spoils no record.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Sequence
from typing import ClassVar, Literal, TextIO

from bridge.sink import DeliveryFailed, Sink, SinkConfig, TransitionRecord
from sinks.sentence import line_of

_PIPE_BUF = getattr(select, "PIPE_BUF", 512)
_CAN_POLL = hasattr(select, "poll")
_RETRY_SECONDS = 0.01
_LONGEST_POLL_SECONDS = 3_600


class StdoutConfig(SinkConfig, frozen=True, kw_only=True):
    """The keys of a ``[[sinks]]`` table of type stdout."""

    format: Literal["json", "text"] = "json"
    """json: one record a line, as the schema says. text: one line a person can read."""


class StdoutSink(Sink):
    """Writes each record as one line to the process's standard output.

    A batch that fails may have been written in part: those records come again, recognisable by their id.
    """

    Config: ClassVar[type[SinkConfig]] = StdoutConfig
    breaks_first_line: ClassVar[bool] = True
    """Begin the first line into a pipe with a line break; False where the pipe is known to be new, as in `demo`."""

    def __init__(self, config: StdoutConfig) -> None:
        super().__init__(config)
        self._line = line_of(config.format)

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Write *batch*; raise DeliveryFailed when the reader stalls past the deadline, is gone, or the disk full."""
        deadline = time.monotonic() + self.config.timeout_seconds
        for record in batch:
            line = self._line(record)
            _STANDARD_OUTPUT.write_line(line, deadline=deadline, breaks_first_line=self.breaks_first_line)

    def check(self) -> None:
        """Raise DeliveryFailed when standard output is closed or its reader is gone; nothing is written."""
        _, descriptor = _opened()
        if descriptor is None:
            return
        try:
            os.fstat(descriptor)
            if _is_broken(descriptor):
                raise BrokenPipeError
        except OSError as exc:
            raise _failure(exc) from exc


class _StandardOutput:
    """Standard output, which belongs to the process and is shared by every sink of it.

    A line that was cut at a deadline is finished before the next one starts, or two lines would become a broken one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = b""
        self._rest_of: tuple[int, int, int] | None = None
        self._begun: tuple[int, int, int] | None = None
        """What was written to already."""
        self._never = threading.Event()

    def write_line(self, line: bytes, *, deadline: float, breaks_first_line: bool) -> None:
        """Write *line*; *deadline* is on the monotonic clock. Raise DeliveryFailed when it was not written whole."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeliveryFailed("Standard output is held up by another sink. Does its reader still read?")
        try:
            stream, descriptor = _opened()
            if descriptor is None:
                _write_text(stream, line)
            else:
                self._finish(descriptor, deadline)
                is_break_due = breaks_first_line and not self._has_begun(descriptor)
                self._write(descriptor, b"\n" + line if is_break_due else line, deadline)
        except OSError as exc:
            raise _failure(exc) from exc
        finally:
            self._lock.release()

    def _has_begun(self, descriptor: int) -> bool:
        """Return whether the next line need not begin with a line break: it is not the first one, or not to a pipe."""
        return self._begun == _identity(descriptor) or not stat.S_ISFIFO(os.fstat(descriptor).st_mode)

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
            if len(left) < len(line):
                self._begun = _identity(descriptor)
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
            # The descriptor was made non-blocking, and there is some room, but not enough.
            self._never.wait(_RETRY_SECONDS)
            return 0


#: The one standard output of this process.
_STANDARD_OUTPUT = _StandardOutput()


def _identity(descriptor: int) -> tuple[int, int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return descriptor, found.st_dev, found.st_ino


def _has_room(descriptor: int, seconds: float) -> bool:
    if not _CAN_POLL:
        return True
    # Anything counts: the write that follows says better what is wrong with a hung-up or closed descriptor.
    return bool(_poll(descriptor, milliseconds=max(1, round(seconds * 1000))))


def _is_broken(descriptor: int) -> bool:
    return _CAN_POLL and bool(_poll(descriptor, milliseconds=0) & (select.POLLERR | select.POLLNVAL))


def _poll(descriptor: int, *, milliseconds: int) -> int:
    """Return what `poll` says of writing to *descriptor*, 0 when nothing happened in time."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return sum(event for _, event in waiting.poll(milliseconds))


def _opened() -> tuple[TextIO, int | None]:
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


def _failure(exc: OSError) -> DeliveryFailed:
    """Return what a person reads of *exc*."""
    if isinstance(exc, BrokenPipeError):
        message = "Standard output is a pipe whose reader has gone. Start the agent again with a reader."
    else:
        message = f"Standard output cannot be written: {exc.strerror or exc}. Free space, or mend where it leads."
    return DeliveryFailed(message, needs_attention=True)
