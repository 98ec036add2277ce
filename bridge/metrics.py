"""Every metric of the agent, in one object that is passed in, with a registry of its own.

Two kinds. What happens is counted as it happens, through children that are looked up once: finding one by its labels
costs more than a poll may. What *is* (the document, the outbox's totals) is read when somebody scrapes. The totals of
all sinks come from one snapshot, so that in every scrape, for every sink,
accepted = delivered + pending + parked + evicted + discarded + expired.

No label carries an event id: their number has no bound, and they belong into records.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge.errors import BridgeError
from bridge.record import Document, Transition

logger = logging.getLogger(__name__)

PREFIX = "scheduled_events_bridge_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_POLL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 30, 150)
_SEND_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# From an idle agent's milliseconds to an outage of days.
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30, 120, 600, 3_600, 21_600, 86_400, 604_800)
#: Azure names five types and two statuses; whatever a strange document holds, a scrape stays small.
_MOST_KINDS = 32
_LONGEST_LABEL = 64
_OTHER = "other"


class SinkTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One sink's rows in the outbox, as its accounts hold them across restarts."""

    accepted: int = 0
    delivered: int = 0
    pending: int = 0
    parked: int = 0
    evicted: int = 0
    discarded: int = 0
    expired: int = 0
    oldest_pending_age_seconds: float = 0.0
    """How long the oldest pending record has waited; 0 when none is pending."""


#: One consistent snapshot: totals by sink name.
TotalsReader = Callable[[], Mapping[str, SinkTotals]]


class _Observer(Protocol):
    def observe(self, amount: float) -> None: ...


class SinkMetrics:
    """What one sink's worker counts. Made by `Metrics.sink`."""

    def __init__(self, name: str, *, durations: _Observer, latencies: _Observer, retries: Counter, need: Gauge) -> None:
        self._name = name
        self._durations = durations
        self._latencies = latencies
        self._retries = retries
        self._need = need
        self._by_reason: dict[str, Counter] = {}

    def sent(self, duration_seconds: float) -> None:
        """Count one send, whatever came of it."""
        self._durations.observe(duration_seconds)

    def delivered(self, latency_seconds: float) -> None:
        """Count one record accepted this long after it was observed; a clock set back counts as 0."""
        self._latencies.observe(max(0.0, latency_seconds))

    def retried(self, reason: str) -> None:
        """Count one failure that is tried again; *reason* is one of a few fixed words."""
        child = self._by_reason.get(reason)
        if child is None:
            child = self._by_reason[reason] = self._retries.labels(self._name, reason)
        child.inc()

    def set_needs_attention(self, *, needed: bool) -> None:
        """Say whether a person must act before this sink delivers again."""
        self._need.set(1 if needed else 0)


