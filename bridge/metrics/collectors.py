"""Collects event and sink metrics at each Prometheus scrape.

These metrics are read only at scrape time, so they do not slow down polling. All counts in a scrape are taken at the
same moment. For every sink, accepted equals delivered + pending + parked + evicted + discarded + expired.
"""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge.clock import Clock
from bridge.events.event import Document, Incarnation, names_vm
from bridge.outbox.deliveries import OutboxTotals

PREFIX = "scheduled_events_bridge_"

_SCHEDULED = "Scheduled"


class OutboxReading(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the outbox at one scrape."""

    totals: OutboxTotals
    now: float
    """Unix seconds."""
    configured: frozenset[str] = frozenset()
    """The names of the configured sinks. The outbox can also contain other sinks."""
    used_bytes: int = 0
    max_bytes: int = 0
    max_pending_bytes: int = 0
    behind_seconds: float = 0.0
    new_files: int = 0

    def oldest_pending_seconds(self, sink: str) -> float:
        """Return the age of the oldest pending record of *sink* in seconds; 0 if none."""
        return max(self.now - self.totals.oldest_pending_at.get(sink, self.now), 0.0)


OutboxReader = Callable[[], OutboxReading]


class StateCollector(Collector):
    """Reports the events in the last document, and whether this VM's name is known."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.document: Document | None = None
        self.vm_name: Callable[[], str | None] = lambda: None

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because Prometheus calls this method before the values can be read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        document = self.document
        incarnation = GaugeMetricFamily(
            f"{PREFIX}document_incarnation", "Incarnation of the document. Absent if the incarnation is not a number."
        )
        active = GaugeMetricFamily(
            f"{PREFIX}active_events", "Events in the document.", labels=["event_type", "event_status"]
        )
        if document is not None:
            number = _number(document.incarnation)
            if number is not None:
                incarnation.add_metric([], number)
            kinds = Tally((event.event_type or "", event.event_status) for event in document.events)
            for kind, count in sorted(kinds.items()):
                active.add_metric(kind, count)
        yield incarnation
        yield active
        yield self._ahead(document)
        known = GaugeMetricFamily(f"{PREFIX}identity_known", "1 if the name of this VM is known, otherwise 0.")
        known.add_metric([], self.vm_name() is not None)
        yield known

    def _ahead(self, document: Document | None) -> Metric:
        ahead = GaugeMetricFamily(
            f"{PREFIX}next_not_before_seconds",
            "Seconds to the earliest NotBefore of a Scheduled event that names this VM or no VM. Can be negative.",
            labels=["event_type"],
        )
        now, name = self._clock.timestamp(), self.vm_name()
        soonest: dict[str, float] = {}
        for event in () if document is None else document.events:
            if event.event_status != _SCHEDULED or event.not_before is None or names_vm(event, name) is False:
                continue
            kind = event.event_type or ""
            left = event.not_before.timestamp() - now
            soonest[kind] = min(left, soonest.get(kind, left))
        for kind, left in sorted(soonest.items()):
            ahead.add_metric([kind], left)
        return ahead


def _number(incarnation: Incarnation) -> float | None:
    text = str(incarnation)
    return float(text) if re.fullmatch(r"-?[0-9]{1,300}", text) else None


class OutboxCollector(Collector):
    """Reports sink counts and the outbox size from the same moment."""

    _COUNTERS: Mapping[str, str] = {
        "accepted": "Records added to the outbox for the sink.",
        "delivered": "Records that the destination accepted.",
        "evicted": "Records removed because the outbox was full.",
        "discarded": "Records discarded by a person.",
        "expired": "Records older than max_age_seconds, or replaced by a newer record of their event.",
    }
    FROM_DISK = frozenset(f"{PREFIX}sink_{field}" for field in (*_COUNTERS, "expired_by_reason"))
    """The counters that continue across restarts, because the outbox stores them."""
    _GAUGES: Mapping[str, str] = {
        "pending": "Records that are not sent yet.",
        "parked": "Records that the destination rejected permanently.",
    }

    def __init__(self) -> None:
        self.read: OutboxReader | None = None

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because Prometheus calls this method before the values can be read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        if self.read is not None:
            reading = self.read()
            yield from self._of_sinks(reading)
            yield from self._of_outbox(reading)

    def _of_sinks(self, reading: OutboxReading) -> Iterator[Metric]:
        sinks = reading.totals.sinks
        for field, text in self._COUNTERS.items():
            counts = {name: getattr(row, field) for name, row in sinks.items()}
            yield _by_sink(CounterMetricFamily(f"{PREFIX}sink_{field}_total", text, labels=["sink"]), counts)
        for field, text in self._GAUGES.items():
            counts = {name: getattr(row, field) for name, row in sinks.items()}
            yield _by_sink(GaugeMetricFamily(f"{PREFIX}sink_{field}_records", text, labels=["sink"]), counts)
        yield _expired_by_reason(reading.totals)
        yield _by_sink(
            GaugeMetricFamily(
                f"{PREFIX}sink_oldest_pending_age_seconds",
                "Age of the oldest pending record in seconds. 0 without pending records.",
                labels=["sink"],
            ),
            {name: reading.oldest_pending_seconds(name) for name in sinks},
        )
        yield _by_sink(
            GaugeMetricFamily(
                f"{PREFIX}sink_configured", "1 if the sink is in the configuration, otherwise 0.", labels=["sink"]
            ),
            {name: name in reading.configured for name in sinks},
        )

    def _of_outbox(self, reading: OutboxReading) -> Iterator[Metric]:
        gauges = {
            "outbox_behind_seconds": (
                "Seconds since the outbox fell behind. 0 if everything is saved.",
                reading.behind_seconds,
            ),
            "outbox_bytes": ("Bytes that the outbox uses on disk, including history.", reading.used_bytes),
            "outbox_max_bytes": ("Limit of outbox_bytes (state.max_bytes).", reading.max_bytes),
            "outbox_pending_bytes": ("Bytes of undelivered records in memory.", reading.totals.needed_bytes),
            "outbox_max_pending_bytes": (
                "Limit of outbox_pending_bytes (state.max_pending_bytes).",
                reading.max_pending_bytes,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", text, value=value)
        yield CounterMetricFamily(
            f"{PREFIX}outbox_new_files_total",
            "Files that the agent replaced: damaged, changed by another program, or from another machine.",
            value=reading.new_files,
        )


def _expired_by_reason(totals: OutboxTotals) -> Metric:
    family = CounterMetricFamily(
        f"{PREFIX}sink_expired_by_reason_total",
        "Expired records by reason: age (max_age_seconds), or event_over (a newer record replaced the record).",
        labels=["sink", "reason"],
    )
    for name, row in totals.sinks.items():
        family.add_metric([name, "age"], row.expired - row.event_over)
        family.add_metric([name, "event_over"], row.event_over)
    return family


def _by_sink(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]
) -> CounterMetricFamily | GaugeMetricFamily:
    for sink, value in values.items():
        family.add_metric([sink], value)
    return family
