"""A reload replaces the worker of a sink, and the old worker sends no record after the change."""

import threading

import msgspec
import pytest
from delivery_kit import SOON_SECONDS, DeliveryKit
from scripted_sink import ScriptedSink
from waiting import until

from bridge.config.settings import SinkSettings
from bridge.delivery.pool import WorkerPool
from bridge.events.event import Document
from bridge.metrics.metrics import Metrics


class Hangs(ScriptedSink):
    """Hangs once before its request, where its own deadline does not apply, until the test releases it."""

    hanging: threading.Event
    released: threading.Event
    may_hang: threading.Lock

    @classmethod
    def hang_once(cls):
        if cls.may_hang.acquire(blocking=False):
            cls.hanging.set()
            cls.released.wait(SOON_SECONDS)


class HangsInTheSink(Hangs):
    """Before its first request, on the sink's thread."""

    def prepare_next(self, following):
        del following
        self.hang_once()


class Exchange:
    """A pool with one sink, whose settings change."""

    def __init__(self, bench, sink_class):
        self.bench = bench
        self.sink_class = type(sink_class.__name__, (sink_class,), {"hanging": threading.Event()})
        self.sink_class.released, self.sink_class.may_hang = threading.Event(), threading.Lock()
        self.pool = WorkerPool(bench.outbox, Metrics())
        self.box = bench.sink(sink_class=ScriptedSink)
        config = bench._configs["s"]
        self.config = self.sink_class.Config(name="s", box=config.box, timeout_seconds=60.0)

    def start(self, **changed):
        config = msgspec.structs.replace(self.config, **changed)
        self.pool.start_missing([SinkSettings(type_name="hangs", sink_class=self.sink_class, config=config)])
        self.bench.outbox.on_due = self.pool.notify

    def change_while_it_hangs(self):
        assert self.sink_class.hanging.wait(SOON_SECONDS)
        self.pool.end_all_but([], grace_seconds=0.0)
        self.start(timeout_seconds=59.0)

    def let_the_old_one_go_on(self):
        self.sink_class.released.set()
        until(lambda: len(threads()) <= 2)  # the threads of the new worker

    def told(self):
        return [record.transition.value for record in self.box.records]


def threads():
    return [each for each in threading.enumerate() if each.name in {"delivery:s", "sink:s", "sink:s:close"}]


@pytest.fixture
def exchange(kit):
    made = []

    def make(sink_class):
        bench = DeliveryKit(kit)
        made.append(Exchange(bench, sink_class))
        return made[-1]

    yield make
    for each in made:
        each.sink_class.released.set()
        each.pool.end_all_but([], grace_seconds=0.0)
        each.bench.close()


def add(bench, transition, *, status="Scheduled", is_over=False):
    document = {"document": Document(incarnation=9)} if is_over else {}
    bench.outbox_kit.commit(bench.outbox, bench.event("E", status=status), transition=transition, **document)


def test_send_that_hung_before_a_reload_makes_no_request_after_it(exchange):
    change = exchange(HangsInTheSink)
    add(change.bench, "scheduled")
    add(change.bench, "started", status="Started")
    change.start()
    change.change_while_it_hangs()
    change.box.wait_for(2, SOON_SECONDS)
    change.let_the_old_one_go_on()
    assert change.told() == ["scheduled", "started"]
