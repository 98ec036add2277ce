"""An outbox with given counts of one sink, for the metrics."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

from bridge.clock import Clock
from bridge.outbox.deliveries import OutboxTotals
from bridge.outbox.rows import SinkRow

NOW = 1_800_000_000.0
CLOCK = Clock(now=lambda: datetime.fromtimestamp(NOW, timezone.utc))


class ListedOutbox:
    """Has the *counts* in each snapshot, and counts the snapshots in `reads`."""

    clock = CLOCK
    max_bytes = max_pending_bytes = 0
    saver = SimpleNamespace(behind_seconds=0.0, used_bytes=0, file_changes=0)

    def __init__(self, sink: str = "a", **counts: int) -> None:
        self.sink, self.counts, self.reads = sink, dict[str, Any](counts), 0

    def read(self, _: Any) -> OutboxTotals:
        self.reads += 1
        row = SinkRow(name=self.sink, **self.counts)
        return OutboxTotals(sinks={self.sink: row}, oldest_pending_at={self.sink: NOW - 1.5})
