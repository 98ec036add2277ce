"""Starts, replaces, and stops the push of the agent's metrics.

The module `bridge.metrics.otlp_push` is imported only if ``[telemetry]`` is configured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bridge.clock import parse_time
from bridge.config.loader import Settings
from bridge.events.event import VmIdentity
from bridge.events.otel_resource import resource_attributes
from bridge.metrics.metrics import Metrics
from bridge.outbox.outbox import Outbox

if TYPE_CHECKING:
    from bridge.metrics.otlp_push import MetricsPush


class Telemetry:
    """The push of *metrics*, if one is configured.

    *vm* returns the current identity of this VM.
    """

    def __init__(self, metrics: Metrics, outbox: Outbox, *, vm: Callable[[], VmIdentity]) -> None:
        self._metrics = metrics
        self._outbox = outbox
        self._vm = vm
        self._settings: Settings | None = None
        self._push: MetricsPush | None = None

    def configure(self, settings: Settings) -> None:
        """Apply *settings*. The push continues if its own settings have not changed."""
        before, self._settings = self._settings, settings
        if before is not None and before.push == settings.push:
            return
        self.stop()
        self.close(0.0)
        if settings.push is not None:
            from bridge.metrics.otlp_push import MetricsPush  # noqa: PLC0415

            self._push = MetricsPush(
                settings.push, self._metrics, resource=self._resource, created_at=self._outbox_created_at
            )
            self._push.start()

    def stop(self) -> None:
        """Begin the last push."""
        if self._push is not None:
            self._push.stop()

    def close(self, wait_seconds: float) -> None:
        """Wait up to *wait_seconds* for the last push, and then cancel it."""
        push, self._push = self._push, None
        if push is not None:
            push.close(wait_seconds)

    def _outbox_created_at(self) -> float:
        stored = self._outbox.read(lambda state: state.get("created_at"))
        return self._metrics.created_at if stored is None else parse_time(stored).timestamp()

    def _resource(self) -> Mapping[str, str]:
        labels = {} if self._settings is None else self._settings.labels
        stream_id = self._outbox.read(lambda state: state.get("stream_id")) or ""
        return resource_attributes(self._vm(), labels, instance_id=stream_id)
