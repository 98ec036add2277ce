"""A sink that keeps its records in memory, and whose sends fail as a test has scripted.

A worker builds its sink from the configuration and replaces a sink that hangs, so a test cannot hold the sink. A `Box`
holds the records and the script of all sinks whose setting ``box`` has its name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from bridge.sink import DeliveryFailed, DeliveryRejected, Sink, SinkConfig, TransitionRecord

Outcome = str | Callable[[Sequence[TransitionRecord]], None]


class Box:
    """The records and the script of all sinks with the same box. Threads can share it."""

    _boxes: ClassVar[dict[str, Box]] = {}

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._records: list[TransitionRecord] = []
        self._tries: list[tuple[TransitionRecord, ...]] = []
        self._outcomes: list[Outcome] = []
        self.released = threading.Event()
        """Set this event to end every send that hangs."""

    @classmethod
    def named(cls, name: str) -> Box:
        return cls._boxes.setdefault(name, cls())

    @classmethod
    def forget(cls, name: str) -> None:
        cls._boxes.pop(name, None)

    @property
    def records(self) -> tuple[TransitionRecord, ...]:
        """Return all accepted records in order."""
        with self._changed:
            return tuple(self._records)

    @property
    def tries(self) -> tuple[tuple[TransitionRecord, ...], ...]:
        """Return the batch of every send, including failed sends."""
        with self._changed:
            return tuple(self._tries)

    def script(self, *outcomes: Outcome) -> None:
        """Set the outcomes of the next sends. All later sends succeed.

        An outcome is "accept", "fail", "fail:SECONDS" (with a Retry-After), "reject", "raise", "hang", or a function
        that is called with the batch and can raise any exception.
        """
        with self._changed:
            self._outcomes = list(outcomes)

    def wait_for(self, count: int, timeout_seconds: float) -> tuple[TransitionRecord, ...]:
        """Wait until the sinks have accepted *count* records."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._records) >= count, timeout_seconds):
                raise TimeoutError(f"{len(self._records)} of {count} records came within {timeout_seconds} s.")
            return tuple(self._records)

    def accept(self, batch: Sequence[TransitionRecord]) -> None:
        with self._changed:
            self._records.extend(batch)
            self._changed.notify_all()

    def begin(self, batch: Sequence[TransitionRecord]) -> Outcome:
        """Keep *batch* as a send, and return its outcome."""
        with self._changed:
            self._tries.append(tuple(batch))
            return self._outcomes.pop(0) if self._outcomes else "accept"


class ScriptedSink(Sink):
    """Accepts each batch, unless the box contains a different outcome."""

    class Config(SinkConfig, frozen=True, kw_only=True):
        box: str = "scripted"

    def __init__(self, config: ScriptedSink.Config) -> None:
        super().__init__(config)
        self._box = Box.named(config.box)
        self._closed = threading.Event()

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        outcome = self._box.begin(batch)
        if callable(outcome):
            outcome(batch)
        elif outcome != "accept":
            self._end_badly(outcome)
        self._box.accept(batch)

    def close(self) -> None:
        self._closed.set()

    def _end_badly(self, outcome: str) -> None:
        verb, _, seconds = outcome.partition(":")
        if verb == "fail":
            raise DeliveryFailed("The script says fail.", retry_after=float(seconds) if seconds else None)
        if verb == "reject":
            raise DeliveryRejected("The script says reject.")
        if verb == "raise":
            raise RuntimeError("The script says raise.")
        assert verb == "hang", outcome
        while not self._closed.wait(0.05) and not self._box.released.is_set():
            pass
        raise DeliveryFailed("The script said hang, and the test ended the send.")
