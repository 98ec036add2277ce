"""What an agent really exported, written as the input of a promtool unit test.

A fault is scraped for a second; a rule wants minutes or hours of it. So each stretch of a story is two real scrapes,
and what happened between them goes on: a counter that rose goes on rising at that rate, an age that grew with the clock
goes on growing, a timestamp that moved with the clock goes on moving, and what stood still stands still. Nothing else
is made up but `up`, which is Prometheus' own, and the clock: promtool's begins at 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

JOB = "scheduled-events-bridge"
PREFIX = "scheduled_events_bridge_"
_MINUTE = 60.0
#: How far from one second a second a change may be and still count as going with the clock.
_TOLERANCE = 0.25
_UP = ("up", ())

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Scrape:
    """One answer of /metrics; *at_seconds* is the wall clock's."""

    at_seconds: float
    values: dict[Key, float]
    counters: frozenset[str]

    def of(self, name: str, **labels: str) -> float | None:
        """Return the value of one series of ours; None when it is not there."""
        return self.values.get((PREFIX + name, tuple(sorted(labels.items()))))

    def sum(self, name: str) -> float:
        """Return the sum of every series of ours called *name*."""
        return sum(value for (found, _), value in self.values.items() if found == PREFIX + name)

    @property
    def names(self) -> frozenset[str]:
        """Return the name of every series."""
        return frozenset(name for name, _ in self.values)


def parse(text: str, at_seconds: float) -> Scrape:
    """Return what Prometheus reads in *text*."""
    values: dict[Key, float] = {}
    counters: set[str] = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name, tuple(sorted(sample.labels.items()))] = float(sample.value)
            if family.type in ("counter", "histogram"):
                counters.add(sample.name)
    return Scrape(at_seconds=at_seconds, values=values, counters=frozenset(counters))


@dataclass(frozen=True)
class Phase:
    """*minutes* that go on as between two scrapes of one agent; without scrapes nobody answers."""

    minutes: int
    scrapes: tuple[Scrape, Scrape] | None = None
    is_target: bool = True
    """False: Prometheus knows of no such agent."""


@dataclass
class _Run:
    """Samples that follow one another a minute apart; without *first* there are none, without *slope* it ended."""

    count: int
    first: float | None = None
    slope: float | None = None

    def continues(self, before: _Run) -> bool:
        return self.slope in (0.0, None) and (self.first, self.slope) == (before.first, before.slope)

    def __str__(self) -> str:
        if self.first is None:
            return f"_x{self.count}"
        slope = self.slope or 0.0
        return f"{_number(self.first)}{'-' if slope < 0 else '+'}{_number(abs(slope))}x{self.count - 1}"


@dataclass
class _Series:
    """One series, as promtool is to read it."""

    runs: list[_Run | str] = field(default_factory=list)
    value: float | None = None
    """The last one written; None while it is absent."""
    real: float | None = None
    """The last one scraped."""
    direction: float = 0.0
    """1 or -1 while it goes with the clock."""

    def is_absent(self, minutes: int) -> None:
        if self.value is not None:
            # So Prometheus ends a series: a value does not linger for five minutes.
            self.runs.append("stale")
            self.value, self.real, self.direction, minutes = None, None, 0.0, minutes - 1
        self._add(_Run(minutes))

    def goes_on(self, first: float, slope: float, minutes: int) -> None:
        self._add(_Run(minutes, first, slope))
        self.value = first + slope * (minutes - 1)

    def _add(self, run: _Run) -> None:
        last = self.runs[-1] if self.runs else None
        if isinstance(last, _Run) and run.continues(last):
            last.count += run.count
        elif run.count:
            self.runs.append(run)


class Timeline:
    """The story of the agent *instance*."""

    def __init__(self, instance: str, phases: Sequence[Phase]) -> None:
        self._instance = instance
        self._series: dict[Key, _Series] = {}
        self.minutes = 0
        for phase in phases:
            self._add(phase)

    def _add(self, phase: Phase) -> None:
        early, late = phase.scrapes or (None, None)
        ours = {} if late is None else late.values
        for key in sorted({_UP, *ours, *self._series}):
            if key not in self._series:
                self._series[key] = _Series()
                self._series[key].is_absent(self.minutes)
            series = self._series[key]
            if key == _UP and phase.is_target:
                series.goes_on(0.0 if late is None else 1.0, 0.0, phase.minutes)
            elif early is not None and late is not None and key in ours:
                first, slope = self._stretched(key, series, early, late)
                series.goes_on(first, slope, phase.minutes)
                series.real = late.values[key]
            else:
                series.is_absent(phase.minutes)
        self.minutes += phase.minutes

    def _stretched(self, key: Key, series: _Series, early: Scrape, late: Scrape) -> tuple[float, float]:
        """Return the first value of a stretch, and how much it changes each minute."""
        name, last = key[0], late.values[key]
        first = early.values.get(key, last)
        rate = (last - first) / (late.at_seconds - early.at_seconds)
        if name == f"{PREFIX}state_on_ephemeral_disk":  # depends on the machine of the test
            return 0.0, 0.0
        if name.endswith("_timestamp_seconds") or name == "process_start_time_seconds":
            return self._timestamp(series, first, rate, early.at_seconds)
        if name in late.counters:
            return _counted(series, first, last), rate * _MINUTE
        if name.endswith("_seconds") and abs(abs(rate) - 1.0) < _TOLERANCE:
            direction = 1.0 if rate > 0 else -1.0
            went_on, series.direction = series.direction == direction, direction
            return (series.value or 0.0) + direction * _MINUTE if went_on else first, direction * _MINUTE
        series.direction = 0.0
        return last, 0.0

    def _timestamp(self, series: _Series, first: float, rate: float, at_seconds: float) -> tuple[float, float]:
        if not first:
            return 0.0, 0.0  # it never happened
        here = self.minutes * _MINUTE - (at_seconds - first)
        if rate > _TOLERANCE:
            return here, _MINUTE
        return series.value if series.value is not None and series.real == first else here, 0.0

    def lines(self, names: Collection[str]) -> list[str]:
        """Return the series called *names* as lines of YAML."""
        return [
            f"- {{series: '{self._shown(key)}', values: '{' '.join(map(str, series.runs))}'}}"
            for key, series in sorted(self._series.items())
            if key[0] in names
        ]

    def _shown(self, key: Key) -> str:
        return labelled(key[0], {**dict(key[1]), "instance": self._instance, "job": JOB})


def _counted(series: _Series, first: float, last: float) -> float:
    """Return what a counter goes on from; the scrapes of the stretch before may be here once more."""
    if series.value is None or series.real is None:
        return first
    if series.real == last:
        return series.value
    return first if first < series.real else series.value + first - series.real


def _number(value: float) -> str:
    return f"{round(value, 3):.3f}".rstrip("0").rstrip(".")


def labelled(name: str, labels: Mapping[str, str]) -> str:
    """Return a series as PromQL writes it."""
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in sorted(labels.items())) + "}"
