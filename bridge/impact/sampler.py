"""Detects pauses of the VM by comparing its clocks, and keeps the most recent pauses.

From 10 s before an event of this VM until its end, a separate thread reads the clocks every 50 ms. At other times, the
poll thread reads the clocks after its own waits, because waking a separate thread would use more CPU time.
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

import msgspec

from bridge.impact.judgement import (
    MIN_LATE_SECONDS,
    Reading,
    Step,
    Verdict,
    confirmed,
    date_step,
    judge_delay,
    resolution_seconds,
    steps_between,
)

logger = logging.getLogger(__name__)

_IDLE_SECONDS, _NEAR_SECONDS = 60.0, 0.05
#: Reading /proc/stat costs more than a poll may, so an idle sampler reads it rarely. While an event is near, the
#: interval is the shortest time in which the count can show a pause.
_IDLE_READ_SECONDS = 5.0
_RATE_SECONDS = 60.0
KEPT_SECONDS = 600.0
_STAT_BYTES = 8192
_RAW = getattr(time, "CLOCK_MONOTONIC_RAW", None)
_UNDECIDED = "The number of context switches does not show whether the VM or only the agent stood still."
_ONE_CLOCK = "Only one clock outside the VM shows the pause."


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of the VM, a stall of the agent, or a delay whose cause is unknown.

    Times are in Unix seconds.
    """

    began_at: float
    verdict: Verdict
    late_seconds: float = 0.0
    step_seconds: float = 0.0
    source: str = "timer"
    resolution_seconds: float = 0.0
    reason: str | None = None


