"""The portal's metrics.

No metric has a label for an event, a VM, or a user, because such a label would create too many time series.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from bridge.events.otel_resource import own_version
from bridge.portal.store.events import DECISIONS

_NAMESPACE = "scheduled_events_portal"
_DECISION_SECONDS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class PortalMetrics:
    """All metrics and their registry."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, namespace=_NAMESPACE, registry=self.registry)
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=self.registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=self.registry)
        info = gauge("build_info", "1, with the versions as labels.", ["version", "python"])
        info.labels(own_version(), platform.python_version()).set(1)
        self._requests = counter("requests", "Responses by route and status.", ["route", "status"])
        self._answers: dict[tuple[str, int], Counter] = {}
        self.callers_refused = counter("callers_refused", "Unauthenticated requests by reason.", ["reason"])
        self.connections_cut = counter("connections_cut", "Connections aborted because a request exceeded a limit.")
        self.documents = counter("attested_documents", "Attested documents of agents by result.", ["result"])
        self.records = counter("records", "Received records, including duplicates.")
        self.records_refused = counter("records_refused", "Refused requests with records, by reason.", ["reason"])
        self.decisions_refused = counter("decisions_refused", "Refused decisions signed elsewhere.", ["reason"])
        self.notifications = counter("notifications", "Sent notifications by target and result.", ["target", "result"])
        self.ingest_seconds = histogram(
            "ingest_seconds", "Seconds to store the records of one request.", buckets=_SECONDS
        )
        self.open_polls = gauge("held_polls", "Open polls of agents.")
        self._vms = gauge("vms", "VMs that have ever sent a record.")
        self._open_events = gauge("open_events", "Open events.")
        self._decided = gauge("events", "Open events by decision. A started event is never undecided.", ["decision"])
        self._undecided_soon = gauge(
            "undecided_soon_events", "Undecided events whose NotBefore is less than 10 minutes away."
        )
        self.decision_seconds = histogram(
            "decision_seconds",
            "Seconds from the announcement of an event to the verdict of a person.",
            buckets=_DECISION_SECONDS,
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
