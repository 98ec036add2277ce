"""Tests the logs and metrics of a worker, and its recovery from unexpected errors."""

import logging
import threading

import pytest
from delivery_kit import always, raising
from waiting import until

from bridge.errors import DeliveryFailed
from bridge.outbox import deliveries
from bridge.outbox.rows import DeliveryState


def test_repeated_failure_is_logged_once_and_recovery_with_its_count(bench, caplog):
    caplog.set_level(logging.INFO)
    box = bench.sink()
    box.script("fail", "fail", "fail")
    bench.add("E-1")
    bench.start()
    box.wait_for(1, 10)
    until(lambda: len(caplog.records) == 2)
    warning, recovery = caplog.records
    assert (warning.levelname, warning.sink) == ("WARNING", "s")
    assert "The script says fail." in warning.message
    assert (recovery.levelname, recovery.failures) == ("INFO", 3)


def test_needs_attention_is_logged_once_and_exported_until_it_ends(bench, caplog):
    box = bench.sink()
    denied = raising(DeliveryFailed("401 for https://portal.example", needs_attention=True))
    box.script(denied, denied, "fail:0.3", "accept")
    bench.add("E-1")
    bench.start()
    until(lambda: len(box.tries) == 3)
    assert bench.sample("sink_needs_attention") == 1
    box.wait_for(1, 10)
    until(lambda: bench.sample("sink_needs_attention") == 0)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_sends_latencies_and_retries_are_counted(bench):
    box = bench.sink()
    box.script("fail", "raise")
    bench.add("E-1")
    bench.outbox_kit.wait(30)
    bench.start()
    box.wait_for(1, 10)
    until(lambda: bench.sample("sink_delivery_latency_seconds_count") == 1)
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
    until(lambda: looks.append(bench.time.readings) or looks[-2:] == [bench.time.readings] * 2)
    threading.Event().wait(1.5)
    assert bench.time.readings == looks[-1]


def test_discarded_records_no_longer_need_attention(bench):
    box = bench.sink()
    box.script(*always(raising(DeliveryFailed("401", needs_attention=True))))
    bench.add("E-1")
    bench.start(chance=1.0)
    until(lambda: bench.sample("sink_needs_attention") == 1)
    states = [DeliveryState.PENDING]
    bench.outbox.change(deliveries.discard, "s", states=states, record_id=None, now=0.0)
    bench.notify()
    until(lambda: bench.sample("sink_needs_attention") == 0)
    assert box.tries
