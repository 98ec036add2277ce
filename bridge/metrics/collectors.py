"""Collects event and sink metrics at each Prometheus scrape.

These metrics are read only at scrape time, so they do not slow down polling. All counts in a scrape are taken at the
same moment. For every sink, accepted equals delivered + pending + parked + evicted + discarded + expired.
"""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge.clock import Clock
from bridge.events.event import Document, Incarnation, names_vm
from bridge.outbox import deliveries

if TYPE_CHECKING:  # the portal imports this module and has no outbox
    from bridge.outbox.outbox import Outbox

PREFIX = "scheduled_events_bridge_"

_SCHEDULED = "Scheduled"


class ChannelMetrics:
    """Metrics for the connection to the ops portal. `Metrics.approval_channel` creates them."""

    is_up = False
    last_answer_at = 0.0

    def answered(self, timestamp_seconds: float) -> None:
        """Record the Unix time of a good response from the portal."""
        self.is_up, self.last_answer_at = True, timestamp_seconds

    def failed(self) -> None:
        """Record that the portal gave no good response."""
        self.is_up = False


class StateCollector(Collector):
    """Reports metrics of the events in the last document and of the portal connection."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.document: Document | None = None
        self.vm_name: Callable[[], str | None] = lambda: None
        self.channel: ChannelMetrics | None = None
        """None if no portal is configured. Otherwise, an agent without a portal would seem to have a failing one."""

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
        yield _gauge("identity_known", "1 if the name of this VM is known, otherwise 0.", self.vm_name() is not None)
        channel = self.channel
        if channel is not None:
            yield _gauge("approval_channel_up", "1 if the ops portal responds correctly, otherwise 0.", channel.is_up)
            yield _gauge(
                "approval_channel_last_answer_timestamp_seconds",
                "Unix time of the last good response of the ops portal.",
                channel.last_answer_at,
            )

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
        self.outbox: Outbox | None = None
        self.configured: Callable[[], Collection[str]] = tuple
        """Returns the names of the configured sinks. The outbox can also contain other sinks."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        if self.outbox is not None:
            totals = self.outbox.read(deliveries.totals)
            yield from self._of_sinks(totals, self.outbox.clock.timestamp())
            yield from _of_outbox(self.outbox, totals)

    def _of_sinks(self, totals: deliveries.OutboxTotals, now: float) -> Iterator[Metric]:
        sinks, configured = totals.sinks, self.configured()
        for field, text in self._COUNTERS.items():
            counts = {name: getattr(row, field) for name, row in sinks.items()}
            yield _by_sink(CounterMetricFamily, f"sink_{field}_total", text, counts)
        for field, text in self._GAUGES.items():
            counts = {name: getattr(row, field) for name, row in sinks.items()}
            yield _by_sink(GaugeMetricFamily, f"sink_{field}_records", text, counts)
        expired = CounterMetricFamily(
            f"{PREFIX}sink_expired_by_reason_total",
            "Expired records by reason: age (max_age_seconds), or event_over (a newer record replaced the record).",
            labels=["sink", "reason"],
        )
        for name, row in sinks.items():
            expired.add_metric([name, "age"], row.expired - row.event_over)
            expired.add_metric([name, "event_over"], row.event_over)
        yield expired
        yield _by_sink(
            GaugeMetricFamily,
            "sink_oldest_pending_age_seconds",
            "Age of the oldest pending record in seconds. 0 without pending records.",
            {name: totals.oldest_pending_seconds(name, now) for name in sinks},
        )
        yield _by_sink(
            GaugeMetricFamily,
            "sink_configured",
            "1 if the sink is in the configuration, otherwise 0.",
            {name: name in configured for name in sinks},
        )


def _of_outbox(outbox: Outbox, totals: deliveries.OutboxTotals) -> Iterator[Metric]:
    saver = outbox.saver
    yield _gauge(
        "outbox_behind_seconds", "Seconds since the outbox fell behind. 0 if everything is saved.", saver.behind_seconds
    )
    yield _gauge("outbox_bytes", "Bytes that the outbox uses on disk, including history.", saver.used_bytes)
    yield _gauge("outbox_max_bytes", "Limit of outbox_bytes (state.max_bytes).", outbox.max_bytes)
    yield _gauge("outbox_pending_bytes", "Bytes of undelivered records in memory.", totals.needed_bytes)
    yield _gauge(
        "outbox_max_pending_bytes",
        "Limit of outbox_pending_bytes (state.max_pending_bytes).",
        outbox.max_pending_bytes,
    )
    yield CounterMetricFamily(
        f"{PREFIX}outbox_new_files_total",
        "Files that the agent replaced: damaged, changed by another program, or from another machine.",
        value=saver.file_changes,
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, value=value)


def _by_sink(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, values: Mapping[str, float]
) -> Metric:
    family = kind(f"{PREFIX}{name}", text, labels=["sink"])
    for sink, value in values.items():
        family.add_metric([sink], value)
    return family
