"""How old a record is while the wall clock is set: as old as the time that has passed, by no clock that jumped."""

from __future__ import annotations

import pytest

from bridge.health.reporter import HealthReporter

HOUR = 3_600


@pytest.fixture
def set_clock(bench):
    """Return a function that sets the wall clock."""

    def set_clock(seconds):
        bench.outbox_kit.set_clock(seconds)
        bench.notify()

    return set_clock


@pytest.mark.parametrize("step_seconds", [HOUR, -HOUR])
def test_a_record_expires_by_the_time_that_passed_whatever_the_clock_was_set_to(bench, set_clock, step_seconds):
    box = bench.sink(max_age_seconds=600)
    box.script(*["fail"] * 10_000)
    bench.add("before")
    bench.start()
    bench.until_failed(1)
    bench.advance(300)
    set_clock(step_seconds)
    bench.add("after")
    bench.advance(290)
    assert bench.totals() == {"pending": 2}
    bench.advance(20)
    bench.until_totals(pending=1, expired=1)
    bench.advance(270)
    assert bench.totals() == {"pending": 1, "expired": 1}
    bench.advance(30)
    bench.until_totals(expired=2)


@pytest.mark.parametrize("step_seconds", [HOUR, -HOUR])
def test_no_sink_looks_stuck_because_the_clock_was_set(bench, set_clock, step_seconds):
    bench.sink()
    bench.add("E-1")
    reporter = HealthReporter(
        outbox=bench.outbox,
        metrics=bench.metrics,
        directory=bench.directory,
        loop_watches=dict,
        sinks=lambda: ["s"],
    )
    bench.metrics.watch_outbox(reporter.outbox)
    bench.advance(100)
    set_clock(step_seconds)
    assert reporter.report().sinks["s"].oldest_pending_seconds == pytest.approx(100)
    assert bench.sample("sink_oldest_pending_age_seconds") == pytest.approx(100)
