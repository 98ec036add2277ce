"""Every metric of the portal, in one object that is passed in, with a registry of its own.

No label carries an event, a VM or a name: their number has no bound.
"""

from __future__ import annotations

import platform

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from bridge.metrics.metrics import CONTENT_TYPE, own_version

__all__ = ["CONTENT_TYPE", "PREFIX", "PortalMetrics"]

PREFIX = "scheduled_events_portal"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class PortalMetrics:
    """Every metric, and the registry that holds them."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        info = Gauge(
            f"{PREFIX}_build_info", "1; the labels say what runs.", ["version", "python"], registry=self.registry
        )
        info.labels(own_version(), platform.python_version()).set(1)
        self._requests = Counter(
            f"{PREFIX}_requests", "Answers, by route and status.", ["route", "status"], registry=self.registry
        )
        self._answers: dict[tuple[str, int], Counter] = {}
        self._refused = Counter(
            f"{PREFIX}_callers_refused", "Callers that were not let in, by reason.", ["reason"], registry=self.registry
        )
        self._cut = Counter(
            f"{PREFIX}_connections_cut",
            "Connections that were aborted because a request exceeded a limit.",
            registry=self.registry,
        )
        self._documents = Counter(
            f"{PREFIX}_attested_documents",
            "Attested documents that agents showed, by what came of them.",
            ["result"],
            registry=self.registry,
        )
        self._records = Counter(
            f"{PREFIX}_records", "Records that came, those that came before included.", registry=self.registry
        )
        self.ingest_seconds = Histogram(
            f"{PREFIX}_ingest_seconds",
            "Seconds to store what one request brought.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._refused_decisions = Counter(
            f"{PREFIX}_decisions_refused",
            "Signed decisions that were brought and not taken, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.held_polls = Gauge(f"{PREFIX}_held_polls", "Polls of agents that wait.", registry=self.registry)
        self._vms = Gauge(f"{PREFIX}_vms", "VMs that a record ever came from.", registry=self.registry)
        self._open_events = Gauge(f"{PREFIX}_open_events", "Events that are not over.", registry=self.registry)

    def answered(self, route: str, status: int) -> None:
        """Count one answer; *route* is one of a few fixed words."""
        answers = self._answers.get((route, status))
        if answers is None:  # to look it up by its labels takes as long as much of an answer
            answers = self._answers[route, status] = self._requests.labels(route, str(status))
        answers.inc()

    def cut(self) -> None:
        """Count one connection that was ended without an answer."""
        self._cut.inc()

    def refused(self, reason: str) -> None:
        """Count one caller that was not let in; *reason* is one of a few fixed words."""
        self._refused.labels(reason).inc()

    def attested(self, result: str) -> None:
        """Count one attested document; *result* is `accepted`, `busy`, or the word of a refusal."""
        self._documents.labels(result).inc()

    def refused_decision(self, reason: str) -> None:
        """Count one signed decision that was not taken; *reason* is a `RefusalReason`."""
        self._refused_decisions.labels(reason).inc()

    def received(self, count: int) -> None:
        """Count records that came and are stored."""
        self._records.inc(count)

    def show(self, numbers: dict[str, int]) -> None:
        """Set what the database counts (`bridge.portal.store.events.numbers`)."""
        self._vms.set(numbers["vms"])
        self._open_events.set(numbers["open_events"])

    def page(self) -> bytes:
        """Return the page that Prometheus reads."""
        return generate_latest(self.registry)
