"""How soon a record whose NotBefore is ahead goes out after its webhook was down; the seconds here are not real ones.

tests/bench/test_delivery.py measures the same with the installed agent, in real seconds.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from delivery_kit import SOON_SECONDS

from sinks.webhook.sink import WebhookSink

LONGEST_GAP_SECONDS = 15
#: For the seconds that pass while the worker does something, on a machine that is busy.
SLACK_SECONDS = 4
#: The longest draw of each gap.
LONGEST = 0.999


@pytest.fixture
def peer(peer):
    peer.refuse_for_now()
    return peer


def pass_seconds(bench, peer, seconds, *, step_seconds=1):
    """Let time pass step by step, and the worker do each time what it has to do."""
    for _ in range(seconds // step_seconds):
        before = bench.time.readings
        bench.advance(step_seconds)
        bench.until(lambda before=before: bench.time.readings > before)
        let_finish(bench, peer)


def let_finish(bench, peer):
    """Wait until the worker waits: nothing is on its way, and for some milliseconds it has not read the clock."""
    deadline = time.monotonic() + SOON_SECONDS
    while time.monotonic() < deadline:
        before = bench.time.readings
        time.sleep(0.005)
        done = sum(count for state, count in bench.totals().items() if state != "pending")
        failed = sum(bench.sample("sink_retries_total", reason=reason) for reason in bench.metrics.sink("s").reasons)
        if bench.time.readings == before and done + failed == len(peer.requests):
            return
    pytest.fail("The worker does not come to rest.")


@pytest.mark.parametrize(
    ("down_seconds", "events", "retry_after_seconds"),
    [
        pytest.param(70, 1, None, id="one event"),
        pytest.param(35, 2, None, id="a sink that is paused"),
        pytest.param(70, 2, None, id="a sink that is paused for longer"),
        pytest.param(70, 2, 2, id="a sink that asks for two seconds"),
    ],
)
def test_after_an_outage_a_freeze_waits_fifteen_seconds_at_most(bench, peer, down_seconds, events, retry_after_seconds):
    peer.refuse_for_now(retry_after_seconds)
    bench.sink("s", WebhookSink, url=f"http://{peer.address.authority}/hook")
    not_before = bench.outbox_kit.now() + timedelta(minutes=15)
    bench.add(*(f"E-{number}" for number in range(events)), not_before=not_before)
    bench.start(chance=LONGEST)
    let_finish(bench, peer)
    pass_seconds(bench, peer, down_seconds)
    assert bench.totals() == {"pending": events}
    peer.accept()
    pass_seconds(bench, peer, LONGEST_GAP_SECONDS + SLACK_SECONDS)
    assert bench.totals() == {"delivered": events}


def test_an_event_waits_by_the_soonest_not_before_of_its_records_not_by_that_of_the_first(bench, peer):
    bench.sink("s", WebhookSink, url=f"http://{peer.address.authority}/hook")
    bench.add("E-1")  # its NotBefore is not known yet
    bench.start(chance=LONGEST)
    let_finish(bench, peer)
    pass_seconds(bench, peer, 130, step_seconds=5)  # the gap is over two minutes by now
    bench.add("E-1", not_before=bench.outbox_kit.now() + timedelta(minutes=15))
    pass_seconds(bench, peer, 3)  # it is new, so it is tried at once, in vain
    peer.accept()
    pass_seconds(bench, peer, LONGEST_GAP_SECONDS + SLACK_SECONDS)
    assert bench.totals() == {"delivered": 2}


def test_once_not_before_has_passed_a_sink_that_is_down_is_tried_ever_less_often(bench, peer):
    bench.sink("s", WebhookSink, url=f"http://{peer.address.authority}/hook")
    bench.add("E-1", "E-2", not_before=bench.outbox_kit.now() + timedelta(seconds=60))
    bench.start(chance=LONGEST)
    let_finish(bench, peer)
    pass_seconds(bench, peer, 70, step_seconds=5)
    tries = len(peer.requests)
    pass_seconds(bench, peer, 60, step_seconds=5)
    assert len(peer.requests) - tries <= 2
