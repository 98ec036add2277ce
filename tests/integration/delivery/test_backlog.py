"""How a worker drains a backlog."""

import pytest
from scripted_sink import ScriptedSink

MIB = 1024 * 1024


class OneEventABatch(ScriptedSink):
    batch_by_event = True


@pytest.mark.parametrize("max_batch", [1, 5])
@pytest.mark.parametrize("sink_class", [ScriptedSink, OneEventABatch])
def test_backlog_is_sent_once_with_each_event_in_order(bench, sink_class, max_batch):
    box = bench.sink(sink_class=sink_class, max_batch=max_batch)
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
    if max_batch > 1:
        assert len(box.tries) <= 200


def test_record_of_several_megabytes_is_sent(bench):
    box = bench.sink(max_batch=10)
    bench.add("huge", description="x" * (3 * MIB))
    bench.add("next", "last")
    bench.start()
    assert [record.event.event_id for record in box.wait_for(3, 10)] == ["huge", "next", "last"]


def test_results_survive_a_restart(bench):
    box = bench.sink()
    bench.add("E-1", "E-2")
    bench.start()
    bench.until_totals(delivered=2)
    bench.stop()
    bench.restart()
    bench.start()
    bench.add("E-3")
    bench.until_totals(delivered=3)
    assert [record.event.event_id for record in box.records] == ["E-1", "E-2", "E-3"]
