"""What was pending when the agent started may be over: a sink that disturbs people waits for the first document."""

import pytest

from bridge.events.event import Document


@pytest.fixture
def bench(bench):
    bench.has_seen_document = False
    return bench


def told(box):
    return [(record.event_key, record.transition.value) for batch in box.tries for record in batch]


def look(bench):
    """Let the worker look at what is pending, a few times."""
    before = bench.time.readings
    bench.until(lambda: bench.time.readings > before + 5)


def test_what_ended_while_the_agent_was_down_pages_nobody(bench, pager):
    bench.add("E")
    bench.start()
    look(bench)
    assert told(pager) == []
    gone = Document(incarnation=2)
    bench.outbox_kit.commit(bench.outbox, bench.event("E"), transition="canceled", document=gone)
    bench.has_seen_document = True
    bench.until_totals(expired=2)
    assert told(pager) == []


def test_what_still_stands_is_told_once_the_document_was_seen(bench, pager):
    bench.add("E")
    bench.start()
    look(bench)
    bench.has_seen_document = True
    bench.until_totals(delivered=1)
    assert told(pager) == [("E", "scheduled")]


def test_an_end_that_was_pending_waits_too_since_another_event_may_run(bench, pager):
    gone = Document(incarnation=2)
    bench.add("E")
    bench.has_seen_document = True
    bench.start()
    bench.until_totals(delivered=1)
    bench.stop()
    bench.has_seen_document = False
    bench.outbox_kit.commit(bench.outbox, bench.event("E"), transition="completed", document=gone)
    bench.start()
    look(bench)
    assert told(pager) == [("E", "scheduled")]
    bench.has_seen_document = True
    bench.until_totals(delivered=2)


def test_an_eviction_waits_for_no_document(bench, pager):
    bench.add("E")
    bench.add("P", urgent=True)
    bench.start()
    bench.until_totals(delivered=1, pending=1)
    look(bench)
    assert told(pager) == [("P", "scheduled")]


def test_what_the_first_document_brings_does_not_wait(bench, pager):
    bench.start()
    bench.add("E")
    bench.until_totals(delivered=1)
    assert told(pager) == [("E", "scheduled")]


def test_a_silent_metadata_service_is_waited_for_a_few_seconds_only(bench, pager):
    bench.add("E")
    bench.start()
    bench.advance(3)
    look(bench)
    assert told(pager) == []
    bench.advance(3)
    bench.until_totals(delivered=1)
    assert told(pager) == [("E", "scheduled")]


def test_a_sink_that_takes_all_of_what_was_waits_for_no_document(bench):
    bench.sink()
    bench.add("E")
    bench.start()
    bench.until_totals(delivered=1)
