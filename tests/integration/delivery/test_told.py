"""What a worker logs and counts, and how it lives with an outbox that fails."""

import logging
import threading
from concurrent.futures import Future

import pytest

from bridge.clock import Clock
from bridge.delivery.batcher import Batcher
from bridge.delivery.results import ResultWriter
from bridge.delivery.retry_schedule import RetrySchedule
from bridge.errors import DeliveryFailed, OutboxError
from bridge.outbox import deliveries
from bridge.outbox.deliveries import DeliveryState
from bridge.outbox.outbox import Outbox
from bridge.outbox.reader import OutboxFile


def always(outcome):
    return [outcome] * 10_000


def raising(error):
    def outcome(_batch):
        raise error

    return outcome


def test_the_same_failure_is_said_once_and_the_recovery_with_its_count(bench, caplog):
    caplog.set_level(logging.INFO)
    box = bench.sink()
    box.script("fail", "fail", "fail")
    bench.add("E-1")
    bench.start()
    box.wait_for(1, 10)
    bench.until(lambda: len(caplog.records) == 2)
    warning, recovery = caplog.records
    assert (warning.levelname, warning.sink) == ("WARNING", "s")
    assert "The script says fail." in warning.message
    assert (recovery.levelname, recovery.failures) == ("INFO", 3)


def test_what_a_person_must_see_to_is_an_error_said_once_and_exported_until_it_is_over(bench, caplog):
    box = bench.sink()
    denied = raising(DeliveryFailed("401 for https://portal.example", needs_attention=True))
    box.script(denied, denied, "fail:0.3", "accept")
    bench.add("E-1")
    bench.start()
    bench.until(lambda: len(box.tries) == 3)
    assert bench.sample("sink_needs_attention") == 1
    box.wait_for(1, 10)
    bench.until(lambda: bench.sample("sink_needs_attention") == 0)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_refusals_for_the_same_reason_are_said_once(bench, caplog):
    box = bench.sink()
    box.script(*always("reject"))
    bench.add(*(f"E-{number}" for number in range(20)))
    bench.start()
    bench.until_totals(parked=20)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "outbox list" in caplog.text


def test_sends_latencies_and_retries_are_counted(bench):
    box = bench.sink()
    box.script("fail", "raise")
    bench.add("E-1")
    bench.outbox_kit.wait(30)
    bench.start()
    box.wait_for(1, 10)
    bench.until(lambda: bench.sample("sink_delivery_latency_seconds_count") == 1)
    assert bench.sample("sink_delivery_latency_seconds_sum") == pytest.approx(30)
    assert bench.sample("sink_send_duration_seconds_count") == 3
    assert bench.sample("sink_retries_total", reason="failed") == 1
    assert bench.sample("sink_retries_total", reason="exception") == 1


def test_an_idle_worker_does_not_wake_up(bench):
    box = bench.sink(max_age_seconds=1)
    bench.add("E-1")
    bench.start()
    box.wait_for(1, 10)
    bench.until_totals(delivered=1)
    looks = []
    bench.until(lambda: looks.append(bench.time.readings) or looks[-2:] == [bench.time.readings] * 2)
    threading.Event().wait(1.5)
    assert bench.time.readings == looks[-1]


class CountingOutbox(Outbox):
    """An outbox that counts how often it was asked for rows, and to read those that come."""

    reads = 0
    awaited = 0

    def read(self, work, /, *args, **kwargs):
        self.reads += work is deliveries.due
        return super().read(work, *args, **kwargs)

    def read_when_added(self, name, work, /, *args, **kwargs):
        future = super().read_when_added(name, work, *args, **kwargs)
        self.awaited += 1
        return future


@pytest.fixture
def counting(bench):
    bench.outbox.close()
    bench.outbox = CountingOutbox(
        bench.directory, max_bytes=2**26, keep_delivered_seconds=3_600, now=bench.outbox_kit.now
    )
    bench.outbox_kit._opened[0] = bench.outbox
    return bench.outbox


def test_records_that_come_to_an_idle_worker_cost_no_read_of_the_outbox(bench, counting):
    box = bench.sink()
    bench.start()
    bench.until(lambda: counting.awaited == 1)  # an empty outbox
    for turn in (1, 2):
        bench.add("E-1", "E-2", "E-3")
        box.wait_for(3 * turn, 10)
        bench.until_totals(delivered=3 * turn)
        bench.until(lambda turn=turn: counting.awaited == turn + 1)
    assert counting.reads == 1


def test_a_record_that_came_after_those_read_as_they_were_added_is_sent_before_them_when_it_is_urgent(bench, counting):
    box = bench.sink()
    bench.start()
    bench.until(lambda: counting.awaited == 1)
    counting.on_added = lambda: None  # the worker is slow to wake up
    bench.outbox_kit.commit(counting, bench.event("E-1"))
    bench.outbox_kit.commit(counting, bench.event("P-1", urgent=True))
    bench.notify()
    box.wait_for(2, 10)
    bench.until_totals(delivered=2)
    assert [record.event.event_id for record in box.records] == ["P-1", "E-1"]


