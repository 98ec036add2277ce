"""An outbox under test: a clock that stands still until it is moved, and short ways to make it do things."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from bridge.clock import AgeClock, Clock
from bridge.events.diff import Change
from bridge.events.event import Document, ScheduledEvent
from bridge.events.record import Evidence, Transition, TransitionRecord
from bridge.outbox import deliveries, meta
from bridge.outbox.deliveries import DeliveryResult, DeliveryState, SinkAccount
from bridge.outbox.outbox import Outbox
from bridge.outbox.records import Observation

_MIB = 1024 * 1024


def counts_of(account: SinkAccount) -> dict[str, int]:
    """Return the counts of *account* by state, `accepted` included."""
    return {state: getattr(account, state) for state in ("accepted", *(each.value for each in DeliveryState))}


class OutboxKit:
    """Opens outboxes in one directory and feeds them; the sinks ``a`` and ``b`` want every record."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runtime = directory.parent
        """Where files outlive the agent but not the boot."""
        self.time = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
        self._waited_seconds = 0.0
        self._opened: list[Outbox] = []

    def now(self) -> datetime:
        return self.time

    def wait(self, seconds: float) -> None:
        """Let time pass, by every clock."""
        self.time += timedelta(seconds=seconds)
        self._waited_seconds += seconds

    def set_clock(self, seconds: float) -> None:
        """Set the wall clock so much ahead; no time passes."""
        self.time += timedelta(seconds=seconds)

    @property
    def ages(self) -> AgeClock:
        """A new clock by which records age."""
        return AgeClock(Clock(now=self.now, monotonic=lambda: self._waited_seconds))

    def open(
        self,
        *,
        sinks: tuple[str, ...] = ("a", "b"),
        route: Callable[[TransitionRecord, str | None], list[str]] | None = None,
        max_bytes: int = 64 * _MIB,
        keep_delivered_seconds: float = 3600.0,
    ) -> Outbox:
        """Return an outbox that sends everything to *sinks*; with none it is not configured."""
        outbox = Outbox(
            self.directory,
            max_bytes=max_bytes,
            keep_delivered_seconds=keep_delivered_seconds,
            now=self.now,
            ages=self.ages,
            runtime=self.runtime,
        )
        self._opened.append(outbox)
        if sinks:
            outbox.write(
                outbox.records.configure, route or (lambda _record, _name: list(sinks)), sinks, labels={}
            ).result()
        return outbox

    def event(self, event_id: str = "E-1", status: str = "Scheduled", **fields: Any) -> ScheduledEvent:
        return ScheduledEvent(event_status=status, event_id=event_id, **{"event_type": "Reboot", **fields})

    def observation(
        self,
        outbox: Outbox,
        *events: ScheduledEvent,
        incarnation: int = 1,
        transition: str = "scheduled",
        **fields: Any,
    ) -> Observation:
        """Return what a poll would store that saw *events* come up, each as one record."""
        changes = [
            Change(transition=Transition(transition), evidence=Evidence.OBSERVED, event=event) for event in events
        ]
        values: dict[str, Any] = {
            "stream_id": fields.get("stream_id") or outbox.read(meta.load).result().stream_id,
            "document": Document(incarnation=incarnation, events=events),
            "changes": changes,
            "observed_at": self.time,
            "incarnation": incarnation,
            "previous_incarnation": None,
            "is_settled": True,
            "boot_id": "boot-1",
        }
        return Observation(**{**values, **fields})

    def commit(self, outbox: Outbox, *events: ScheduledEvent, **fields: Any) -> list[TransitionRecord]:
        return outbox.write(outbox.records.append_observation, self.observation(outbox, *events, **fields)).result(60)

    def fill(self, outbox: Outbox, count: int, *, events: int | None = None, size: int = 0) -> list[TransitionRecord]:
        """Commit *count* records, spread over *events* events (default: one each), with *size* bytes to carry."""
        records: list[TransitionRecord] = []
        for start in range(0, count, 500):
            numbers = range(start, min(start + 500, count))
            batch = [
                self.event(f"F-{number % (events or count)}", description=f"{number} {'x' * size}")
                for number in numbers
            ]
            records += self.commit(outbox, *batch, document=Document())
        return records

    def settle(
        self,
        outbox: Outbox,
        sink: str,
        *sequences: int,
        state: str | None = "delivered",
        error: str | None = None,
    ) -> None:
        """Write down what became of these records; a state of None: tried in vain."""
        became = None if state is None else DeliveryState(state)
        results = [DeliveryResult(sequence=number, state=became, error=error) for number in sequences]
        now = self.time.timestamp()
        outbox.write(deliveries.record_results, sink, results, now=now).result(60)

    def due(self, outbox: Outbox, sink: str = "a", **options: Any) -> list[int]:
        """Return the sequences of what is due, all of it unless limited."""
        return [row.sequence for row in outbox.read(deliveries.due, sink, **{"limit": 100_000, **options}).result(60)]

    def totals(self, outbox: Outbox) -> dict[str, dict[str, int]]:
        """Return sink -> count by state, `accepted` included."""
        accounts = outbox.read(deliveries.accounts).result(60)
        return {sink: counts_of(account) for sink, account in accounts.items()}

    def close(self) -> None:
        for outbox in self._opened:
            outbox.close()
