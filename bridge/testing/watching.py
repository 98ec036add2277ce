"""Measures the effects of a sink: threads, sockets, log lines, and the duration of calls."""

from __future__ import annotations

import gc
import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from bridge import logs

_Result = TypeVar("_Result")

_TICK_SECONDS = 0.005
#: Every call must end within 1.1 times its deadline.
_MOST_OF_A_DEADLINE = 1.1
_TRIES = 4
_MOST_LAG_SECONDS = 0.5
#: At a deadline, the watchdog, the sink, and the host wake one after the other. Each can be late.
_THREADS_IN_TURN = 3
_SETTLE_SECONDS = 5.0
_TASKS = Path("/proc/self/task")
_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True, kw_only=True)
class Census:
    """The number of threads and sockets of this process. Sockets are counted only on Linux."""

    threads: int
    sockets: int

    @classmethod
    def taken(cls) -> Census:
        """Return the current counts."""
        threads = sum(1 for _ in _TASKS.iterdir()) if _TASKS.exists() else threading.active_count()
        return cls(threads=threads, sockets=_sockets())

    @classmethod
    def baseline(cls) -> Census:
        """Collect garbage and return the current counts. Uncollected objects would hide a leak."""
        gc.collect()
        return cls.taken()

    def settled(self) -> Census:
        """Count again for up to 5 s, until no count is higher than in this census.

        Return the last counts.
        """
        never = threading.Event()
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (now := Census.taken()).exceeds(self) and time.monotonic() < deadline:
            never.wait(_TICK_SECONDS)
        return now

    def exceeds(self, other: Census) -> bool:
        """Return whether this census has more threads or more sockets than *other*."""
        return self.threads > other.threads or self.sockets > other.sockets


def _sockets() -> int:
    if not _DESCRIPTORS.exists():
        return 0
    count = 0
    for descriptor in _DESCRIPTORS.iterdir():
        try:
            count += str(descriptor.readlink()).startswith("socket:")
        except OSError:
            continue  # the descriptor was closed in the meantime
    return count


class Lag:
    """Measures how late a thread wakes from a 5 ms sleep.

    On a busy machine, any other call can be late by about the same time.
    """

    def __init__(self) -> None:
        self._worst_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="lag-meter", daemon=True)

    @property
    def seconds(self) -> float:
        """Return the delay that a busy machine might have added to one send.

        The value is based on the longest measured delay. It is limited to 0.5 s, so that a test still detects a sink
        that blocks all threads.
        """
        return min(self._worst_seconds * _THREADS_IN_TURN, _MOST_LAG_SECONDS)

    def __enter__(self) -> Lag:  # noqa: PYI034  # Python 3.10 has no Self
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _measure(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(_TICK_SECONDS):
            now = time.monotonic()
            self._worst_seconds = max(self._worst_seconds, now - before - _TICK_SECONDS)
            before = now


def in_time(
    call: Callable[[], _Result],
    *,
    deadline_seconds: float,
    seconds_of: Callable[[_Result], float] | None = None,
    was_cut: Callable[[_Result], bool] = lambda _result: False,
) -> _Result:
    """Repeat *call* until it meets the deadline, and return its result.

    Raise AssertionError after four late calls.

    A call is late if *was_cut* reports that the host canceled it, or if it takes longer than 1.1 times
    *deadline_seconds* plus the delay that `Lag` measures. Late calls are repeated, because a busy machine delays only
    some calls. If *seconds_of* is given, it reads the duration of a call from the result.
    """
    taken: list[str] = []
    for _ in range(_TRIES):
        with Lag() as lag:
            began = time.monotonic()
            result = call()
            seconds = time.monotonic() - began
        if seconds_of is not None:
            seconds = seconds_of(result)
        limit = deadline_seconds * _MOST_OF_A_DEADLINE + lag.seconds
        if seconds <= limit and not was_cut(result):
            return result
        taken.append(f"{seconds:.3f} s of {limit:.3f} s" + (", and was cut" if was_cut(result) else ""))
    raise AssertionError(f"Every call exceeded its deadline of {deadline_seconds:g} s: {'; '.join(taken)}.")


@contextmanager
def agent_logs() -> Iterator[Callable[[], str]]:
    """Configure logging as the agent does, at level DEBUG.

    Yield a function that returns all log lines.
    """
    root = logging.getLogger()
    known = [root, *(each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger))]
    levels = [(logger, logger.level) for logger in known]
    raises = logging.raiseExceptions
    stream = io.StringIO()
    logs.configure(form="json", level=logging.DEBUG, stream=stream)
    handler = cast("logs.QueuedHandler", root.handlers[-1])

    def lines() -> str:
        handler.flush()
        return stream.getvalue()

    try:
        yield lines
    finally:
        root.removeHandler(handler)
        handler.close()
        logging.captureWarnings(capture=False)
        logging.raiseExceptions = raises
        for logger, level in levels:
            logger.setLevel(level)