class Metrics:
    """Every metric, and the registry that holds them."""

    def __init__(self) -> None:
        # The time each counter was made doubles the series and tells nobody anything.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._lock = threading.Lock()
        self._sinks: dict[str, SinkMetrics] = {}
        self._make_poll_metrics()
        self._make_sink_metrics()
        self._info = self._gauge("build_info", "1; the labels say what runs.", "version", "python")
        self._info.labels(_version(), platform.python_version()).set(1)
        self._state = _StateCollector()
        self._totals = _TotalsCollector()
        self.registry.register(self._state)
        self.registry.register(self._totals)

    def _make_poll_metrics(self) -> None:
        polls = self._counter("polls", "Polls of the metadata service, by result.", "result")
        self._polls = polls
        self._polls_by_result = {"ok": polls.labels("ok")}
        self._poll_durations = Histogram(
            f"{PREFIX}poll_duration_seconds",
            "From request to answer, in seconds.",
            buckets=_POLL_BUCKETS,
            registry=self.registry,
        )
        self._last_good = self._gauge("last_good_poll_timestamp_seconds", "Unix time of the last good answer.")
        records = self._counter("records", "Transition records made, by transition.", "transition")
        self._records = {transition: records.labels(transition.value) for transition in Transition}

    def _make_sink_metrics(self) -> None:
        self._retries = self._counter("sink_retries", "Sends that failed and are tried again.", "sink", "reason")
        self._need = self._gauge("sink_needs_attention", "1 while a person must act before the sink delivers.", "sink")
        self._durations = Histogram(
            f"{PREFIX}sink_send_duration_seconds",
            "One send, from call to return, in seconds.",
            ["sink"],
            buckets=_SEND_BUCKETS,
            registry=self.registry,
        )
        self._latencies = Histogram(
            f"{PREFIX}sink_delivery_latency_seconds",
            "From observing a change to its acceptance by the sink, in seconds.",
            ["sink"],
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )

    def _counter(self, noun: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{noun}_total", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{PREFIX}{name}", text, labels, registry=self.registry)

    def polled(self, result: str, *, duration_seconds: float) -> None:
        """Count one poll; *result* is ``ok`` or one of a few fixed words for why not."""
        child = self._polls_by_result.get(result)
        if child is None:
            child = self._polls_by_result[result] = self._polls.labels(result)
        child.inc()
        self._poll_durations.observe(duration_seconds)

    def good_poll(self, timestamp_seconds: float, document: Document) -> None:
        """Note a good answer, its Unix time, and the document that is now believed."""
        self._last_good.set(timestamp_seconds)
        self._state.document = document

    def recorded(self, transition: Transition) -> None:
        """Count one new transition record."""
        self._records[transition].inc()

    def sink(self, name: str) -> SinkMetrics:
        """Return the metrics of the sink called *name*, the same object each time."""
        with self._lock:
            if name not in self._sinks:
                self._sinks[name] = SinkMetrics(
                    name,
                    durations=self._durations.labels(name),
                    latencies=self._latencies.labels(name),
                    retries=self._retries,
                    need=self._need.labels(name),
                )
            return self._sinks[name]

    def register_totals(self, read: TotalsReader) -> None:
        """Take the outbox's totals from *read*, called once for each scrape."""
        self._totals.read = read

    def exposition(self) -> bytes:
        """Return every metric in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)


def _version() -> str:
    try:
        return version("scheduled-events-bridge")
    except PackageNotFoundError:
        return "unknown"


class _StateCollector(Collector):
    """What the agent believes in, read from the document when somebody asks."""

    def __init__(self) -> None:
        self.document: Document | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        document = self.document
        incarnation = GaugeMetricFamily(
            f"{PREFIX}document_incarnation", "The document's incarnation; absent when it is no number."
        )
        active = GaugeMetricFamily(
            f"{PREFIX}active_events", "Events in the document.", labels=["event_type", "event_status"]
        )
        if document is not None:
            number = _number(document.incarnation)
            if number is not None:
                incarnation.add_metric([], number)
            for (event_type, status), count in sorted(_kinds(document).items()):
                active.add_metric([event_type, status], count)
        yield incarnation
        yield active


def _number(incarnation: object) -> float | None:
    try:
        return float(incarnation) if isinstance(incarnation, int | str) else None
    except (ValueError, OverflowError):
        return None


def _kinds(document: Document) -> Mapping[tuple[str, str], int]:
    tally: Tally[tuple[str, str]] = Tally()
    for event in document.events:
        kind = ((event.event_type or "")[:_LONGEST_LABEL], event.event_status[:_LONGEST_LABEL])
        tally[kind if kind in tally or len(tally) < _MOST_KINDS else (_OTHER, _OTHER)] += 1
    return tally


class _TotalsCollector(Collector):
    """The outbox's accounts, all from one snapshot."""

    _COUNTERS: Mapping[str, str] = {
        "accepted": "Records taken into the outbox for the sink.",
        "delivered": "Records that the sink's destination accepted.",
        "evicted": "Records given up because the outbox was full.",
        "discarded": "Records that a person discarded.",
        "expired": "Records older than the sink's max_age_seconds.",
    }
    _GAUGES: Mapping[str, str] = {"pending": "Records that wait to be sent.", "parked": "Records refused for good."}

    def __init__(self) -> None:
        self.read: TotalsReader | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        try:
            totals = self.read() if self.read is not None else {}
        except BridgeError as exc:
            # The other metrics must still be seen, now of all times; absent totals are an alert of their own.
            logger.warning("The outbox's totals cannot be read for a scrape: %s", exc)
            totals = {}
        for field, text in self._COUNTERS.items():
            yield _family(CounterMetricFamily(f"{PREFIX}sink_{field}_total", text, labels=["sink"]), totals, field)
        for field, text in self._GAUGES.items():
            yield _family(GaugeMetricFamily(f"{PREFIX}sink_{field}_records", text, labels=["sink"]), totals, field)
        oldest = "How long the oldest pending record has waited, in seconds; 0 when none is pending."
        name = f"{PREFIX}sink_oldest_pending_age_seconds"
        yield _family(GaugeMetricFamily(name, oldest, labels=["sink"]), totals, "oldest_pending_age_seconds")


def _family(
    family: CounterMetricFamily | GaugeMetricFamily, totals: Mapping[str, SinkTotals], field: str
) -> CounterMetricFamily | GaugeMetricFamily:
    for sink, held in totals.items():
        family.add_metric([sink], getattr(held, field))
    return family
