"""Decides whether a late timer or a clock step was a pause of the VM.

The functions are pure, and follow these rules:

- If a timer is late while other programs run, only the agent stalled. The kernel then counts context switches (`ctxt`
  of /proc/stat) at the usual rate. During a pause of the VM, the count stands still.
- If a hypervisor stops the clocks of a VM together with the VM, no timer is late. Only a clock outside the VM shows
  such a pause: the clock of the host, or the ``Date`` header of IMDS.

A step of the wall clock alone is not a pause, because an administrator or NTP can set the clock.
"""

from __future__ import annotations

from enum import Enum

import msgspec

MIN_LATE_SECONDS = 0.05
#: A shorter delay that cannot be classified counts as scheduler noise.
_MIN_UNDECIDED_SECONDS = 0.5
MIN_STEP_SECONDS = 0.1
#: Shares of the usual context switches. During a measured pause, the share was 0.014.
_STILL, _RUNNING = 0.03, 0.15
#: The usual rate can vary by this share between the last count and the delay.
_NOISE, _MAX_NOISE = 0.2, 0.25
#: The kernel and the interrupted programs switch this often immediately after a pause. Measured: 33 on one CPU.
_BURST, _BURST_PER_CPU = 50, 4
_DATE_RESOLUTION_SECONDS = 1.0
_CONFIRM_SECONDS = 30.0


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The clocks at one moment, in seconds. A clock that cannot be read is None."""

    raw: float
    """CLOCK_MONOTONIC_RAW."""
    real: float
    """CLOCK_REALTIME."""
    context_switches: int | None = None
    host: float | None = None
    """The host's clock, from /dev/ptp_hyperv."""


class Verdict(str, Enum):
    """The meaning of a late timer."""

    ON_TIME = "on_time"
    PAUSED = "paused"
    STALLED = "stalled"
    UNDECIDED = "undecided"


def judge_delay(after: Reading, *, late_seconds: float, rate: float | None, counted: Reading, cpus: int) -> Verdict:
    """Return the cause of a timer that ended at *after*, *late_seconds* late.

    *rate* is the usual number of context switches per second. The function counts the switches between the earlier
    reading *counted* and *after*.
    """
    if late_seconds < MIN_LATE_SECONDS:
        return Verdict.ON_TIME
    expected = None if rate is None else rate * late_seconds
    if expected is not None and counted.context_switches is not None and after.context_switches is not None:
        usual = (rate or 0.0) * max(after.raw - counted.raw - late_seconds, 0.0)
        moved = after.context_switches - counted.context_switches - usual
        burst, noise = _burst(cpus), _NOISE * usual
        if moved >= max(_RUNNING * expected, 2 * burst) + noise:
            return Verdict.STALLED
        if moved <= max(_STILL * expected, burst) + noise and expected >= max(4 * burst, noise / _MAX_NOISE):
            return Verdict.PAUSED
    return Verdict.UNDECIDED if late_seconds >= _MIN_UNDECIDED_SECONDS else Verdict.ON_TIME


def resolution_seconds(rate: float | None, cpus: int) -> float:
    """Return the shortest pause that `judge_delay` can distinguish from a stalled agent."""
    if not rate:
        return _MIN_UNDECIDED_SECONDS
    return min(max(MIN_LATE_SECONDS, 4 * _burst(cpus) / rate), _MIN_UNDECIDED_SECONDS)


def _burst(cpus: int) -> int:
    return _BURST + _BURST_PER_CPU * cpus


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A forward step of one clock relative to CLOCK_MONOTONIC_RAW."""

    source: str
    """ptp_hyperv, realtime, or date_header."""
    raw: float
    """CLOCK_MONOTONIC_RAW at which the step was seen."""
    seconds: float

    @property
    def resolution_seconds(self) -> float:
        """Return the uncertainty of *seconds*."""
        return _DATE_RESOLUTION_SECONDS if self.source == "date_header" else MIN_STEP_SECONDS


def steps_between(before: Reading, after: Reading) -> list[Step]:
    """Return the forward steps of the host's clock and of the wall clock."""
    elapsed = after.raw - before.raw
    found = [Step(source="realtime", raw=after.raw, seconds=after.real - before.real - elapsed)]
    if before.host is not None and after.host is not None:
        found.insert(0, Step(source="ptp_hyperv", raw=after.raw, seconds=after.host - before.host - elapsed))
    return [step for step in found if step.seconds >= MIN_STEP_SECONDS]


def date_step(before: float, after: float, *, raw: float) -> Step | None:
    """Return the step of the IMDS clock, which is a rise of its offset to the monotonic clock.

    The ``Date`` header has a resolution of one second, so the offsets of two responses can differ by up to one second
    even if no clock has stepped.
    """
    seconds = after - before
    is_step = seconds > 2 * _DATE_RESOLUTION_SECONDS
    return Step(source="date_header", raw=raw, seconds=seconds) if is_step else None


def confirmed(step: Step, others: list[Step]) -> bool:
    """Return whether another clock shows the same step within 30 s."""
    return any(
        other.source != step.source
        and abs(other.raw - step.raw) <= _CONFIRM_SECONDS
        and abs(other.seconds - step.seconds) <= max(other.resolution_seconds, step.resolution_seconds)
        for other in others
    )
