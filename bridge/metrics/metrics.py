"""Defines all metrics of the agent in one Prometheus registry.

The agent updates counters and histograms immediately, and `bridge.metrics.collectors` reads all other values at each
scrape. Labeled metrics are cached, because looking them up during each poll would be too slow. Labels never contain an
EventId, because the number of EventIds is unlimited.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from bridge.clock import REAL_CLOCK, Clock
from bridge.events.event import Document
from bridge.events.otel_resource import own_version
from bridge.events.record import Transition
from bridge.metrics.collectors import PREFIX, ChannelMetrics, OutboxCollector, StateCollector

if TYPE_CHECKING:  # the portal imports this module and has no outbox
    from bridge.outbox.outbox import Outbox

__all__ = ["CONTENT_TYPE", "PREFIX", "ChannelMetrics", "Metrics", "SinkMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_POLL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 30, 150)
_PAUSE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60)
_SEND_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# The buckets cover an idle agent (milliseconds) and long outages (days).
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30, 120, 600, 3_600, 21_600, 86_400, 604_800)


class SinkMetrics:
    """The metrics of one sink. `Metrics.sink` creates this object."""

    def __init__(self, name: str, *, durations: Histogram, latencies: Histogram, retries: Counter, need: Gauge) -> None:
        self._name = name
        self._durations = durations
        self._latencies = latencies
        self._retries = retries
        self._need = need
        self.reasons: set[str] = set()
        """All reasons that were counted so far."""
        self.needs_attention = False

    def sent(self, duration_seconds: float) -> None:
        """Record the duration of one send, regardless of its result."""
        self._durations.observe(duration_seconds)

    def delivered(self, latency_seconds: float) -> None:
        """Record the delivery latency of one record in seconds. Negative values count as 0."""
        self._latencies.observe(max(0.0, latency_seconds))

    def retried(self, reason: str) -> None:
        """Count a failed attempt that the agent repeats. *reason* is from a small fixed set."""
        self.reasons.add(reason)
        self._retries.labels(self._name, reason).inc()

    def set_needs_attention(self, *, needed: bool) -> None:
        """Set whether someone must act before this sink can deliver."""
        self.needs_attention = needed
        self._need.set(1 if needed else 0)


class Metrics:
    """All metrics of the agent, and the registry that contains them."""

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        # The creation times of counters would double the number of series and are not useful.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.created_at = clock.timestamp()
        """The start of all totals that do not come from the disk, in Unix seconds."""
        ProcessCollector(registry=self.registry)
        self._sinks: dict[str, SinkMetrics] = {}
        self._make_poll_metrics()
        self._make_sink_metrics()
        self._info = self._gauge("build_info", "1. The labels contain the running versions.", "version", "python")
        self._info.labels(own_version(), platform.python_version()).set(1)
        self._ephemeral = self._gauge(
            "state_on_ephemeral_disk", "1 if a redeploy of the VM would delete the state directory, otherwise 0."
        )
        self._reloaded = self._gauge(
            "config_last_reload_successful", "1 if the last reload of the configuration succeeded, otherwise 0."
        )
        self.reloaded(is_right=True)
        self._state = StateCollector(clock)
        self._outbox = OutboxCollector()
        self.registry.register(self._state)
        self.registry.register(self._outbox)

    def _make_poll_metrics(self) -> None:
        self._polls = self._counter("polls", "Polls of the metadata service, by result.", "result")
        self._good_polls = self._polls.labels("ok")
        self._poll_durations = self._histogram(
            "poll_duration_seconds", "Duration of one poll in seconds.", _POLL_BUCKETS
        )
        self._pauses = self._histogram("impact_pause_seconds", "Measured pauses of this VM in seconds.", _PAUSE_BUCKETS)
        self._last_good = self._gauge("last_good_poll_timestamp_seconds", "Unix time of the last good response.")
        records = self._counter("records", "Transition records, by transition.", "transition")
        self._approvals = self._counter("approvals", "Approval outcomes, by source and result.", "source", "result")
        self._approved_waiting = self._gauge(
            "approved_waiting_seconds",
            "Age in seconds of the oldest accepted approval whose event is still Scheduled. 0 without one.",
        )
        self._unsafe_files = self._gauge(
            "approval_files_unsafe",
            "Files that determine who may approve and that other users can change. If above 0, nothing is approved.",
        )
        self._unusable_keys = self._gauge(
            "approval_keys_unusable",
            "Trusted keys whose file is missing or unusable. Decisions with these keys do not count.",
        )
        self._records = {transition: records.labels(transition.value) for transition in Transition}

    def _make_sink_metrics(self) -> None:
        self._retries = self._counter("sink_retries", "Failed sends that are tried again.", "sink", "reason")
        self._need = self._gauge("sink_needs_attention", "1 if a person must act before the sink can deliver.", "sink")
        self._durations = self._histogram(
            "sink_send_duration_seconds", "Duration of one send in seconds.", _SEND_BUCKETS, "sink"
        )
        self._latencies = self._histogram(
            "sink_delivery_latency_seconds",
            "Time between the observation of a change and its delivery, in seconds.",
            _LATENCY_BUCKETS,
            "sink",
        )

    def _counter(self, noun: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{noun}_total", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{PREFIX}{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"{PREFIX}{name}", text, labels, buckets=buckets, registry=self.registry)

    def polled(self, result: str, *, duration_seconds: float) -> None:
        """Count one poll. *result* is ``ok`` or one of a few fixed error names."""
        (self._good_polls if result == "ok" else self._polls.labels(result)).inc()
        self._poll_durations.observe(duration_seconds)

    def paused(self, seconds: float) -> None:
        """Record a measured pause of this VM."""
        self._pauses.observe(seconds)

    def good_poll(self, timestamp_seconds: float, document: Document) -> None:
        """Record the Unix time of a good response, and the document that the agent now tracks."""
        self._last_good.set(timestamp_seconds)
        self._state.document = document

    def recorded(self, transition: Transition) -> None:
        """Count one new transition record."""
        self._records[transition].inc()

    def approval(self, source: str, result: str) -> None:
        """Count one approval outcome. *source* is ``rule:NAME``, ``portal``, or ``cli``."""
        self._approvals.labels(source, result).inc()

    def approval_files(self, *, unsafe: int, unusable_keys: int) -> None:
        """Report the numbers of unusable keys and of approval files that other users can change."""
        self._unsafe_files.set(unsafe)
        self._unusable_keys.set(unusable_keys)

    def watch_approved(self, seconds: Callable[[], float]) -> None:
        """Report the age of the oldest approval that Azure has not acted on.

        Each scrape calls *seconds*, which returns this age.
        """
        self._approved_waiting.set_function(seconds)

    def sink(self, name: str) -> SinkMetrics:
        """Return the metrics of the sink *name*: the same object for each call."""
        if name not in self._sinks:
            self._sinks[name] = SinkMetrics(
                name,
                durations=self._durations.labels(name),
                latencies=self._latencies.labels(name),
                retries=self._retries,
                need=self._need.labels(name),
            )
        return self._sinks[name]

    def needs_attention(self, name: str) -> bool:
        """Return whether a person must act before the sink *name* can deliver again."""
        sink = self._sinks.get(name)
        return sink is not None and sink.needs_attention

    def forget_sink(self, name: str) -> None:
        """Remove the metrics of a removed sink, because they would keep alerts firing."""
        sink = self._sinks.pop(name, None)
        if sink is not None:
            for metric in (self._durations, self._latencies, self._need):
                metric.remove(name)
            for reason in tuple(sink.reasons):
                self._retries.remove(name, reason)

    def approval_channel(self) -> ChannelMetrics:
        """Return the metrics of the connection to the ops portal, always the same object."""
        if self._state.channel is None:
            self._state.channel = ChannelMetrics()
        return self._state.channel

    def forget_approval_channel(self) -> None:
        """Remove the metrics of a portal that is no longer configured."""
        self._state.channel = None

    def watch_vm(self, name: Callable[[], str | None]) -> None:
        """Set the function that returns the name of this VM, or None if the name is unknown."""
        self._state.vm_name = name

    def state_is_ephemeral(self, *, is_ephemeral: bool) -> None:
        """Set whether redeploying the VM would delete the state directory."""
        self._ephemeral.set(is_ephemeral)

    def reloaded(self, *, is_right: bool) -> None:
        """Set whether the last reload of the configuration succeeded."""
        self.is_reload_successful = is_right
        self._reloaded.set(is_right)

    def watch_outbox(self, outbox: Outbox, configured: Callable[[], Collection[str]]) -> None:
        """Report the state of *outbox*. *configured* returns the names of the configured sinks."""
        self._outbox.outbox, self._outbox.configured = outbox, configured

    def exposition(self) -> bytes:
        """Return all metrics in the text format of Prometheus (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)
