"""Creates the responses of /healthz, /readyz, and /metrics.

/healthz reports whether the agent's main loops are running. It ignores failures of sinks and of the metadata service,
because restarting the agent would not fix them. /readyz reports whether the agent polls, saves the outbox, and delivers
to all sinks. Use /readyz to detect a bad configuration early in a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from bridge.clock import format_time
from bridge.events.otel_resource import own_version
from bridge.health.readiness import (
    ImdsState,
    Readiness,
    SinkReadiness,
    directory_text,
    why_polling_is_not_ready,
    why_sink_is_not_ready,
)
from bridge.health.server import Response
from bridge.metrics.metrics import CONTENT_TYPE, Metrics
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.system.threads import LoopWatch

_UNAVAILABLE = 503


class HealthReporter:
    """Collects the agent's state. All methods are thread-safe and return immediately."""

    def __init__(
        self,
        *,
        outbox: Outbox,
        metrics: Metrics,
        directory: Path,
        loop_watches: Callable[[], Mapping[str, LoopWatch]],
        sinks: Callable[[], Collection[str]],
        imds: ImdsState,
        imds_endpoint: Callable[[], str],
        vm_name: Callable[[], str | None],
        configuration: Callable[[], str],
    ) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._directory = directory
        self._loop_watches = loop_watches
        self._sinks = sinks
        self._imds = imds
        self._imds_endpoint = imds_endpoint
        self._vm_name = vm_name
        self._configuration = configuration

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
        """Return the agent's state, which is the body of /readyz."""
        imds, totals, saver = self._imds, self._outbox.read(deliveries.totals), self._outbox.saver
        silent, good_at = imds.silent_seconds, imds.good_at
        reasons = why_polling_is_not_ready(imds)
        behind = saver.behind_reason
        if behind is not None:
            reasons.append(f"The outbox is not saved: {behind}")
        sinks = {name: self._sink(name, totals) for name in totals.sinks}
        for name in self._sinks():
            reasons += why_sink_is_not_ready(name, sinks[name]) if name in sinks else []
        return Readiness(
            status="not_ready" if reasons else "ready",
            reasons=tuple(reasons),
            version=own_version(),
            stream_id=totals.stream_id,
            state_directory=directory_text(self._directory),
            outbox_behind=behind,
            outbox_behind_seconds=round(saver.behind_seconds, 3),
            vm=self._vm_name(),
            imds=self._imds_endpoint(),
            configuration=self._configuration(),
            configuration_rejected=not self._metrics.is_reload_successful,
            last_good_poll_at=None if good_at is None else format_time(good_at),
            last_good_poll_seconds_ago=None if silent is None else round(silent, 3),
            oldest_pending_seconds=max((sink.oldest_pending_seconds for sink in sinks.values()), default=0.0),
            sinks=sinks,
        )

    def _sink(self, name: str, totals: deliveries.OutboxTotals) -> SinkReadiness:
        now = self._outbox.clock.timestamp()
        return SinkReadiness(
            **totals.sinks[name].counts,
            oldest_pending_seconds=round(totals.oldest_pending_seconds(name, now), 3),
            needs_attention=self._metrics.needs_attention(name),
        )