def test_what_a_command_made_pending_is_not_overlooked_for_what_was_read_as_it_was_added(bench, counting):
    box = bench.sink()
    box.script("reject")
    bench.add("E-1")
    bench.start()
    bench.until_totals(parked=1)
    bench.until(lambda: counting.awaited == 1)
    counting.on_added = lambda: None
    bench.outbox_kit.commit(counting, bench.event("E-2"))
    bench.retry()
    box.wait_for(2, 10)
    bench.until_totals(delivered=2)


def test_rows_read_as_they_were_added_are_not_sent_again_after_the_worker_found_them_by_itself(bench):
    bench.sink()
    clock, outbox, schedule = Clock(now=bench.outbox_kit.now), bench.outbox, RetrySchedule(lambda: 0.0)
    results = ResultWriter(outbox, sink="s", clock=clock)
    batcher = Batcher(
        outbox=outbox, results=results, schedule=schedule, config=bench._configs["s"], batch_by_event=False
    )

    def batch():
        return [row.event_key for row in batcher.next(0.0)[1]]

    def wake():
        batcher.note_new_records(0.0, wall=clock.timestamp())

    assert (batch(), batch()) == ([], [])
    batcher.await_new_rows()
    bench.add("E-1")
    assert batch() == ["E-1"], "found without having been woken"
    results.finished(bench.outbox.read(deliveries.due, "s", limit=1).result(), DeliveryState.DELIVERED)
    results.wait()
    wake()
    assert batch() == []
    batcher.await_new_rows()
    bench.add("E-2")
    wake()
    assert batch() == ["E-2"]


class ForgetfulOutbox(Outbox):
    """An outbox that cannot write down what became of records while `is_broken`."""

    is_broken = True
    settled = 0

    def write_soon(self, work, /, *args, **kwargs):
        if work is not deliveries.record_results or not self.is_broken:
            return super().write_soon(work, *args, **kwargs)
        self.settled += 1
        if self.settled % 2:
            raise OutboxError("The outbox is closed.")
        future = Future()
        future.set_exception(OutboxError("The outbox failed: disk on fire."))
        return future


def test_what_cannot_be_written_down_is_not_sent_again_and_is_written_later(bench, caplog):
    bench.outbox = bench.outbox_kit._opened[0] = forgetful(bench)
    box = bench.sink()
    bench.add("E-1", "E-2", "E-3")
    bench.start()
    box.wait_for(3, 10)
    bench.add("E-4")
    bench.add("E-1")
    box.wait_for(5, 10)
    assert bench.totals() == {"pending": 5}
    bench.until(lambda: len(caplog.records) == 2)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]  # a new reason is said too
    bench.outbox.is_broken = False
    bench.advance(10)
    bench.until_totals(delivered=5)
    assert len(box.records) == 5


def test_a_failure_that_cannot_be_written_down_is_tried_again_no_sooner(bench):
    bench.outbox = bench.outbox_kit._opened[0] = forgetful(bench)
    box = bench.sink()
    box.script(*always("fail"))
    bench.add("E-1")
    bench.start(chance=0.99)
    for tries, wait_seconds in ((1, 1), (2, 2), (3, 0)):
        bench.until_failed(tries)
        bench.advance(wait_seconds)
    threading.Event().wait(0.3)
    assert len(box.tries) == 3


def forgetful(bench):
    bench.outbox.close()
    return ForgetfulOutbox(bench.directory, max_bytes=2**26, keep_delivered_seconds=3_600, now=bench.outbox_kit.now)


def test_a_worker_survives_an_outbox_that_cannot_be_read_for_a_while(bench, caplog):
    class Unreadable(ForgetfulOutbox):
        def read(self, work, /, *args, **kwargs):
            if work is deliveries.due and self.is_broken:
                raise OutboxError("The outbox failed: disk on fire.")
            return super().read(work, *args, **kwargs)

    bench.outbox.close()
    kit = bench.outbox_kit
    bench.outbox = Unreadable(
        bench.directory, max_bytes=2**26, keep_delivered_seconds=3_600, now=kit.now, runtime=kit.runtime
    )
    bench.outbox_kit._opened[0] = bench.outbox
    box = bench.sink()
    bench.add("E-1")
    bench.start()
    bench.until(lambda: caplog.records)
    bench.outbox.is_broken = False
    box.wait_for(1, 10)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert caplog.records[0].exc_info


def test_nobody_is_called_any_more_when_what_they_were_called_for_is_given_up(bench):
    box = bench.sink()
    box.script(*always(raising(DeliveryFailed("401", needs_attention=True))))
    bench.add("E-1")
    bench.start(chance=1.0)
    bench.until(lambda: bench.sample("sink_needs_attention") == 1)
    OutboxFile(bench.directory).discard("s")
    bench._workers["s"].notify(by_command=True)
    bench.until(lambda: bench.sample("sink_needs_attention") == 0)
    assert box.tries
