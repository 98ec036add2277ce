"""Pauses of a sink, and their ends: responses, new records, time, age, and manual retries."""

import pytest
from delivery_kit import SOON_SECONDS, always, ids, raising
from waiting import until

from bridge.errors import DeliveryFailed


def fail_eight_times(bench, box):
    """Pause the sink by two failures, and fail six probes: after a second, two more, and so on."""
    for tries, wait_seconds in enumerate((0, 1, 2, 4, 8, 16, 32), start=2):
        bench.advance(wait_seconds)
        bench.until_failed(tries)
    assert len(box.tries) == 8


def test_new_record_is_tried_once_immediately_while_the_sink_is_paused(bench):
    box = bench.sink()
    box.script(*always("fail"))
    bench.add("E-1", "E-2")
    bench.start(chance=0.99)
    fail_eight_times(bench, box)  # the next probe is about a minute away
    bench.add("new")
    until(lambda: len(box.tries) == 9)
    bench.add("newer")
    until(lambda: len(box.tries) == 10)
    assert ids(each[0] for each in box.tries[8:]) == ["new", "newer"]


def test_delivered_new_record_makes_all_rows_due(bench):
    box = bench.sink()
    box.script(*["fail"] * 8)
    bench.add("E-1", "E-2")
    bench.start(chance=0.99)
    fail_eight_times(bench, box)
    bench.add("new")
    assert ids(box.wait_for(3, SOON_SECONDS)) == ["new", "E-1", "E-2"]


def test_only_an_urgent_record_is_tried_during_retry_after(bench):
    box = bench.sink()
    box.script("fail:3600", "fail:3600")
    bench.add("E-1", "E-2")
    bench.start()
    until(lambda: len(box.tries) == 1)
    bench.add("E-3")
    bench.add("P-1", urgent=True)
    until(lambda: len(box.tries) == 2)
    assert ids(box.tries[1]) == ["P-1"]
    assert ids(box.wait_for(1, 5))[0] == "P-1"
    assert ids(box.wait_for(4, 5)) == ["P-1", "E-1", "E-2", "E-3"]  # a response ended the Retry-After


def test_sink_that_returns_410_pauses_until_a_person_retries(bench, caplog):
    box = bench.sink()
    box.script(raising(DeliveryFailed("410 Gone", gone=True)))
    bench.add("E-1")
    bench.start()
    until(lambda: bench.sample("sink_needs_attention") == 1)
    bench.add("P-1", urgent=True)
    bench.advance(1e6)
    bench.add("E-2")
    assert len(box.tries) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "outbox retry" in caplog.text
    bench.retry()
    assert ids(box.wait_for(3, 10)) == ["P-1", "E-1", "E-2"]
    until(lambda: bench.sample("sink_needs_attention") == 0)


def test_manual_retry_ends_a_retry_after(bench):
    box = bench.sink()
    box.script("fail:3600")
    bench.add("E-1")
    bench.start()
    until(lambda: len(box.tries) == 1)
    bench.retry()
    box.wait_for(1, 10)


@pytest.mark.parametrize("trouble", ["none", "paused", "gone"])
def test_records_older_than_max_age_expire_and_are_counted(bench, trouble):
    box = bench.sink(max_age_seconds=100)
    bench.add("old-1", "old-2")
    if trouble != "none":
        box.script(raising(DeliveryFailed("no", retry_after=3_600, gone=trouble == "gone")))
        bench.start()
        until(lambda: bench.sample("sink_retries_total", reason="failed") == 1)
    bench.outbox_kit.wait(60)
    bench.add("young")
    bench.advance(60)
    if trouble == "none":
        bench.start()
        bench.until_totals(delivered=1, expired=2)
        assert ids(box.records) == ["young"]
    else:
        bench.until_totals(pending=1, expired=2)
