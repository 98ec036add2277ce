"""The collectors of what is read at each scrape: the events of the last document, and the sinks' accounts.

Such metrics cost the poll nothing, cannot go stale, and the totals of all sinks come from one snapshot, so that in
every scrape accepted = delivered + pending + parked + evicted + discarded + expired holds for every sink.
"""

from __future__ import annotations

import logging
import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge.clock import Clock
from bridge.errors import BridgeError
from bridge.events.event import Document, Incarnation, names_vm
from bridge.logs import ThrottledLog
from bridge.outbox.deliveries import OutboxTotals

logger = logging.getLogger(__name__)

PREFIX = "scheduled_events_bridge_"

#: Azure names five types and two statuses; whatever a strange document holds, a scrape stays small.
_MOST_KINDS = 32
_LONGEST_LABEL = 64
_OTHER = "other"
_SCHEDULED = "Scheduled"


class OutboxReading(msgspec.Struct, frozen=True, kw_only=True):
    """The outbox as one scrape shows it."""

    totals: OutboxTotals = OutboxTotals()
    """Every sink's account, from one commit."""
    ages_now: float | None = None
    """The time by which records age, in Unix seconds; None: that of the wall clock."""
    configured: frozenset[str] = frozenset()
    """The sinks that the configuration names; the outbox may know others."""
    max_bytes: int = 0
    in_memory: bool = False
    set_aside: int = 0


#: Reads one consistent snapshot; raises BridgeError, and never waits for long.
OutboxReader = Callable[[], OutboxReading]


