"""Selection of rows for the next request: urgent rows first, each event in sequence, failing events alone."""

import pytest

from bridge.delivery.batcher import Batching, new_rows, next_batch
from bridge.delivery.retry_schedule import FailedEvent, RetrySchedule, SendMode
from bridge.outbox.rows import Delivery, DeliveryState


class Rows:
    """Rows given as texts: the event key, with ! for an urgent row."""

    def __init__(self, *keys, attempts=()):
        self._rows = [
            Delivery(
                sink="s",
                sequence=sequence,
                state=DeliveryState.PENDING,
                event_key=key.rstrip("!"),
                urgent=key.endswith("!"),
                not_before=None,
                aged_from=0.0,
                changed_at=0.0,
                attempts=dict(attempts).get(key, 0),
            )
            for sequence, key in enumerate(keys, start=1)
        ]

    def __iter__(self):
        return iter(sorted(self._rows, key=lambda row: not row.urgent))

    def of_event(self, event_key):
        return (row for row in self._rows if row.event_key == event_key)


@pytest.fixture
def schedule():
    return RetrySchedule(lambda: 0.999)


def fail(schedule, key, *, urgent=False, now=0.0, during=SendMode.ALL, **how):
    event = FailedEvent(event_key=key, urgent=urgent, seconds_to_not_before=None)
    schedule.failed([event], now, during=during, has_urgent=urgent, seconds_to_notice=None, **how)


def chosen(rows, schedule, *, now=0.0, max_batch=10, by_event=False, alone=(), **options):
    batching = Batching(max_batch=max_batch, by_event=by_event, alone=set(alone))
    return [row.sequence for row in next_batch(rows, schedule, now, batching=batching, **options)]


def test_urgent_rows_go_first(schedule):
    assert chosen(Rows("a", "b!", "c"), schedule) == [2, 1, 3]


def test_batch_by_event_never_mixes_events(schedule):
    assert chosen(Rows("a", "b", "a"), schedule, by_event=True) == [1, 3]


def test_delayed_event_is_skipped_and_others_continue(schedule):
    fail(schedule, "a")
    assert chosen(Rows("a", "b", "a", "c"), schedule) == [2, 4]


def test_failing_event_is_sent_alone_one_record_at_a_time(schedule):
    fail(schedule, "a")
    assert chosen(Rows("a", "a"), schedule, now=10.0) == [1]


def test_event_without_failures_is_sent_first_after_a_failure(schedule):
    fail(schedule, "a")
    assert chosen(Rows("a", "b"), schedule, now=10.0, max_batch=1) == [2]


@pytest.mark.parametrize(("alone", "expected"), [([1], [1]), ([2], [1]), ([3], [1, 2])])
def test_row_of_a_rejected_batch_is_sent_alone(schedule, alone, expected):
    assert chosen(Rows("a", "b", "c"), schedule, alone=alone) == expected


def test_next_batch_excludes_rows_of_the_current_batch(schedule):
    rows = Rows("a", "b", "a", "b")
    batching = Batching(max_batch=10, by_event=True)
    batch = next_batch(rows, schedule, 0.0, batching=batching)
    assert chosen(rows, schedule, by_event=True, after=batch) == [2, 4]


def test_probe_is_the_record_with_the_fewest_attempts(schedule):
    fail(schedule, "a")
    fail(schedule, "b")
    assert chosen(Rows("a", "b", "c", attempts={"a": 5, "b": 2, "c": 3}), schedule, now=10.0) == [2]


def test_failed_urgent_event_has_its_own_timer_and_is_not_a_probe(schedule):
    fail(schedule, "p", urgent=True)
    fail(schedule, "a")
    assert schedule.mode(1.0) is SendMode.PROBE
    assert chosen(Rows("p!", "a"), schedule, now=1.0) == [2]


def test_new_record_of_an_event_is_tried_immediately(schedule):
    assert chosen(Rows("a", "b", "b"), schedule, fresh_event="b") == [2]
    assert chosen(Rows("a"), schedule, fresh_event="gone") == []


def test_new_rows_are_the_untried_rows_above_a_sequence():
    assert [row.sequence for row in new_rows(Rows("a", "b", "c!", attempts={"b": 1}), after=1)] == [3]
