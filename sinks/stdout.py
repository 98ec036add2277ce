"""Implements the `stdout` sink, which writes each record as one line to standard output.

The agent uses this sink if no configuration exists. If the process that reads the output stalls, the send fails at its
deadline and the record stays pending.

The sink writes directly to the file descriptor, because lines buffered in `sys.stdout` would be lost if the agent were
killed. If a write exceeds its deadline, later writes wait until its line is complete, so lines are never mixed.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

from bridge.sink import DeliveryFailed, SinkConfig, TransitionRecord
from sinks.blocking import BlockingSink
from sinks.sentence import line

#: All stdout sinks share this lock, because they write to the same standard output.
_WRITING = threading.Lock()


class StdoutConfig(SinkConfig, frozen=True, kw_only=True):
    """The settings of the sink type `stdout`."""

    format: Literal["json", "text"] = "json"
    """json: each line is a record as JSON. text: each line is a readable sentence."""


class StdoutSink(BlockingSink):
    """Writes each record as one line to standard output."""

    Config: ClassVar[type[SinkConfig]] = StdoutConfig

    def __init__(self, config: StdoutConfig) -> None:
        super().__init__(config, target="Standard output")

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Write *batch*. Raise DeliveryFailed if the write does not finish in time."""
        lines = b"".join(line(record, self.config.format) for record in batch)
        self.run(partial(_write, lines))

    def check(self) -> None:
        """Raise DeliveryFailed if standard output is closed or has no reader.

        The check does not write anything.
        """
        if _has_no_reader(_descriptor()):
            raise _failure(BrokenPipeError())


def _write(lines: bytes) -> None:
    with _WRITING:
        try:
            descriptor = _descriptor()
            left = memoryview(lines)
            while left:
                try:
                    left = left[os.write(descriptor, left) :]
                except BlockingIOError:  # another process made the pipe non-blocking
                    select.select([], [descriptor], [])
        except OSError as error:
            raise _failure(error) from error


def _has_no_reader(descriptor: int) -> bool:
    if not hasattr(select, "poll"):  # Windows
        return False
    output = select.poll()
    output.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLNVAL) for _, event in output.poll(0))


def _descriptor() -> int:
    if sys.stdout is None or sys.stdout.closed:
        raise DeliveryFailed(
            "Standard output is closed. Redirect standard output to a file or a pipe, or remove the stdout sink.",
            needs_attention=True,
        )
    return sys.stdout.fileno()


def _failure(error: OSError) -> DeliveryFailed:
    if isinstance(error, BrokenPipeError):
        message = "Standard output is a pipe without a reader. Restart the agent with a reader."
    else:
        message = f"Standard output cannot be written: {error.strerror or error}. Check the disk space and the target."
    return DeliveryFailed(message, needs_attention=True)