class StateCollector(Collector):
    """The last document's events, and whether this VM's name is known."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.document: Document | None = None
        self.vm_name: Callable[[], str | None] = lambda: None

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not read anything yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
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
        yield self._ahead(document)
        known = GaugeMetricFamily(f"{PREFIX}identity_known", "1 while this VM's name is known.")
        known.add_metric([], self.vm_name() is not None)
        yield known

    def _ahead(self, document: Document | None) -> Metric:
        ahead = GaugeMetricFamily(
            f"{PREFIX}next_not_before_seconds",
            "Seconds to the soonest NotBefore of a Scheduled event that names this VM, or none; negative once passed.",
            labels=["event_type"],
        )
        now, name = self._clock.timestamp(), self.vm_name()
        soonest: dict[str, float] = {}
        for event in () if document is None else document.events:
            if event.event_status != _SCHEDULED or event.not_before is None or names_vm(event, name) is False:
                continue
            kind = _label(event.event_type or "")
            kind = kind if kind in soonest or len(soonest) < _MOST_KINDS else _OTHER
            left = event.not_before.timestamp() - now
            soonest[kind] = min(left, soonest.get(kind, left))
        for kind, left in sorted(soonest.items()):
            ahead.add_metric([kind], left)
        return ahead


def _number(incarnation: Incarnation) -> float | None:
    text = str(incarnation)
    return float(text) if re.fullmatch(r"-?[0-9]{1,300}", text) else None


def _kinds(document: Document) -> Mapping[tuple[str, str], int]:
    tally: Tally[tuple[str, str]] = Tally()
    for event in document.events:
        kind = (_label(event.event_type or ""), _label(event.event_status))
        tally[kind if kind in tally or len(tally) < _MOST_KINDS else (_OTHER, _OTHER)] += 1
    return tally


def _label(text: str) -> str:
    # A lone surrogate would fail the whole scrape.
    return text[:_LONGEST_LABEL].encode(errors="backslashreplace").decode()


class OutboxCollector(Collector):
    """The sinks' accounts and the size of the outbox, all from one snapshot."""

    _COUNTERS: Mapping[str, str] = {
        "accepted": "Records taken into the outbox for the sink.",
        "delivered": "Records that the sink's destination accepted.",
        "evicted": "Records given up because the outbox was full.",
        "discarded": "Records that a person discarded.",
        "expired": "Records too old for the sink (max_age_seconds), or over before it could be told of the event.",
    }
    _GAUGES: Mapping[str, str] = {
        "pending": "Records that wait to be sent.",
        "parked": "Records refused for good.",
    }

    def __init__(self, clock: Clock) -> None:
        self.read: OutboxReader | None = None
        self._clock = clock
        self._log = ThrottledLog(logger)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not read anything yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape; without values when the outbox cannot be read."""
        reading = self._reading()
        yield from self._of_sinks(OutboxReading() if reading is None else reading)
        yield from self._of_outbox(reading)

    def _of_sinks(self, reading: OutboxReading) -> Iterator[Metric]:
        totals = reading.totals
        for field, text in self._COUNTERS.items():
            counts = {sink: getattr(account, field) for sink, account in totals.sinks.items()}
            yield _by_sink(CounterMetricFamily(f"{PREFIX}sink_{field}_total", text, labels=["sink"]), counts)
        for field, text in self._GAUGES.items():
            counts = {sink: getattr(account, field) for sink, account in totals.sinks.items()}
            yield _by_sink(GaugeMetricFamily(f"{PREFIX}sink_{field}_records", text, labels=["sink"]), counts)
        yield _expired_by_reason(totals)
        now = self._clock.timestamp() if reading.ages_now is None else reading.ages_now
        yield _by_sink(
            GaugeMetricFamily(
                f"{PREFIX}sink_oldest_pending_age_seconds",
                "How long the oldest pending record has waited, in seconds; 0 when none is pending.",
                labels=["sink"],
            ),
            {sink: totals.oldest_pending_seconds(sink, now) for sink in totals.sinks},
        )
        yield _by_sink(
            GaugeMetricFamily(
                f"{PREFIX}sink_configured",
                "1; or 0 for a sink that the configuration names no more.",
                labels=["sink"],
            ),
            {sink: sink in reading.configured for sink in totals.sinks},
        )

    def _of_outbox(self, reading: OutboxReading | None) -> Iterator[Metric]:
        in_memory = GaugeMetricFamily(
            f"{PREFIX}outbox_in_memory", "1 while the disk refuses, and what is kept would not survive the agent."
        )
        used = GaugeMetricFamily(f"{PREFIX}outbox_bytes", "Bytes of the outbox in use.")
        most = GaugeMetricFamily(f"{PREFIX}outbox_max_bytes", "Bytes that the outbox may use where it lives now.")
        aside = CounterMetricFamily(
            f"{PREFIX}outbox_set_aside_total", "Databases set aside since the start: damaged, or another machine's."
        )
        if reading is not None:
            in_memory.add_metric([], reading.in_memory)
            used.add_metric([], reading.totals.used_bytes)
            most.add_metric([], reading.max_bytes)
            aside.add_metric([], reading.set_aside)
        yield from (in_memory, used, most, aside)

    def _reading(self) -> OutboxReading | None:
        """Return one snapshot; None when there is none: the other metrics must be seen even then."""
        if self.read is None:
            return None
        try:
            reading = self.read()
        except BridgeError as exc:
            self._log.problem("read", logging.WARNING, f"The outbox's totals cannot be read for a scrape: {exc}")
            return None
        self._log.recovered("read", "The outbox's totals can be read again.")
        return reading


def _expired_by_reason(totals: OutboxTotals) -> Metric:
    family = CounterMetricFamily(
        f"{PREFIX}sink_expired_by_reason_total",
        "The expired records by reason: age (max_age_seconds), or event_over, before the sink could be told of it.",
        labels=["sink", "reason"],
    )
    for sink, account in totals.sinks.items():
        over = totals.event_over.get(sink, 0)
        family.add_metric([sink, "age"], account.expired - over)
        family.add_metric([sink, "event_over"], over)
    return family


def _by_sink(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]
) -> CounterMetricFamily | GaugeMetricFamily:
    for sink, value in values.items():
        family.add_metric([sink], value)
    return family
