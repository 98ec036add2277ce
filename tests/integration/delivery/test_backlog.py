"""How a worker works off a backlog: it reads ahead while it sends, and writes down many outcomes at once."""

import threading

import pytest

from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.testing.sinks import ScriptedSink


class OneEventABatch(ScriptedSink):
    batch_by_event = True


class WatchedOutbox(Outbox):
    """An outbox that notes what its workers ask of it."""

    def __init__(self, *args, **kwargs):
        self.settled = []
        self.reads = 0
        super().__init__(*args, **kwargs)

    def write_soon(self, work, /, *args, **kwargs):
        if work is deliveries.record_results:
            _sink, results = args
            self.settled.append(len(results))
        return super().write_soon(work, *args, **kwargs)

    def read(self, work, /, *args, **kwargs):
        self.reads += work is deliveries.due
        return super().read(work, *args, **kwargs)


@pytest.fixture
def bench(bench):
    bench.outbox.close()
    bench.outbox = bench.outbox_kit._opened[0] = WatchedOutbox(
        bench.directory, max_bytes=1 << 26, keep_delivered_seconds=3600, now=bench.outbox_kit.now
    )
    return bench


@pytest.mark.parametrize("max_batch", [1, 5])
@pytest.mark.parametrize("sink_class", [ScriptedSink, OneEventABatch])
def test_a_backlog_is_sent_once_each_event_in_order_with_few_transactions(bench, sink_class, max_batch):
    box = bench.sink(max_batch=max_batch)
    bench._classes["s"] = sink_class
    for _ in range(12):
        bench.add(*(f"E-{number}" for number in range(50)))
    bench.start()
    records = box.wait_for(600, 30)
    bench.until_totals(delivered=600)
    assert sorted(record.sequence for record in records) == list(range(1, 601))
    last = {}
    for record in records:
        assert record.sequence > last.get(record.event.event_id, 0)
        last[record.event.event_id] = record.sequence
    assert max(bench.outbox.settled) <= 100 + max_batch
    assert len(bench.outbox.settled) < 600 / max_batch / 2


def test_the_next_rows_are_asked_for_before_the_last_are_sent(bench):
    at_the_gate, gate = threading.Event(), threading.Event()

    def wait_at_the_gate(_batch):
        at_the_gate.set()
        gate.wait(60)

    box = bench.sink(timeout_seconds=60.0)
    box.script(*["accept"] * 63, wait_at_the_gate)  # the last of the 64 rows that were read first
    bench.add(*(f"E-{number}" for number in range(200)))
    bench.start()
    assert at_the_gate.wait(10)
    assert bench.outbox.reads == 2
    gate.set()
    box.wait_for(200, 10)


def test_what_is_delivered_is_written_down_when_nothing_more_is_due(bench):
    box = bench.sink(max_batch=1)
    bench.add("E-1")
    bench.start()
    box.wait_for(1, 10)
    bench.until_totals(delivered=1)
    assert bench.outbox.settled == [1]
