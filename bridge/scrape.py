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
from bridge.record import Document, Incarnation

logger = logging.getLogger(__name__)

PREFIX = "scheduled_events_bridge_"

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


class StateCollector(Collector):
    """What the agent believes in, read from the document when somebody asks."""

    def __init__(self) -> None:
        self.document: Document | None = None

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
        "expired": "Records older than the sink's max_age_seconds.",
    }
    _GAUGES: Mapping[str, str] = {"pending": "Records that wait to be sent.", "parked": "Records refused for good."}

    def __init__(self) -> None:
        self.read: TotalsReader | None = None

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not read anything yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
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
