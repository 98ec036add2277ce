"""Creates the responses of /healthz, /readyz, and /metrics.

/healthz reports whether the agent's main loops are running. It ignores failures of sinks and of the metadata service,
because restarting the agent would not fix them. /readyz reports whether the agent polls, saves the outbox, and delivers
to all sinks. Use /readyz to detect a bad configuration early in a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Protocol

import msgspec

from bridge.clock import format_time
from bridge.health.readiness import (
    Readiness,
    SinkReadiness,
    directory_text,
    why_polling_is_not_ready,
    why_sink_is_not_ready,
)
from bridge.health.server import Response
from bridge.metrics.metrics import CONTENT_TYPE, Metrics, own_version
from bridge.outbox import deliveries
from bridge.outbox.deliveries import OutboxTotals
from bridge.outbox.outbox import Outbox
from bridge.system.threads import LoopWatch

_UNAVAILABLE = 503


class Polled(Protocol):
    """The attributes of the poller that the health pages use."""

    @property
    def silent_seconds(self) -> float | None:
        """Return the seconds since the last good response, or None before the first good response."""

    @property
    def gap_seconds(self) -> float:
        """Return the longest time without a good response that does not make the agent unready."""

    good_at: datetime | None
    refused_answer: str | None
    """The error in the last response, see `bridge.polling.poller.Poller`."""


class HealthReporter:
    """Collects the state of the agent. All methods are thread-safe and return immediately."""

    def __init__(
        self,
        *,
        outbox: Outbox,
        metrics: Metrics,
        directory: Path,
        loop_watches: Callable[[], Mapping[str, LoopWatch]],
        sinks: Callable[[], Collection[str]],
    ) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._directory = directory
        self._loop_watches = loop_watches
        self._sinks = sinks
        self.polled: Polled | None = None
        self.vm_name: Callable[[], str | None] = lambda: None
        self.imds: Callable[[], str] = lambda: ""
        self.configuration: Callable[[], str] = lambda: ""

    @property
    def pages(self) -> Mapping[str, Callable[[], Response]]:
        """Return the methods that create the pages, by path."""
        return {"/healthz": self.healthz, "/readyz": self.readyz, "/metrics": self.scrape}

    def late(self) -> dict[str, float]:
        """Return the delay of each late loop in seconds. The result is empty if no loop is late."""
        late = {name: loop_watch.late_seconds for name, loop_watch in self._loop_watches().items()}
        return {name: round(seconds, 1) for name, seconds in late.items() if seconds > 0}

    def healthz(self) -> Response:
        """Return status 200 if no loop is late, and otherwise 503."""
        late = self.late()
        body = msgspec.json.encode({"status": "stuck" if late else "ok", "late": late})
        return Response(status=_UNAVAILABLE if late else 200, body=body + b"\n")

    def readyz(self) -> Response:
        """Return status 200 if the agent polls, saves, and delivers, and otherwise 503."""
        report = self.report()
        return Response(status=_UNAVAILABLE if report.reasons else 200, body=msgspec.json.encode(report) + b"\n")

    def scrape(self) -> Response:
        """Return all metrics in the Prometheus text format."""
        return Response(content_type=CONTENT_TYPE, body=self._metrics.exposition())

    def report(self) -> Readiness:
        """Return the state of the agent, which is the body of /readyz."""
        polled, totals, saver = self.polled, self._outbox.read(deliveries.totals), self._outbox.saver
        silent = None if polled is None else polled.silent_seconds
        reasons = why_polling_is_not_ready(
            silent,
            gap_seconds=0.0 if polled is None else polled.gap_seconds,
            refused_answer=None if polled is None else polled.refused_answer,
        )
        behind = saver.behind_reason
        if behind is not None:
            reasons.append(f"The outbox is not saved: {behind}")
        sinks = {name: self._sink(name, totals) for name in totals.sinks}
        for name in self._sinks():
            reasons += why_sink_is_not_ready(name, sinks[name]) if name in sinks else []
        good_at = None if polled is None else polled.good_at
        return Readiness(
            status="not_ready" if reasons else "ready",
            reasons=tuple(reasons),
            version=own_version(),
            stream_id=totals.stream_id,
            state_directory=directory_text(self._directory),
            outbox_behind=behind,
            outbox_behind_seconds=round(saver.behind_seconds, 3),
            vm=self.vm_name(),
            imds=self.imds(),
            configuration=self.configuration(),
            configuration_rejected=not self._metrics.is_reload_successful,
            last_good_poll_at=None if good_at is None else format_time(good_at),
            last_good_poll_seconds_ago=None if silent is None else round(silent, 3),
            oldest_pending_seconds=max((sink.oldest_pending_seconds for sink in sinks.values()), default=0.0),
            sinks=sinks,
        )

    def _sink(self, name: str, totals: OutboxTotals) -> SinkReadiness:
        now = self._outbox.clock.timestamp()
        return SinkReadiness(
            **totals.sinks[name].counts,
            oldest_pending_seconds=round(max(now - totals.oldest_pending_at.get(name, now), 0.0), 3),
            needs_attention=self._metrics.needs_attention(name),
        )
