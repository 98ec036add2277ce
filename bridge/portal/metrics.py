"""The metrics of the portal.

No metric has a label for an event, a VM, or a user, because such a label would create too many time series.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from bridge.metrics.metrics import own_version
from bridge.portal.store.events import DECISIONS

PREFIX = "scheduled_events_portal"
_DECISION_SECONDS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class PortalMetrics:
    """All metrics and their registry."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        labels = ("version", "python")
        info = Gauge(f"{PREFIX}_build_info", "1, with the versions as labels.", labels, registry=self.registry)
        info.labels(own_version(), platform.python_version()).set(1)
        self._requests = self._counter("requests", "Responses by route and status.", "route", "status")
        self._answers: dict[tuple[str, int], Counter] = {}
        self.callers_refused = self._counter("callers_refused", "Unauthenticated requests by reason.", "reason")
        self.connections_cut = self._counter(
            "connections_cut", "Connections that were aborted because a request exceeded a limit."
        )
        self.documents = self._counter("attested_documents", "Attested documents of agents by result.", "result")
        self.records = self._counter("records", "Received records, including duplicates.")
        self.records_refused = self._counter("records_refused", "Refused records by reason.", "reason")
        self.decisions_refused = self._counter(
            "decisions_refused", "Refused decisions that were signed elsewhere, by reason.", "reason"
        )
        self.notifications = self._counter(
            "notifications", "Sent notifications by target and result.", "target", "result"
        )
        self.ingest_seconds = Histogram(
            f"{PREFIX}_ingest_seconds",
            "Seconds to store the records of one request.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.open_polls = Gauge(f"{PREFIX}_held_polls", "Open polls of agents.", registry=self.registry)
        self._vms = Gauge(f"{PREFIX}_vms", "VMs that have ever sent a record.", registry=self.registry)
        self._open_events = Gauge(f"{PREFIX}_open_events", "Open events.", registry=self.registry)
        self._decided = Gauge(f"{PREFIX}_events", "Open events by decision.", ["decision"], registry=self.registry)
        self._undecided_soon = Gauge(
            f"{PREFIX}_undecided_soon_events",
            "Undecided events whose NotBefore is less than 10 minutes away.",
            registry=self.registry,
        )
        self.decision_seconds = Histogram(
            f"{PREFIX}_decision_seconds",
            "Seconds from the announcement of an event to the verdict of a person.",
            buckets=_DECISION_SECONDS,
            registry=self.registry,
        )

    def answered(self, route: str, status: int) -> None:
        """Count one response. *route* is one of a few fixed words."""
        answers = self._answers.get((route, status))
        if answers is None:  # the lookup by labels would be a large part of the cost of a poll
            answers = self._answers[route, status] = self._requests.labels(route, str(status))
        answers.inc()

    def show(self, known_vms: int, open_events: int, counts: Mapping[str, int]) -> None:
        """Set the gauges to values from the database."""
        self._vms.set(known_vms)
        self._open_events.set(open_events)
        self._undecided_soon.set(counts["undecided_soon"])
        for decision in DECISIONS:
            self._decided.labels(decision).set(counts[decision])

    def page(self) -> bytes:
        """Return the page for Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", description, labels, registry=self.registry)
