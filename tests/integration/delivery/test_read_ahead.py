"""What the workers hold of a backlog in memory: as much as a request or two need, however large the records are."""

import tracemalloc

import pytest

from bridge.outbox import deliveries
from bridge.testing.sinks import ScriptedSink

MIB = 1024 * 1024
SINKS = ("one", "two", "three", "four")


class OneEventABatch(ScriptedSink):
    batch_by_event = True


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("sink_class", "max_batch"), [(ScriptedSink, 1), (ScriptedSink, 100), (OneEventABatch, 100)])
def test_four_sinks_that_hang_hold_little_of_a_backlog_of_large_records(bench, sink_class, max_batch):
    boxes = [bench.sink(name, max_batch=max_batch) for name in SINKS]
    for name, box in zip(SINKS, boxes, strict=True):
        bench._classes[name] = sink_class
        box.script("hang")
    bench.add(*(f"E-{number}" for number in range(64)), description="x" * (MIB // 6))
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for name in SINKS:
        bench.start(name)
    bench.until(lambda: all(box.tries for box in boxes))
    held, peak = tracemalloc.get_traced_memory()
    # Each may hold what it has read, what it sends of that as records, and for a moment what the sink encodes.
    assert held - before < 16 * MIB
    assert peak - before < 24 * MIB
    for box in boxes:
        box.released.set()
    bench.until(lambda: all(bench.totals(name) == {"delivered": 64} for name in SINKS))
    for box in boxes:
        assert sorted(record.event.event_id for record in box.records) == sorted(f"E-{number}" for number in range(64))


@pytest.mark.usefixtures("traced")
def test_news_of_large_records_costs_a_paused_sink_nothing(bench):
    box = bench.sink()
    box.script(*["fail"] * 10_000)
    bench.add("E-1", "E-2")
    bench.start(chance=0.999)
    bench.until_failed(2)
    bench.stop()
    bench.add(*(f"N-{number}" for number in range(16)), description="x" * (MIB // 4))
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    news = bench.outbox.read(deliveries.new_events, "s", limit=64, skip=frozenset(), after=2).result()
    assert [row.event_key for row in news] == [f"N-{number}" for number in range(16)]
    assert tracemalloc.get_traced_memory()[1] - before < MIB


def test_one_record_larger_than_what_is_read_ahead_goes_all_the_same(bench):
    box = bench.sink(max_batch=10)
    bench.add("huge", description="x" * (3 * MIB))
    bench.add("next", "last")
    bench.start()
    assert [record.event.event_id for record in box.wait_for(3, 10)] == ["huge", "next", "last"]
