"""Records that a worker sends, their order, and the handling of rejected records."""

import random
import threading
from typing import ClassVar
from uuid import uuid4

import pytest
from delivery_kit import always, ids
from scripted_sink import ScriptedSink
from waiting import until

from bridge.errors import DeliveryFailed, DeliveryRejected


class OneEventABatch(ScriptedSink):
    batch_by_event = True


class HintedSink(OneEventABatch):
    """Records the announced next batches, and fails each time."""

    hints: ClassVar[list[list[str]]] = []

    def prepare_next(self, batch):
        self.hints.append(ids(batch))
        raise RuntimeError("a hint is not a send")


class WarmSink(ScriptedSink):
    """Counts the calls of its warm-up, and fails each time."""

    count: ClassVar[int] = 0

    def warm_up(self):
        WarmSink.count += 1
        raise RuntimeError("the next send reports the error")


def refuse(*event_ids, named="nothing", error=DeliveryRejected):
    """Return an outcome that rejects every batch with one of these events. *named* is the argument of the error."""

    def outcome(batch):
        culprits = [record for record in batch if record.event.event_id in event_ids]
        if culprits:
            arguments = {"nothing": (), "records": (culprits,), "ids": ([each.id for each in culprits],)}
            raise error("no", *arguments[named])

    return outcome


def test_failure_of_a_sink_on_the_next_batch_hint_is_ignored(bench, monkeypatch):
    hints = []
    monkeypatch.setattr(HintedSink, "hints", hints)
    bench.sink(sink_class=HintedSink, box=f"hinted-{uuid4()}", max_batch=10)
    for _ in range(2):
        bench.add("A", "B", "C")
    bench.start()
    bench.until_totals(delivered=6)
    assert hints == [["B", "B"], ["C", "C"]]


def test_sink_warms_up_once_after_the_first_document_without_delaying_records(bench, monkeypatch):
    monkeypatch.setattr(WarmSink, "count", 0)
    box = bench.sink(sink_class=WarmSink)
    bench.has_seen_document = False
    bench.add("before")
    bench.start()
    box.wait_for(1, 10)
    assert WarmSink.count == 0
    bench.has_seen_document = True
    until(lambda: WarmSink.count)
    bench.add("after")
    assert ids(box.wait_for(2, 10)) == ["before", "after"]
    bench.until_totals(delivered=2)
    assert (WarmSink.count, bench.sample("sink_retries_total", reason="exception")) == (1, None)


def test_urgent_records_are_sent_first_with_their_event_in_order(bench):
    box = bench.sink()
    bench.add("E-1", "E-2")
    bench.add("P-1")
    bench.add("P-1", urgent=True)
    bench.start()
    records = box.wait_for(4, 10)
    assert ids(records) == ["P-1", "P-1", "E-1", "E-2"]
    assert records[0].sequence < records[1].sequence


@pytest.mark.parametrize("max_batch", [1, 7])
@pytest.mark.parametrize("sink_class", [ScriptedSink, OneEventABatch])
def test_random_failures_lose_no_record_and_keep_the_order_of_events(bench, sink_class, max_batch):
    chance = random.Random(max_batch)

    def unreliable(batch):
        assert len(batch) <= max_batch
        assert not sink_class.batch_by_event or len(set(ids(batch))) == 1
        if chance.random() < 0.25:
            raise chance.choice([DeliveryFailed("busy"), OSError("reset"), DeliveryFailed("wait", retry_after=0.05)])

    box = bench.sink(sink_class=ScriptedSink, max_batch=max_batch)
    bench._classes["s"] = sink_class
    box.script(*always(unreliable))
    names = [f"E-{number}" for number in range(12)]
    bench.add(*names)
    bench.start()
    for _ in range(7):
        bench.add(*names)
    records = box.wait_for(96, 60)
    bench.until_totals(delivered=96)
    by_event = {name: [record.sequence for record in records if record.event.event_id == name] for name in names}
    assert all(sequences == sorted(set(sequences)) for sequences in by_event.values())
    assert sorted(record.sequence for record in records) == list(range(1, 97))


