"""Opens outboxes in one directory and adds records, with a manual clock."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Collection
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from bridge.clock import Clock
from bridge.events.event import Document, ScheduledEvent
from bridge.events.record import Transition, TransitionRecord, Verdict, new_record
from bridge.outbox import deliveries
from bridge.outbox.database import Database
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import DeliveryState, SinkRow, StoredDecision

_MIB = 1024 * 1024
_SAVED_SECONDS = 30.0


class RouteAll:
    """A router that sends every record to the same sinks."""

    def __init__(self, *sinks: str) -> None:
        self._sinks = sinks

    def __call__(self, _record: TransitionRecord, _vm_name: str | None, _told: Collection[str]) -> tuple[str, ...]:
        return self._sinks


def counts_of(row: SinkRow) -> dict[str, int]:
    """Return the counts of *row* by state, `accepted` included."""
    return {state: getattr(row, state) for state in ("accepted", *(each.value for each in DeliveryState))}


def append(outbox: Outbox, transition: str, **fields: Any) -> list[TransitionRecord]:
    """Add one record that no document caused, such as a heartbeat or the outcome of an approval."""
    return outbox.append([new_record(Transition(transition), outbox.clock.now(), **fields)])


def stored_decision(decision_id: str, verdict: Verdict = Verdict.HOLD, **fields: Any) -> StoredDecision:
    """Return a decision of the portal on the event E-1 that does not expire, with *fields* replaced."""
    values: dict[str, Any] = {
        "source": "portal",
        "approver": "ann",
        "payload_sha256": decision_id,
        "event_id": "E-1",
        "event_digest": "any",
        "issued_at": 1_000_000,
        "expires_at": 2.0**40,
        "received_at": 1.0,
    }
    return StoredDecision(decision_id=decision_id, verdict=verdict, **{**values, **fields})


def refuse_writes(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """Let every save fail, as on a disk that fails, until `monkeypatch.undo`."""

    def fail(*_: Any, **__: Any) -> None:
        raise error or sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Database, "save", fail)


class OutboxKit:
    """Opens outboxes in *directory*; the sinks ``a`` and ``b`` receive every record."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.time = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
        self.monotonic = 0.0
        self._opened: list[Outbox] = []

    @property
    def clock(self) -> Clock:
        return Clock(now=self.now, monotonic=lambda: self.monotonic)

    def now(self) -> datetime:
        return self.time

    def wait(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self.time += timedelta(seconds=seconds)
        self.monotonic += seconds

    def open(
        self,
        *,
        sinks: tuple[str, ...] = ("a", "b"),
        current_state_only: tuple[str, ...] = (),
        **options: Any,
    ) -> Outbox:
        """Return a loaded outbox that sends every record to *sinks*; without sinks it is not configured."""
        self.directory.mkdir(parents=True, exist_ok=True)
        outbox = Outbox(self.directory, clock=self.clock, **{"max_bytes": 64 * _MIB, "boot_id": "boot-1", **options})
        self._opened.append(outbox)
        assert outbox.wait_loaded(60)
        if sinks:
            outbox.configure(RouteAll(*sinks), sinks, labels={}, current_state_only=current_state_only)
        return outbox

    def crash(self, outbox: Outbox, **options: Any) -> Outbox:
        """Open a copy of the files as they are now, as a start after SIGKILL would find them."""
        copy = self.directory.with_name(f"{self.directory.name}-after-kill-{len(self._opened)}")
        shutil.copytree(self.directory, copy)
        outbox.close(0.0)
        self.directory = copy
        return self.open(**options)

    def saved(self, outbox: Outbox) -> None:
        assert outbox.wait_saved(_SAVED_SECONDS)

    def event(self, event_id: str = "E-1", status: str = "Scheduled", **fields: Any) -> ScheduledEvent:
        return ScheduledEvent(event_status=status, event_id=event_id, **{"event_type": "Reboot", **fields})

    def change(self, event: ScheduledEvent, transition: str = "scheduled", **fields: Any) -> TransitionRecord:
        return new_record(Transition(transition), self.time, event=event, **{"incarnation": 1, **fields})

    def commit(
        self,
        outbox: Outbox,
        *events: ScheduledEvent,
        transition: str = "scheduled",
        document: Document | None = None,
        incarnation: int = 1,
        save: bool = True,
    ) -> list[TransitionRecord]:
        """Add one record for each of *events*, as a poll would; wait until they are saved unless *save* is False."""
        added = outbox.append_observation(
            document or Document(incarnation=incarnation, events=events),
            [self.change(event, transition, incarnation=incarnation) for event in events],
            active_event_ids=tuple(sorted(event.event_id or "" for event in events)) if len(events) < 200 else None,
        )
        if save:
            self.saved(outbox)
        return added

    def fill(self, outbox: Outbox, count: int, *, events: int | None = None, size: int = 0) -> list[TransitionRecord]:
        """Add *count* records of *events* events (default: one each) with *size* bytes in the description."""
        added: list[TransitionRecord] = []
        for start in range(0, count, 500):
            batch = [
                self.event(f"F-{number % (events or count)}", description=f"{number} {'x' * size}")
                for number in range(start, min(start + 500, count))
            ]
            added += self.commit(outbox, *batch, document=Document(), save=False)
        self.saved(outbox)
        return added

    def settle(
        self, outbox: Outbox, sink: str, *sequences: int, state: str | None = "delivered", error: str | None = None
    ) -> None:
        """Store the result of a send; a state of None means that it failed."""
        outbox.record_results(sink, sequences, DeliveryState(state or "pending"), error=error)

    def due(self, outbox: Outbox, sink: str = "a") -> list[int]:
        """Return the sequences of all due rows."""
        return [row.sequence for row in outbox.select(sink, list)]

    def totals(self, outbox: Outbox) -> dict[str, dict[str, int]]:
        """Return sink -> count by state, `accepted` included."""
        return {sink: counts_of(row) for sink, row in outbox.read(deliveries.totals).sinks.items()}

    def close(self) -> None:
        for outbox in self._opened:
            outbox.close(5.0)
