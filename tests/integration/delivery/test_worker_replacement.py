"""A reload replaces the worker of a sink, and the old worker sends no record after the change."""

import threading

import msgspec
import pytest
from delivery_kit import SOON_SECONDS
from scripted_sink import ScriptedSink
from waiting import until

from bridge.config.settings import SinkSettings
from bridge.delivery.pool import WorkerPool
from bridge.metrics.metrics import Metrics


@pytest.fixture
def sink_class():
    """Return a sink that hangs once before its first request, where its own deadline does not apply."""

    class HangsOnce(ScriptedSink):
        hanging, released, may_hang = threading.Event(), threading.Event(), threading.Lock()

        def prepare_next(self, following):
            del following
            if self.may_hang.acquire(blocking=False):
                self.hanging.set()
                self.released.wait(SOON_SECONDS)

    yield HangsOnce
    HangsOnce.released.set()


@pytest.fixture
def pool(bench):
    pool = WorkerPool(bench.outbox, Metrics())
    yield pool
    pool.end_all_but([], grace_seconds=0.0)


def threads():
    return [each for each in threading.enumerate() if each.name in {"delivery:s", "sink:s", "sink:s:close"}]


def test_send_that_hung_before_a_reload_makes_no_request_after_it(bench, pool, sink_class):
    box = bench.sink(sink_class=sink_class)

    def start(timeout_seconds):
        config = msgspec.structs.replace(bench._configs["s"], timeout_seconds=timeout_seconds)
        pool.start_missing([SinkSettings(type_name="hangs", sink_class=sink_class, config=config)])
        bench.outbox.on_due = pool.notify

    bench.outbox_kit.commit(bench.outbox, bench.event("E"))
    bench.outbox_kit.commit(bench.outbox, bench.event("E", status="Started"), transition="started")
    start(60.0)
    assert sink_class.hanging.wait(SOON_SECONDS)
    pool.end_all_but([], grace_seconds=0.0)
    start(59.0)
    box.wait_for(2, SOON_SECONDS)
    sink_class.released.set()
    until(lambda: len(threads()) <= 2)  # the threads of the new worker
    assert [record.transition.value for record in box.records] == ["scheduled", "started"]
