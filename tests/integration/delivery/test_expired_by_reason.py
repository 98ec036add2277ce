"""Why records expired, as a metric tells it: they were too old, or their event was over."""

import pytest
from delivery_kit import Pager

from bridge.events.event import Document
from bridge.health.reporter import HealthReporter


class EndingPager(Pager):
    """A pager that wants of what began the end alone."""

    @classmethod
    def superseded_by_end(cls, config, record):
        del config, record
        return True


@pytest.fixture(autouse=True)
def pager(bench):
    return bench.sink(sink_class=EndingPager, max_age_seconds=600)


def expired(bench):
    """Return what the metrics tell of the sink, as one scrape sees it."""
    reporter = HealthReporter(
        outbox=bench.outbox, metrics=bench.metrics, directory=bench.directory, loop_watches=dict, sinks=lambda: ["s"]
    )
    bench.metrics.watch_outbox(reporter.outbox)
    found = {reason: bench.sample("sink_expired_by_reason_total", reason=reason) for reason in ("age", "event_over")}
    assert bench.sample("sink_expired_total") == sum(found.values())
    return found


def end(bench, event_id):
    gone = Document(incarnation=2)
    bench.outbox_kit.commit(bench.outbox, bench.event(event_id), transition="canceled", document=gone)
    bench.notify()


def test_a_sink_that_expired_nothing_has_both_reasons(bench, pager):
    bench.add("E-1")
    bench.start()
    pager.wait_for(1, 10)
    assert expired(bench) == {"age": 0, "event_over": 0}


def test_records_that_are_too_old_are_told_from_those_whose_event_was_over(bench, pager):
    pager.script(*["fail"] * 1_000)
    bench.add("old-1", "old-2", "old-3")
    bench.start()
    bench.until(lambda: pager.tries)
    bench.advance(601)
    bench.until_totals(expired=3)
    assert expired(bench) == {"age": 3, "event_over": 0}
    bench.stop()
    bench.add("over")
    end(bench, "over")
    bench.start()
    bench.until_totals(expired=5)
    assert expired(bench) == {"age": 3, "event_over": 2}


def test_a_record_that_its_end_made_superfluous_expired_because_its_event_was_over(bench, pager):
    pager.script("raise")  # it may have arrived, so the end must be told
    bench.add("E-1")
    bench.start()
    bench.until(lambda: len(pager.tries) == 1)
    bench.stop()
    end(bench, "E-1")
    bench.start()
    bench.until_totals(delivered=1, expired=1)
    assert expired(bench) == {"age": 0, "event_over": 1}


def test_the_reasons_are_kept_across_a_restart(bench):
    bench.add("over")
    end(bench, "over")
    bench.start()
    bench.until_totals(expired=2)
    bench.stop()
    bench.outbox.close()
    bench.outbox = bench.outbox_kit.open(sinks=())
    assert expired(bench) == {"age": 0, "event_over": 2}
