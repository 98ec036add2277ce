"""Workers under test: each over a real outbox, with a clock and random numbers that the test controls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

from outbox_kit import OutboxKit, counts_of
from scripted_sink import Box, ScriptedSink
from waiting import until

from bridge.clock import Clock
from bridge.config.settings import SinkSettings
from bridge.delivery.router import Router
from bridge.delivery.worker import DeliveryWorker
from bridge.events.event import ScheduledEvent
from bridge.events.record import TransitionRecord
from bridge.metrics.metrics import Metrics
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.sink import Sink, SinkConfig

#: How long a test waits for work that takes milliseconds, on a machine that is busy with other tests.
SOON_SECONDS = 30.0


def ids(records: Iterable[TransitionRecord]) -> list[str | None]:
    """Return the EventIds of *records*."""
    return [None if record.event is None else record.event.event_id for record in records]


def always(outcome: object) -> list[object]:
    """Return a script in which every send has *outcome*."""
    return [outcome] * 10_000


def raising(error: Exception) -> Callable[[object], None]:
    """Return an outcome that raises *error*."""

    def outcome(_batch: object) -> None:
        raise error

    return outcome


class ShiftedTime:
    """The monotonic clock, which a test can set ahead, and a count of its readings."""

    def __init__(self) -> None:
        self.lead_seconds = 0.0
        self.readings = 0

    def monotonic(self) -> float:
        self.readings += 1
        return time.monotonic() + self.lead_seconds


class AlertSink(ScriptedSink):
    """A sink that needs only the current state of each event."""

    @classmethod
    def current_state_only(cls, config: SinkConfig) -> bool:
        del config
        return True


class DeliveryKit:
    """Makes sinks, records, and workers over the outbox of an OutboxKit."""

    def __init__(self, outbox_kit: OutboxKit) -> None:
        self.outbox_kit = outbox_kit
        self.outbox: Outbox = outbox_kit.open(sinks=())
        self.metrics = Metrics()
        self.time = ShiftedTime()
        self.has_seen_document = True
        self._workers: dict[str, DeliveryWorker] = {}
        self._boxes: list[str] = []
        self._configs: dict[str, SinkConfig] = {}
        self._classes: dict[str, type[Sink]] = {}

    # Sinks.

    def sink(self, name: str = "s", sink_class: type[Sink] = ScriptedSink, **keys: Any) -> Box:
        """Configure a sink, and return its box if it has one."""
        box = f"{name}-{uuid4()}"
        if issubclass(sink_class, ScriptedSink):
            box = keys.setdefault("box", box)
        self._boxes.append(box)
        self._configs[name] = sink_class.Config(name=name, **keys)
        self._classes[name] = sink_class
        self.configure()
        return Box.named(box)

    def configure(self) -> None:
        """Configure the outbox for the sinks."""
        names = list(self._configs)
        current = [name for name in names if self._classes[name].current_state_only(self._configs[name])]
        router = Router(list(self._configs.values()))
        self.outbox.configure(router, names, labels={}, current_state_only=current)

    def start(self, name: str = "s", *, chance: float = 0.0) -> DeliveryWorker:
        """Start a worker; with a *chance* of 0 each gap is the shortest possible, a tenth of a second."""
        worker = DeliveryWorker(
            SinkSettings(type_name="scripted", sink_class=self._classes[name], config=self._configs[name]),
            outbox=self.outbox,
            metrics=self.metrics.sink(name),
            clock=Clock(now=self.outbox_kit.now, monotonic=self.time.monotonic, random=lambda: chance),
            has_seen_document=lambda: self.has_seen_document,
        )
        self._workers[name] = worker
        self.outbox.on_due = self.notify
        worker.start()
        return worker

    def stop(self, name: str = "s") -> None:
        """Stop the worker after the send in progress."""
        worker = self._workers.pop(name)
        worker.stop(grace_seconds=0.0)
        assert worker.join(SOON_SECONDS)

    def restart(self) -> None:
        """Close the outbox and open it again, as a restart of the agent does."""
        self.outbox.close()
        self.outbox = self.outbox_kit.open(sinks=())
        self.configure()

    def notify(self) -> None:
        for worker in list(self._workers.values()):
            worker.notify()

    def advance(self, seconds: float) -> None:
        """Let time pass at once."""
        self.outbox_kit.wait(seconds)
        self.time.lead_seconds += seconds
        self.notify()

    def retry(self, name: str = "s") -> None:
        """Perform `outbox retry` as the agent does."""
        self.outbox.change(deliveries.retry, name, now=self.outbox.clock.timestamp())
        self._workers[name].resume()

    @property
    def directory(self) -> Path:
        return self.outbox_kit.directory

    # Records.

    def add(self, *event_ids: str, urgent: bool = False, **fields: Any) -> list[TransitionRecord]:
        """Add one record of each event, in one document; return the records when they are saved."""
        events = [self.event(event_id, urgent=urgent, **fields) for event_id in event_ids]
        return self.outbox_kit.commit(self.outbox, *events)

    def event(self, event_id: str, *, urgent: bool = False, **fields: Any) -> ScheduledEvent:
        kind = "Preempt" if urgent else "Freeze"
        return self.outbox_kit.event(event_id, event_type=kind, **fields)

    # Results.

    def totals(self, name: str = "s") -> dict[str, int]:
        """Return the totals that are not zero, after a check of their sum."""
        totals = counts_of(self.outbox.read(deliveries.totals).sinks[name])
        accepted = totals.pop("accepted")
        assert sum(totals.values()) == accepted
        return {state: count for state, count in totals.items() if count}

    def until_failed(self, times: int) -> None:
        """Wait until that many sends have failed."""
        until(lambda: self.sample("sink_retries_total", reason="failed") == times)

    def until_totals(self, name: str = "s", **wanted: int) -> None:
        until(lambda: self.totals(name) == wanted)

    def sample(self, metric: str, name: str = "s", **labels: str) -> float | None:
        """Return one sample of the metrics."""
        return self.metrics.registry.get_sample_value(f"scheduled_events_bridge_{metric}", {"sink": name, **labels})

    def close(self) -> None:
        for worker in self._workers.values():
            worker.stop(grace_seconds=0.0)
        for box in self._boxes:
            Box.named(box).released.set()
        for worker in self._workers.values():
            worker.join(SOON_SECONDS)
        for box in self._boxes:
            Box.forget(box)
