"""The thread that reads the clocks of the VM, and keeps its last pauses.

The thread only sleeps and reads, every 50 ms while an event of this VM is near. At other times, the poll thread reads
the clocks after its wait, because waking another thread costs more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Protocol

import msgspec

from bridge.impact.judgement import (
    MIN_STEP_SECONDS,
    Lateness,
    Reading,
    Step,
    Verdict,
    confirmed,
    date_step,
    lateness,
    resolution_seconds,
    steps_between,
)

logger = logging.getLogger(__name__)

_IDLE_SECONDS, _NEAR_SECONDS = 60.0, 0.05
#: Reading /proc/stat costs more than a poll may, so an idle sampler reads it rarely.
_COUNT_SECONDS = 5.0
_RATE_SECONDS = 60.0
KEPT_SECONDS = 600.0
_STAT_BYTES = 8192
_RAW = getattr(time, "CLOCK_MONOTONIC_RAW", None)
_UNDECIDED = "The number of context switches does not show whether the VM or only the agent stood still."
_ONE_CLOCK = "Only one clock outside the VM shows the pause."


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """A pause, a stall of the agent, or an undecided delay. Times are in Unix seconds."""

    began_at: float
    verdict: Verdict
    late_seconds: float = 0.0
    step_seconds: float = 0.0
    source: str = "timer"
    resolution_seconds: float = 0.0
    reason: str | None = None


class Clocks(Protocol):
    """Reads the clocks of a machine."""

    def now(self) -> tuple[float, float]:
        """Return CLOCK_MONOTONIC_RAW and CLOCK_REALTIME."""
        ...

    def read(self, *, counts: bool) -> Reading:
        """Return the clocks, and the context switches if *counts* is true."""
        ...


class SystemClocks:
    """Reads the clocks of this machine."""

    def __init__(self) -> None:
        self._stat = self._host = -1
        self._stat_bytes = _STAT_BYTES
        with suppress(OSError):
            self._stat = os.open("/proc/stat", os.O_RDONLY)
        with suppress(OSError):
            self._host = os.open("/dev/ptp_hyperv", os.O_RDONLY)

    def now(self) -> tuple[float, float]:
        """Return CLOCK_MONOTONIC_RAW and CLOCK_REALTIME."""
        return time.monotonic() if _RAW is None else time.clock_gettime(_RAW), time.time()

    def read(self, *, counts: bool) -> Reading:
        """Return the clocks, and the context switches if *counts* is true."""
        raw, real = self.now()
        return Reading(
            raw=raw,
            real=real,
            context_switches=self._context_switches() if counts else None,
            host=self._host_time() if counts else None,
        )

    def _context_switches(self) -> int | None:
        try:
            text = os.pread(self._stat, self._stat_bytes, 0)
            while len(text) == self._stat_bytes:  # a machine with many interrupts
                self._stat_bytes *= 2
                text = os.pread(self._stat, self._stat_bytes, 0)
            return int(text[text.index(b"\nctxt ") + 6 :].split(b"\n", 1)[0])
        except (OSError, ValueError):
            return None

    def _host_time(self) -> float | None:
        if self._host < 0:
            return None
        with suppress(OSError):
            return time.clock_gettime((~self._host << 3) | 3)  # FD_TO_CLOCKID of clock_getres(2)
        return None


class Sampler:
    """Measures pauses. *on_pause* receives the length of each measured pause in seconds."""

    def __init__(
        self,
        *,
        on_pause: Callable[[float], None] = lambda _seconds: None,
        clocks: Clocks | None = None,
        cpus: int | None = None,
    ) -> None:
        self._on_pause = on_pause
        clocks = clocks or SystemClocks()
        self._now, self._read = clocks.now, clocks.read
        self._cpus = cpus or os.cpu_count() or 1
        self._counts: deque[Reading] = deque()
        self._steps: deque[Step] = deque(maxlen=16)
        self._found: deque[Interruption] = deque(maxlen=256)
        self._dates: deque[tuple[float, float]] = deque(maxlen=8)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_near = threading.Event()
        self._stepped = first = self._read(counts=True)
        # Two numbers cost less than a Reading, which would hardly ever be read.
        self._raw, self._real = first.raw, first.real
        self._count_at = first.raw + _COUNT_SECONDS
        self.began_at = first.real
        """The wall-clock time of the first reading."""
        self._counts.append(first)

    def start(self) -> None:
        """Start the thread. If no thread is free, nothing is measured."""
        with suppress(RuntimeError):
            threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def stop(self) -> None:
        """End the thread at its next reading."""
        self._stop.set()

    def watch(self, *, is_near: bool) -> None:
        """Set whether an event of this VM is near."""
        if is_near:
            self._is_near.set()
        else:
            self._is_near.clear()

    @property
    def is_near(self) -> bool:
        """Return whether an event of this VM is near."""
        return self._is_near.is_set()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._is_near.wait(_IDLE_SECONDS):
                continue
            try:
                self.sample(None)
                while self._is_near.is_set() and not self._stop.wait(_NEAR_SECONDS):
                    self.sample(_NEAR_SECONDS)
            except Exception:
                logger.exception("The sampler failed. Pauses are not measured.")
                return

    def sample_poll(self, late_seconds: float) -> None:
        """Sample a wait of the poll thread, which ended *late_seconds* after it was due.

        An idle agent then needs no other thread. If an event is near, do nothing.
        """
        if self._is_near.is_set():
            return
        raw, real = self._now()
        has_step = real - self._real - (raw - self._raw) >= MIN_STEP_SECONDS
        if late_seconds >= _NEAR_SECONDS or has_step or raw >= self._count_at:
            self.sample(late_seconds=late_seconds)
        else:  # nothing happened, as in nearly all polls
            self._raw, self._real = raw, real

    def sample(self, wait_seconds: float | None = None, *, late_seconds: float | None = None) -> None:
        """Read the clocks after a wait of *wait_seconds* that ended *late_seconds* late.

        One of the two values is enough. Without either, the wait was not late.
        """
        now = self._read(counts=self._is_near.is_set())
        elapsed = now.raw - self._raw
        if late_seconds is not None:
            wait_seconds = elapsed - late_seconds
        is_late = wait_seconds is not None and elapsed - wait_seconds >= _NEAR_SECONDS
        if now.context_switches is None and (is_late or now.raw >= self._count_at):
            now = self._read(counts=True)
        with self._lock:
            late = Lateness(verdict=Verdict.ON_TIME, seconds=0.0)
            before = Reading(raw=self._raw, real=self._real)
            if is_late and wait_seconds is not None:
                late = lateness(
                    before,
                    now,
                    wait_seconds=wait_seconds,
                    rate=self._rate(),
                    counted=self._counts[-1],
                    cpus=self._cpus,
                )
            self._note(late, before, now)
            self._raw, self._real = now.raw, now.real
            if now.context_switches is not None:
                self._count_at = now.raw + _COUNT_SECONDS
                self._counts.append(now)
                while now.raw - self._counts[0].raw > _RATE_SECONDS and len(self._counts) > 2:  # noqa: PLR2004 - a rate
                    self._counts.popleft()

    def _rate(self) -> float | None:
        first, last = self._counts[0], self._counts[-1]
        if first.context_switches is None or last.context_switches is None or last.raw <= first.raw:
            return None
        return (last.context_switches - first.context_switches) / (last.raw - first.raw)

    def _note(self, late: Lateness, before: Reading, now: Reading) -> None:
        began_at = before.real
        if late.verdict is not Verdict.ON_TIME:
            reason = _UNDECIDED if late.verdict is Verdict.UNDECIDED else None
            self._add(
                Interruption(
                    began_at=began_at,
                    verdict=late.verdict,
                    late_seconds=late.seconds,
                    resolution_seconds=self.resolution_seconds,
                    reason=reason,
                )
            )
        for step in steps_between(before, now):
            self._step(step, began_at)
        if now.host is not None:
            host_only = Reading(raw=self._stepped.raw, real=self._stepped.real, host=self._stepped.host)
            for step in steps_between(host_only, now):
                if step.source == "ptp_hyperv":
                    self._step(step, began_at)
            self._stepped = now

    def _step(self, step: Step, began_at: float) -> None:
        """Report a step that a second clock confirms. The most precise clock sets the length."""
        if confirmed(step, list(self._steps)):
            same = [step, *(each for each in self._steps if confirmed(step, [each]))]
            best = min(same, key=lambda each: ("ptp_hyperv", "realtime", "date_header").index(each.source))
            for each in same[1:]:
                self._steps.remove(each)
            self._add(
                Interruption(
                    began_at=began_at,
                    verdict=Verdict.PAUSED,
                    step_seconds=best.seconds,
                    source=best.source,
                    resolution_seconds=best.resolution_seconds,
                )
            )
        else:
            self._steps.append(step)

    def responded(self, date: str | None) -> None:
        """Compare the ``Date`` of an IMDS response with the clocks, if an event is near."""
        if date is None or not self._is_near.is_set():
            return
        raw, _ = self._now()
        with suppress(ValueError), self._lock:
            offset = parsedate_to_datetime(date).timestamp() - raw
            step = date_step(max(self._dates)[0], offset, raw=raw) if self._dates else None
            if step is not None:
                self._dates.clear()
                self._step(step, self._real)
            self._dates.append((offset, raw))

    def _add(self, found: Interruption) -> None:
        self._found.append(found)
        if found.verdict is Verdict.PAUSED:
            self._on_pause(found.late_seconds + found.step_seconds)

    @property
    def resolution_seconds(self) -> float:
        """Return the length of the shortest pause that the sampler can recognize."""
        return resolution_seconds(self._rate(), self._cpus)

    def interruptions(self, *, since: float) -> list[Interruption]:
        """Return the interruptions that began at *since* (Unix seconds) or later."""
        with self._lock:
            lone = [self._lone(step) for step in self._steps if step.source != "realtime"]
            return [each for each in (*self._found, *lone) if each.began_at >= since]

    def _lone(self, step: Step) -> Interruption:
        return Interruption(
            began_at=self._real - (self._raw - step.raw),
            verdict=Verdict.UNDECIDED,
            step_seconds=step.seconds,
            source=step.source,
            resolution_seconds=step.resolution_seconds,
            reason=_ONE_CLOCK,
        )
