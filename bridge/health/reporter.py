"""The answers of /healthz, /readyz and /metrics, put together from what the parts of the agent know.

/healthz is about the agent alone: a sink or IMDS that does not answer never makes it fail, because a restart would not
help, and restarting five thousand agents at once would hurt. /readyz is about its work: IMDS, the outbox, the sinks. A
rollout of a wrong configuration should be seen there before it is everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import datetime
from pathlib import Path
from typing import Protocol

import msgspec

from bridge.clock import REAL_CLOCK, Clock, format_time
from bridge.errors import BridgeError, OutboxError
from bridge.health.readiness import (
    Readiness,
    SinkReadiness,
    directory_text,
    why_polling_is_not_ready,
    why_sink_is_not_ready,
)
from bridge.health.server import Response
from bridge.metrics.metrics import CONTENT_TYPE, Metrics, OutboxReading, own_version
from bridge.outbox.outbox import Outbox
from bridge.system.threads import LoopWatch

_READ_SECONDS = 2.0
_UNAVAILABLE = 503
_LOADING = "The outbox is still being loaded: the disk hangs, or it is locked, large or damaged."


class Polled(Protocol):
    """The poller as this sees it: engines do not import one another."""

    @property
    def silent_seconds(self) -> float | None:
        """How long ago the last good answer came; None before the first."""

    @property
    def gap_seconds(self) -> float:
        """How long the service may be silent."""

    good_at: datetime | None
    """When the last good answer came."""


class HealthReporter:
    """Reads what the parts of the agent know; every method may be called from any thread, and none waits for long."""

    def __init__(
        self,
        *,
        outbox: Outbox,
        metrics: Metrics,
        directory: Path,
        loop_watches: Callable[[], Mapping[str, LoopWatch]],
        sinks: Callable[[], Collection[str]],
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._outbox = outbox
        self._metrics = metrics
        self._directory = directory
        self._loop_watches = loop_watches
        self._sinks = sinks
        self._clock = clock
        self.polled: Polled | None = None
        self.vm_name: Callable[[], str | None] = lambda: None
        self.imds: Callable[[], str] = lambda: ""
        self.configuration: Callable[[], str] = lambda: ""
        self.refused_answer: Callable[[], str | None] = lambda: None
        self.is_loading: Callable[[], bool] = lambda: False
        """Returns whether the outbox is being loaded, and one in memory has its place."""

    def use(self, outbox: Outbox) -> None:
        """Read *outbox* from now on."""
        self._outbox = outbox

    @property
    def pages(self) -> Mapping[str, Callable[[], Response]]:
        """The answering method of each path."""
        return {"/healthz": self.healthz, "/readyz": self.readyz, "/metrics": self.scrape}

    def late(self) -> dict[str, float]:
        """Return how many seconds each loop is beyond its own deadline; empty when all turn."""
        late = {name: loop_watch.late_seconds for name, loop_watch in self._loop_watches().items()}
        return {name: round(seconds, 1) for name, seconds in late.items() if seconds > 0}

    def healthz(self) -> Response:
        """Answer 200 while every loop turns within its own deadlines."""
        late = self.late()
        body = msgspec.json.encode({"status": "stuck" if late else "ok", "late": late})
        return Response(status=_UNAVAILABLE if late else 200, body=body + b"\n")

    def readyz(self) -> Response:
        """Answer 200 while the agent sees what happens and every sink takes it."""
        report = self.report()
        return Response(status=_UNAVAILABLE if report.reasons else 200, body=msgspec.json.encode(report) + b"\n")

    def scrape(self) -> Response:
        """Answer with every metric."""
        return Response(content_type=CONTENT_TYPE, body=self._metrics.exposition())

    def report(self) -> Readiness:
        """Return what /readyz says."""
        polled = self.polled
        silent = None if polled is None else polled.silent_seconds
        gap = 0.0 if polled is None else polled.gap_seconds
        reasons = why_polling_is_not_ready(silent, gap_seconds=gap, refused_answer=self.refused_answer())
        try:
            reading = self.outbox()
        except BridgeError as error:
            reading = OutboxReading(in_memory=self._outbox.in_memory)
            reasons.append(str(error))
        totals = reading.totals
        is_loading = self.is_loading()
        if is_loading:
            reasons.append(_LOADING)
        elif reading.in_memory:
            reasons.append("The disk refuses, so the outbox is in memory.")
        sinks = {name: self._sink(name, reading) for name in totals.sinks}
        reasons += [
            reason for name in self._sinks() if name in sinks for reason in why_sink_is_not_ready(name, sinks[name])
        ]
        good_at = None if polled is None else polled.good_at
        return Readiness(
            status="not_ready" if reasons else "ready",
            reasons=tuple(reasons),
            version=own_version(),
            stream_id=totals.stream_id,
            state_directory=directory_text(self._directory),
            state_in_memory=reading.in_memory,
            state_loading=is_loading,
            vm=self.vm_name(),
            imds=self.imds(),
            configuration=self.configuration(),
            last_good_poll_at=None if good_at is None else format_time(good_at),
            last_good_poll_seconds_ago=None if silent is None else round(silent, 3),
            oldest_pending_seconds=max((sink.oldest_pending_seconds for sink in sinks.values()), default=0.0),
            sinks=sinks,
        )

    def outbox(self) -> OutboxReading:
        """Return what the outbox holds, from one commit; raise OutboxError when it does not answer in time."""
        try:
            totals, ages_now = self._outbox.totals().result(_READ_SECONDS)
        except FutureTimeout:
            raise OutboxError(f"The outbox did not answer within {_READ_SECONDS:g} s.") from None
        return OutboxReading(
            totals=totals,
            ages_now=ages_now,
            configured=frozenset(self._sinks()),
            max_bytes=self._outbox.max_bytes,
            in_memory=self._outbox.in_memory,
            set_aside=self._outbox.set_aside_count,
        )

    def _sink(self, name: str, reading: OutboxReading) -> SinkReadiness:
        totals = reading.totals
        now = self._clock.timestamp() if reading.ages_now is None else reading.ages_now
        return SinkReadiness(
            **msgspec.structs.asdict(totals.sinks[name]),
            oldest_pending_seconds=round(totals.oldest_pending_seconds(name, now), 3),
            needs_attention=self._metrics.needs_attention(name),
        )