@pytest.mark.parametrize("urgent", [False, True])
@pytest.mark.parametrize("max_batch", [1, 10])
def test_two_failing_events_do_not_block_others(bench, max_batch, urgent):
    box = bench.sink(max_batch=max_batch)
    box.script(*always(refuse("P-1", "P-2", error=DeliveryFailed)))
    bench.add("P-1", "P-2", urgent=urgent)
    for _ in range(3):
        bench.add("P-1", *(f"E-{number}" for number in range(40)))
    bench.start()
    box.wait_for(120, 20)
    bench.until_totals(delivered=120, pending=5)


@pytest.mark.parametrize("named", ["nothing", "records", "ids"])
@pytest.mark.parametrize("sink_class", [ScriptedSink, OneEventABatch])
def test_only_the_rejected_record_of_a_batch_is_parked(bench, sink_class, named):
    box = bench.sink(max_batch=100)
    bench._classes["s"] = sink_class
    box.script(*always(refuse("bad", named=named)))
    bench.add("E-1", "bad", "E-2")
    bench.add("E-1", "E-2")
    bench.start()
    assert sorted(ids(box.wait_for(4, 10))) == ["E-1", "E-1", "E-2", "E-2"]
    bench.until_totals(delivered=4, parked=1)
    assert named == "nothing" or sum("bad" in ids(batch) for batch in box.tries) == 1


def test_a_parked_record_does_not_block_its_event(bench):
    box = bench.sink()
    box.script("reject")
    bench.add("E-1")
    bench.add("E-1")
    bench.start()
    assert [record.sequence for record in box.wait_for(1, 10)] == [2]
    bench.until_totals(delivered=1, parked=1)


def test_hanging_send_is_abandoned_and_the_sink_recovers(bench):
    box = bench.sink(timeout_seconds=0.2)
    box.script("hang", "hang", "hang")
    bench.add("E-1")
    before = threading.active_count()
    bench.start()
    box.wait_for(1, 20)
    bench.until_totals(delivered=1)
    until(lambda: threading.active_count() <= before + 2)


def test_a_sink_that_hangs_does_not_delay_another(bench):
    hung, healthy = bench.sink("hung", timeout_seconds=30.0), bench.sink("healthy")
    hung.script("hang")
    bench.start("hung")
    bench.start("healthy")
    bench.add("E-0")
    until(lambda: hung.tries)
    for number in range(50):
        bench.add(f"E-{number + 1}")
        healthy.wait_for(number + 1, 10)
    healthy.wait_for(51, 10)
    assert bench.totals("hung") == {"pending": 51}


def test_record_of_several_megabytes_is_sent(bench):
    box = bench.sink(max_batch=10)
    bench.add("huge", description="x" * (3 * 1024 * 1024))
    bench.add("next", "last")
    bench.start()
    assert ids(box.wait_for(3, 10)) == ["huge", "next", "last"]


def test_preempt_after_ten_thousand_records_is_sent_next(bench):
    at_the_gate, gate = threading.Event(), threading.Event()

    def wait_at_the_gate(_batch):
        at_the_gate.set()
        gate.wait(60)

    box = bench.sink(timeout_seconds=60.0)
    box.script(wait_at_the_gate)
    bench.outbox_kit.fill(bench.outbox, 10_000, events=1_000)
    bench.start()
    assert at_the_gate.wait(10)
    bench.add("P-1", urgent=True)
    gate.set()
    assert ids(box.wait_for(2, 10))[1] == "P-1"


def test_worker_failure_with_varying_message_is_logged_once(bench, caplog):
    bench.sink()
    worker = bench.start()
    for number in (1, 2):
        worker._report_fault(RuntimeError(f"bug {number}"))
    assert [entry.getMessage().rpartition(" ")[2] for entry in caplog.records if "worker failed" in entry.message] == [
        "1"
    ]
