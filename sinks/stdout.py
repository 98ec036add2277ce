"""Records to standard output: JSON for a log collector, text for a person.

The sink of the agent without a configuration, and of a container whose output is collected. Output that nobody reads
is an outage like any other: the send fails at its deadline, and the record waits in the outbox.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Literal

from bridge.sink import Sink, SinkConfig, TransitionRecord, encode
from sinks.output import OUTPUT, check
from sinks.sentence import sentence


class StdoutConfig(SinkConfig, frozen=True, kw_only=True):
    """The keys of a ``[[sinks]]`` table of type stdout."""

    format: Literal["json", "text"] = "json"
    """json: one record a line, as the schema says. text: one line a person can read."""


class StdoutSink(Sink):
    """Writes each record as one line to the process's standard output.

    A batch that fails may have been written in part: those records come again, recognisable by their id.
    """

    Config: ClassVar[type[SinkConfig]] = StdoutConfig

    def __init__(self, config: StdoutConfig) -> None:
        super().__init__(config)
        self._line = _text if config.format == "text" else _json

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Write *batch*; raise DeliveryFailed when the reader stalls past the deadline, is gone, or the disk full."""
        deadline = time.monotonic() + self.config.timeout_seconds
        for record in batch:
            OUTPUT.write_line(self._line(record), deadline=deadline)

    def check(self) -> None:
        """Raise DeliveryFailed when standard output is closed or its reader is gone."""
        check()


def _json(record: TransitionRecord) -> bytes:
    return encode(record) + b"\n"


def _text(record: TransitionRecord) -> bytes:
    return sentence(record).encode() + b"\n"
