"""What is read only when somebody scrapes: the document that is believed, and the outbox's totals.

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

from bridge.errors import BridgeError
from bridge.events.event import Document, Incarnation, names_vm
from bridge.logs import ThrottledLog

logger = logging.getLogger(__name__)

PREFIX = "scheduled_events_bridge_"

#: Azure names five types and two statuses; whatever a strange document holds, a scrape stays small.
_MOST_KINDS = 32
_LONGEST_LABEL = 64
_OTHER = "other"
_SCHEDULED = "Scheduled"


class SinkTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One sink's rows in the outbox, as its accounts hold them across restarts."""

    is_configured: bool = True
    """False for a sink that the configuration names no more."""

    accepted: int = 0
    delivered: int = 0
    pending: int = 0
    parked: int = 0
    evicted: int = 0
    discarded: int = 0
    expired: int = 0
    oldest_pending_age_seconds: float = 0.0
    """How long the oldest pending record has waited; 0 when none is pending."""


class OutboxTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What the outbox holds, all from one commit."""

    sinks: Mapping[str, SinkTotals]
    used_bytes: int = 0
    max_bytes: int = 0
    in_memory: bool = False
    set_aside: int = 0
    stream_id: str | None = None


#: Reads one consistent snapshot; raises BridgeError, and never waits for long.
TotalsReader = Callable[[], OutboxTotals]


class StateCollector(Collector):
    """What the agent believes in, read from the document when somebody asks."""

    def __init__(self, clock: Callable[[], float]) -> None:
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
        now, name = self._clock(), self.vm_name()
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


class TotalsCollector(Collector):
    """The outbox's accounts, all from one snapshot."""

    _COUNTERS: Mapping[str, str] = {
        "accepted": "Records taken into the outbox for the sink.",
        "delivered": "Records that the sink's destination accepted.",
        "evicted": "Records given up because the outbox was full.",
        "discarded": "Records that a person discarded.",
        "expired": "Records too old for the sink (max_age_seconds), or over before it could be told of the event.",
    }
    _GAUGES: Mapping[str, tuple[str, str]] = {
        "pending": ("sink_pending_records", "Records that wait to be sent."),
        "parked": ("sink_parked_records", "Records refused for good."),
        "oldest_pending_age_seconds": (
            "sink_oldest_pending_age_seconds",
            "How long the oldest pending record has waited, in seconds; 0 when none is pending.",
        ),
        "is_configured": ("sink_configured", "1; or 0 for a sink that the configuration names no more."),
    }
    _OUTBOX: Mapping[str, tuple[str, str]] = {
        "in_memory": ("outbox_in_memory", "1 while the disk refuses, and what is kept would not survive the agent."),
        "used_bytes": ("outbox_bytes", "Bytes of the outbox in use."),
        "max_bytes": ("outbox_max_bytes", "Bytes that the outbox may use where it lives now."),
    }

    def __init__(self) -> None:
        self.read: TotalsReader | None = None
        self._report = ThrottledLog(logger)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not read anything yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        held = self._held()
        sinks = {} if held is None else held.sinks
        for field, text in self._COUNTERS.items():
            yield _family(CounterMetricFamily(f"{PREFIX}sink_{field}_total", text, labels=["sink"]), sinks, field)
        for field, (name, text) in self._GAUGES.items():
            yield _family(GaugeMetricFamily(f"{PREFIX}{name}", text, labels=["sink"]), sinks, field)
        for field, (name, text) in self._OUTBOX.items():
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", text)
            if held is not None:
                gauge.add_metric([], getattr(held, field))
            yield gauge
        aside = CounterMetricFamily(
            f"{PREFIX}outbox_set_aside_total", "Databases set aside since the start: damaged, or another machine's."
        )
        if held is not None:
            aside.add_metric([], held.set_aside)
        yield aside

    def _held(self) -> OutboxTotals | None:
        """Return one snapshot; null when there is none: the other metrics must still be seen, now of all times."""
        if self.read is None:
            return None
        try:
            held = self.read()
        except BridgeError as exc:
            self._report.problem("read", logging.WARNING, f"The outbox's totals cannot be read for a scrape: {exc}")
            return None
        self._report.recovered("read", "The outbox's totals can be read again.")
        return held


def _family(
    family: CounterMetricFamily | GaugeMetricFamily, totals: Mapping[str, SinkTotals], field: str
) -> CounterMetricFamily | GaugeMetricFamily:
    for sink, held in totals.items():
        family.add_metric([sink], getattr(held, field))
    return family
