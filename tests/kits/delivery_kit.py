"""Workers under test: each over a real outbox, with clock and chance in the test's hands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from outbox_kit import counts_of

from bridge.clock import Clock
from bridge.delivery.router import Router
from bridge.delivery.worker import DeliveryWorker
from bridge.events.event import ScheduledEvent
from bridge.events.record import TransitionRecord
from bridge.metrics.metrics import Metrics
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.outbox.reader import OutboxFile
from bridge.sink import Sink, SinkConfig
from bridge.testing.sinks import Box, MemorySink, ScriptedSink

#: How long a test waits for what takes milliseconds, on a machine that is busy with other tests.
SOON_SECONDS = 30.0


class ShiftedTime:
    """The monotonic clock, with a lead that a test can lengthen, and a count of its readings."""

    def __init__(self) -> None:
        self.lead_seconds = 0.0
        self.readings = 0

    def monotonic(self) -> float:
        self.readings += 1
        return time.monotonic() + self.lead_seconds


class Pager(ScriptedSink):
    """A sink that pages people, who want nothing of what is over."""

    @classmethod
    def skips_what_is_over(cls, config: SinkConfig) -> bool:
        del config
        return True


class DeliveryKit:
    """Makes sinks, records and workers over the outbox of an OutboxKit."""

    def __init__(self, outbox_kit: Any) -> None:
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
        """Configure a sink; return its box, if it is one that has a box."""
        box = f"{name}-{uuid4()}"
        if issubclass(sink_class, ScriptedSink | MemorySink):
            box = keys.setdefault("box", box)
        self._boxes.append(box)
        self._configs[name] = sink_class.Config(name=name, **keys)
        self._classes[name] = sink_class
        self.outbox.write(
            self.outbox.records.configure, Router(list(self._configs.values())), list(self._configs), labels={}
        ).result()
        return Box.named(box)

    def start(self, name: str = "s", *, chance: float = 0.0, outbox: Outbox | None = None) -> DeliveryWorker:
        """Start a worker; by *chance* each gap is the shortest possible, a tenth of a second."""
        worker = DeliveryWorker(
            config=self._configs[name],
            sink_class=self._classes[name],
            outbox=outbox or self.outbox,
            metrics=self.metrics.sink(name),
            clock=Clock(now=self.outbox_kit.now, monotonic=self.time.monotonic, random=lambda: chance),
            has_seen_document=lambda: self.has_seen_document,
        )
        self._workers[name] = worker
        (outbox or self.outbox).on_added = self.notify
        worker.start()
        return worker

    def stop(self, name: str = "s") -> None:
        """Stop the worker after what it does now."""
        worker = self._workers.pop(name)
        worker.stop(grace_seconds=0.0)
        assert worker.join(SOON_SECONDS)

    def notify(self) -> None:
        for worker in list(self._workers.values()):
            worker.notify()

    def advance(self, seconds: float) -> None:
        """Let time pass at once."""
        self.outbox_kit.wait(seconds)
        self.time.lead_seconds += seconds
        self.notify()

    def retry(self, name: str = "s") -> None:
        """Do what `outbox retry` does, and what the agent does when it notices."""
        OutboxFile(self.directory).retry(name)
        self._workers[name].notify(by_command=True)

    @property
    def directory(self) -> Path:
        directory: Path = self.outbox_kit.directory
        return directory

    # Records.

    def add(self, *event_ids: str, urgent: bool = False, **fields: Any) -> list[TransitionRecord]:
        """Commit one record of each event, in one document; return them once the workers know."""
        told = threading.Event()
        before, self.outbox.on_added = self.outbox.on_added, told.set
        events = [self.event(event_id, urgent=urgent, **fields) for event_id in event_ids]
        records: list[TransitionRecord] = self.outbox_kit.commit(self.outbox, *events)
        assert told.wait(SOON_SECONDS)
        self.outbox.on_added = before
        before()
        return records

    def event(self, event_id: str, *, urgent: bool = False, **fields: Any) -> ScheduledEvent:
        kind = "Preempt" if urgent else "Freeze"
        event: ScheduledEvent = self.outbox_kit.event(event_id, event_type=kind, **fields)
        return event

    # What became of them.

    def totals(self, name: str = "s") -> dict[str, int]:
        """Return the totals that are not zero, after checking that they add up."""
        totals = counts_of(self.outbox.read(deliveries.accounts).result()[name])
        accepted = totals.pop("accepted")
        assert sum(totals.values()) == accepted
        return {state: count for state, count in totals.items() if count}

    def until(self, condition: Callable[[], object], seconds: float = SOON_SECONDS) -> None:
        """Wait until *condition* holds."""
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < deadline, "It did not happen in time."
            pause.wait(0.005)

    def until_failed(self, times: int, name: str = "s", *, reason: str = "failed") -> None:
        """Wait until so many sends failed."""
        self.until(lambda: self.sample("sink_retries_total", name, reason=reason) == times)

    def until_totals(self, name: str = "s", **wanted: int) -> None:
        self.until(lambda: self.totals(name) == wanted)

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
