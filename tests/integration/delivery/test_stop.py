"""Stop of a worker: due records are sent within the grace period, and other records stay pending."""

import os
import subprocess
import sys
import threading
import time
from contextlib import closing

from outbox_kit import refuse_writes
from waiting import until


def stop(worker, grace_seconds, within_seconds):
    started = time.monotonic()
    worker.stop(grace_seconds=grace_seconds)
    has_ended = worker.join(within_seconds)
    return has_ended, time.monotonic() - started


def test_idle_worker_stops_immediately(bench):
    bench.sink()
    worker = bench.start()
    has_ended, seconds = stop(worker, grace_seconds=30, within_seconds=20)
    assert has_ended
    assert seconds < 10  # the grace period is 30 s, and an idle worker sleeps for 60 s


def test_due_records_are_sent_and_committed_within_the_grace_period(bench):
    box = bench.sink()
    at_the_gate, gate = threading.Event(), threading.Event()

    def wait_at_the_gate(_batch):
        at_the_gate.set()
        gate.wait(10)

    box.script(wait_at_the_gate)
    bench.outbox_kit.fill(bench.outbox, 500)
    worker = bench.start()
    assert at_the_gate.wait(10)
    worker.stop(grace_seconds=30)
    gate.set()
    assert worker.join(30)
    assert len(box.records) == 500
    bench.outbox.close()
    with closing(bench.outbox_kit.open(sinks=())) as outbox:
        assert bench.outbox_kit.totals(outbox)["s"]["delivered"] == 500


def test_record_that_is_not_saved_yet_is_sent_within_the_grace_period(bench, monkeypatch):
    box = bench.sink()
    bench.outbox_kit.saved(bench.outbox)
    refuse_writes(monkeypatch)
    bench.outbox_kit.commit(bench.outbox, bench.outbox_kit.event(), save=False)
    worker = bench.start()
    worker.stop(grace_seconds=30)
    assert not worker.join(0.2)
    bench.advance(0.6)
    assert worker.join(10)
    assert len(box.records) == 1


def test_records_not_sent_within_the_grace_period_stay_pending(bench):
    box = bench.sink()
    box.script(*[lambda _batch: threading.Event().wait(0.5)] * 1_000)
    bench.outbox_kit.fill(bench.outbox, 100)
    worker = bench.start()
    box.wait_for(1, 10)
    has_ended, seconds = stop(worker, grace_seconds=1.0, within_seconds=20)
    assert has_ended
    assert seconds < 20  # all records together take 50 s
    totals = bench.totals()
    assert totals["delivered"] == len(box.records) < 100
    assert totals["pending"] == 100 - totals["delivered"]


def test_send_that_ends_after_the_outbox_closed_is_repeated(bench):
    box = bench.sink(timeout_seconds=30.0)
    gate = threading.Event()
    box.script(lambda _batch: gate.wait(30))
    bench.add("E-1")
    worker = bench.start()
    until(lambda: box.tries)
    worker.stop(grace_seconds=0.0)
    assert not worker.join(0.1)
    bench.outbox.close()
    gate.set()
    assert worker.join(10)
    bench.outbox = bench.outbox_kit.open(sinks=())
    bench.start()
    first, second = box.wait_for(2, 10)
    assert first.id == second.id
    bench.until_totals(delivered=1)


HANGING_PROCESS = """
import sys, threading, time
from pathlib import Path
from bridge.clock import utc_now
from bridge.config.settings import SinkSettings
from bridge.delivery.worker import DeliveryWorker
from bridge.events.record import Transition, new_record
from bridge.metrics.metrics import Metrics
from bridge.outbox.outbox import Outbox
from bridge.delivery.router import Router
from bridge.sink import Sink, SinkConfig

sending = threading.Event()

class Hanging(Sink):
    def send(self, batch):
        sending.set()
        threading.Event().wait()

    def close(self):
        threading.Event().wait()

config = SinkConfig(name="s", heartbeat=True, timeout_seconds=60.0)
outbox = Outbox(Path(sys.argv[1]))
assert outbox.wait_loaded(20)
outbox.configure(Router([config]), ["s"], labels={})
outbox.append([new_record(Transition.HEARTBEAT, utc_now())])
settings = SinkSettings(type_name="s", sink_class=Hanging, config=config)
worker = DeliveryWorker(settings, outbox=outbox, metrics=Metrics().sink("s"))
worker.start()
assert sending.wait(20)
worker.stop(grace_seconds=0.2)
assert not worker.join(0.3)
outbox.close()
"""


def test_permanently_hanging_sink_does_not_block_the_process_exit(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HANGING_PROCESS, str(tmp_path)],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_only_a_worker_stuck_beyond_its_deadline_is_late(bench):
    box = bench.sink(timeout_seconds=600.0)
    at_the_gate, gate = threading.Event(), threading.Event()

    def wait_at_the_gate(_batch):
        at_the_gate.set()
        gate.wait(30)

    box.script(wait_at_the_gate)
    bench.add("E-1")
    worker = bench.start()
    try:
        assert at_the_gate.wait(10)
        bench.time.lead_seconds += 600 * 1.1 + 25
        assert worker.loop_watch.late_seconds == 0
        bench.time.lead_seconds += 10
        assert 0 < worker.loop_watch.late_seconds < 11
    finally:
        gate.set()
    until(lambda: worker.loop_watch.late_seconds == 0)
    bench.time.lead_seconds += 60  # the full wait of an idle worker
    assert worker.loop_watch.late_seconds == 0
    bench.stop()
    bench.time.lead_seconds += 1e6
    assert worker.loop_watch.late_seconds == 0
