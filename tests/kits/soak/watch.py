"""Looks at an agent from outside: its memory, threads and descriptors, and once a second what it says of itself.

/proc is read ten times as often as the agent is scraped, because what is open only for a moment (a command that runs
has ten descriptors) must not hide how much is open all the time.
"""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

_EVERY_SECONDS = 0.1
_LOOKS_A_SCRAPE = 10
_SINK_TOTAL = re.compile(
    r"^scheduled_events_bridge_sink_(accepted|delivered|pending|parked|evicted|discarded|expired)_(?:total|records)"
    r'\{sink="([^"]+)"\} (\S+)$',
    re.MULTILINE,
)


class Sample(NamedTuple):
    """One look at /proc."""

    seconds: float
    rss_mb: float
    threads: int
    descriptors: int


class Watch:
    """Samples process *pid* and its listener at *authority*, from `start` to `stop`."""

    def __init__(self, pid: int, authority: str) -> None:
        self._proc = Path(f"/proc/{pid}")
        self._authority = authority
        self._began_at = time.monotonic()
        self.samples: list[Sample] = []
        self.scrapes = 0
        self.amiss: list[str] = []
        """What a scrape should not have said, each thing once."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; the process may go now."""
        self._stop.set()
        self._thread.join(30)

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process took so far, without that of its children."""
        fields = (self._proc / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self.samples.append(self._look())
            if len(self.samples) % _LOOKS_A_SCRAPE == 0:
                self._scrape()

    def _look(self) -> Sample:
        resident_pages = int((self._proc / "statm").read_text(encoding="ascii").split()[1])
        return Sample(
            time.monotonic() - self._began_at,
            resident_pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            sum(1 for _ in (self._proc / "task").iterdir()),
            sum(1 for _ in (self._proc / "fd").iterdir()),
        )

    def _scrape(self) -> None:
        health = self._get("/healthz")
        metrics = self._get("/metrics")
        totals = totals_of(metrics)
        wrong = {sink: held for sink, held in totals.items() if held["accepted"] != sum(held.values()) / 2}
        if not health.startswith("200"):
            self._note(f"/healthz: {health}")
        if not totals:
            self._note(f"/metrics has no totals: {metrics[:200]}")
        if wrong:
            self._note(f"accepted is not the sum of the others: {wrong}")
        self.scrapes += 1

    def _note(self, text: str) -> None:
        if text not in self.amiss:
            self.amiss.append(text)

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://{self._authority}{path}", timeout=10) as answer:
                return f"{answer.status}\n{answer.read().decode()}"
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code}\n{error.read().decode()}"
        except OSError as error:
            return f"no answer: {error}"


def totals_of(metrics: str) -> dict[str, dict[str, float]]:
    """Return sink -> state -> records from the text of /metrics."""
    totals: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for state, sink, value in _SINK_TOTAL.findall(metrics):
        totals[sink][state] = float(value)
    return dict(totals)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope between any two *points* (Theil and Sen): a single odd point does not tilt it."""
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))


def lows(samples: Sequence[Sample], *, every_seconds: float) -> list[tuple[float, float]]:
    """Return (seconds, the least RSS) of each window of *samples*: what is free to be used again is not growth."""
    windows: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        windows[int(sample.seconds // every_seconds)].append(sample)
    return [(min(each).seconds, min(sample.rss_mb for sample in each)) for each in windows.values()]
