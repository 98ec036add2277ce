"""Provides a sink for tests, which stores records in memory.

A test can make the sends of this sink fail.

The agent creates a sink from its configuration, and replaces the sink if a send hangs. Therefore, a test cannot access
the sink. Instead, the test uses a `Box`, which contains the records and the scripted results. The configuration
contains the name of the box:

    type = "bridge.testing.sinks:ScriptedSink"
    box = "mine"
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from bridge.sink import DeliveryFailed, DeliveryRejected, Sink, SinkConfig, TransitionRecord
from bridge.testing.simulator.errors import WrongRequest

_HANG_LIMIT_SECONDS = 600.0

Outcome = str | Callable[[Sequence[TransitionRecord]], None]


class Box:
    """The records and the scripted results of all sinks that use the same box name.

    Threads can share a box.
    """

    _boxes: ClassVar[dict[str, Box]] = {}
    _boxes_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._records: list[TransitionRecord] = []
        self._tries: list[tuple[TransitionRecord, ...]] = []
        self._outcomes: list[Outcome] = []
        self.released = threading.Event()
        """Set this event to end every send that hangs. Each of these sends then fails."""

    @classmethod
    def named(cls, name: str) -> Box:
        """Return the box with *name*. The first call creates the box."""
        with cls._boxes_lock:
            return cls._boxes.setdefault(name, cls())

    @classmethod
    def forget(cls, name: str) -> None:
        """Delete the records that the sink *name* received."""
        with cls._boxes_lock:
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
        """Set the outcomes of the next sends, in order. All later sends succeed.

        An outcome is "accept", "fail", "fail:SECONDS" (with a Retry-After), "reject", "raise", "hang", or a function
        that is called with the batch and can raise any exception.
        """
        for outcome in outcomes:
            check_outcome(outcome)
        with self._changed:
            self._outcomes = list(outcomes)

    def wait_for(self, count: int, timeout_seconds: float) -> tuple[TransitionRecord, ...]:
        """Wait until the sinks have accepted *count* records.

        Raise TimeoutError after *timeout_seconds*.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._records) >= count, timeout_seconds):
                raise TimeoutError(f"{len(self._records)} of {count} records came within {timeout_seconds} s.")
            return tuple(self._records)

    def accept(self, batch: Sequence[TransitionRecord]) -> None:
        """Store *batch* as accepted records."""
        with self._changed:
            self._records.extend(batch)
            self._changed.notify_all()

    def begin(self, batch: Sequence[TransitionRecord]) -> Outcome:
        """Store *batch* as a send, and return the scripted outcome."""
        with self._changed:
            self._tries.append(tuple(batch))
            self._changed.notify_all()
            return self._outcomes.pop(0) if self._outcomes else "accept"


class ScriptedSink(Sink):
    """Accepts each batch, unless the box contains a different outcome."""

    class Config(SinkConfig, frozen=True, kw_only=True):
        """The keys of this sink."""

        box: str = "scripted"
        """The name of the box."""

    def __init__(self, config: ScriptedSink.Config) -> None:
        super().__init__(config)
        self._box = Box.named(config.box)
        self._closed = threading.Event()

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Accept *batch*, or produce the next scripted outcome."""
        outcome = self._box.begin(batch)
        if callable(outcome):
            outcome(batch)
        elif outcome != "accept":
            self._end_badly(outcome)
        self._box.accept(batch)

    def close(self) -> None:
        """End a send that hangs, as closing a socket does."""
        self._closed.set()

    def _end_badly(self, outcome: str) -> None:
        verb, _, seconds = outcome.partition(":")
        if verb == "fail":
            raise DeliveryFailed("The script says fail.", retry_after=float(seconds) if seconds else None)
        if verb == "reject":
            raise DeliveryRejected("The script says reject.")
        if verb == "raise":
            raise RuntimeError("The script says raise.")
        self._hang()
        raise DeliveryFailed("The script said hang, and the test ended the send.")

    def _hang(self) -> None:
        for _ in range(int(_HANG_LIMIT_SECONDS / 0.05)):
            if self._closed.wait(0.05) or self._box.released.is_set():
                return


def check_outcome(outcome: Outcome) -> None:
    """Raise WrongRequest if *outcome* is not a valid outcome."""
    if callable(outcome) or outcome in {"accept", "fail", "reject", "raise", "hang"}:
        return
    verb, _, seconds = outcome.partition(":")
    if verb == "fail" and seconds.replace(".", "", 1).isdecimal():
        return
    raise WrongRequest(f"Outcome {outcome!r} is not known. Known: accept, fail, fail:SECONDS, reject, raise, hang.")