class SystemClocks:
    """Reads the clocks of this machine."""

    def __init__(self) -> None:
        self._stat = self._host = -1
        self._stat_bytes = _STAT_BYTES
        with suppress(OSError):
            self._stat = os.open("/proc/stat", os.O_RDONLY)
        with suppress(OSError):
            self._host = os.open("/dev/ptp_hyperv", os.O_RDONLY)

    def raw(self) -> float:
        """Return CLOCK_MONOTONIC_RAW."""
        return time.monotonic() if _RAW is None else time.clock_gettime(_RAW)

    def read(self) -> Reading:
        """Return all clocks and the number of context switches."""
        return Reading(
            raw=self.raw(), real=time.time(), context_switches=self._context_switches(), host=self._host_time()
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
        clocks: SystemClocks | None = None,
        cpus: int | None = None,
    ) -> None:
        self._on_pause = on_pause
        clocks = clocks or SystemClocks()
        self._now, self._read = clocks.raw, clocks.read
        self._cpus = cpus or os.cpu_count() or 1
        self._steps: deque[Step] = deque(maxlen=16)
        self._found: deque[Interruption] = deque(maxlen=256)
        self._dates: deque[tuple[float, float]] = deque(maxlen=8)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_near = threading.Event()
        first = self._read()
        self._readings = deque([first])
        self._raw = first.raw
        """The end of the last wait, on CLOCK_MONOTONIC_RAW."""
        self._read_at = first.raw + _IDLE_READ_SECONDS
        self.began_at = first.real
        """The wall-clock time of the first reading."""

    def start(self) -> None:
        """Start the thread. If no thread is free, nothing is measured."""
        with suppress(RuntimeError):
            threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def stop(self) -> None:
        """End the thread at its next reading."""
        self._stop.set()

    def watch(self, *, is_near: bool) -> None:
        """Set whether an event of this VM is near."""
        if not is_near:
            self._is_near.clear()
        elif not self._is_near.is_set():
            self._read_at = 0.0
            self._is_near.set()

    @property
    def is_near(self) -> bool:
        """Return whether an event of this VM is near."""
        return self._is_near.is_set()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._is_near.wait(_IDLE_SECONDS):
                continue
            try:
                self._compare(self._now(), 0.0)
                while self._is_near.is_set() and not self._stop.is_set():
                    time.sleep(_NEAR_SECONDS)  # costs less than a wait for an event
                    self.sample_wait(_NEAR_SECONDS)
            except Exception:
                logger.exception(
                    "The thread that measures pauses near events failed. To measure them again, restart the agent."
                )
                return

    def sample_poll(self, late_seconds: float) -> None:
        """Check whether the VM was paused while the poll thread waited.

        *late_seconds* is how late the wait ended. While an event is near, the method does nothing, because the
        sampler's own thread checks for pauses.
        """
        if not self._is_near.is_set():
            self._compare(self._now(), late_seconds)

    def sample_wait(self, wait_seconds: float) -> None:
        """Check whether the VM was paused while the sampler's thread waited.

        *wait_seconds* is the intended duration of the wait.
        """
        raw = self._now()
        self._compare(raw, raw - self._raw - wait_seconds)

    def _compare(self, raw: float, late_seconds: float) -> None:
        """Read all clocks if the wait ended late or the next reading is due."""
        if late_seconds >= MIN_LATE_SECONDS or raw >= self._read_at:
            self._sample(late_seconds)
        else:
            self._raw = raw

    def _sample(self, late_seconds: float) -> None:
        now = self._read()
        with self._lock:
            last = self._readings[-1]
            verdict = judge_delay(now, late_seconds=late_seconds, rate=self._rate(), counted=last, cpus=self._cpus)
            if verdict is not Verdict.ON_TIME:
                self._add(
                    Interruption(
                        began_at=self._real(self._raw),
                        verdict=verdict,
                        late_seconds=late_seconds,
                        resolution_seconds=self.resolution_seconds,
                        reason=_UNDECIDED if verdict is Verdict.UNDECIDED else None,
                    )
                )
            for step in steps_between(last, now):
                self._step(step, last.real)
            self._raw = now.raw
            self._readings.append(now)
            while now.raw - self._readings[0].raw > _RATE_SECONDS and len(self._readings) > 2:  # noqa: PLR2004 - a rate
                self._readings.popleft()
            self._read_at = now.raw + (self.resolution_seconds if self._is_near.is_set() else _IDLE_READ_SECONDS)

    def _rate(self) -> float | None:
        first, last = self._readings[0], self._readings[-1]
        if first.context_switches is None or last.context_switches is None or last.raw <= first.raw:
            return None
        return (last.context_switches - first.context_switches) / (last.raw - first.raw)

    def _step(self, step: Step, began_at: float) -> None:
        """Report a step that a second clock confirms.

        The reported length comes from the most precise clock that shows the step.
        """
        if confirmed(step, list(self._steps)):
            same = [step, *(each for each in self._steps if confirmed(step, [each]))]
            best = min(same, key=lambda each: ("ptp_hyperv", "realtime", "date_header").index(each.source))
            for each in same[1:]:
                self._steps.remove(each)
            self._add(_of_step(best, Verdict.PAUSED, began_at))
        else:
            self._steps.append(step)

    def responded(self, date: str | None) -> None:
        """While an event is near, compare the ``Date`` header of IMDS with the VM's clock."""
        if date is None or not self._is_near.is_set():
            return
        raw = self._now()
        with suppress(ValueError), self._lock:
            offset = parsedate_to_datetime(date).timestamp() - raw
            step = date_step(max(self._dates)[0], offset, raw=raw) if self._dates else None
            if step is not None:
                self._dates.clear()
                self._step(step, self._real(raw))
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
            steps = [step for step in self._steps if step.source != "realtime"]
            lone = [_of_step(step, Verdict.UNDECIDED, self._real(step.raw), reason=_ONE_CLOCK) for step in steps]
            return [each for each in (*self._found, *lone) if each.began_at >= since]

    def _real(self, raw: float) -> float:
        """Return the wall-clock time at *raw* on CLOCK_MONOTONIC_RAW."""
        last = self._readings[-1]
        return last.real + raw - last.raw


def _of_step(step: Step, verdict: Verdict, began_at: float, *, reason: str | None = None) -> Interruption:
    return Interruption(
        began_at=began_at,
        verdict=verdict,
        step_seconds=step.seconds,
        source=step.source,
        resolution_seconds=step.resolution_seconds,
        reason=reason,
    )
