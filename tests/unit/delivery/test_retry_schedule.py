"""The retry schedule of a sink, by example. The model test covers properties of every history."""

import pytest

from bridge.delivery.retry_schedule import FailedEvent, RetrySchedule, SendMode

NEVER = float("inf")


def make(chance=0.999999):
    return RetrySchedule(lambda: chance)


def fail(schedule, *keys, now=0.0, during=SendMode.ALL, ahead=None, has_urgent=False, notice=None, **how):
    events = [FailedEvent(event_key=key, urgent=key.startswith("urgent"), seconds_to_not_before=ahead) for key in keys]
    owed = has_urgent or any(event.urgent for event in events)
    schedule.failed(events, now, during=during, has_urgent=owed, seconds_to_notice=notice, **how)


def pause(schedule, now=0.0):
    fail(schedule, "a", now=now)
    fail(schedule, "b", now=now)
    assert schedule.is_paused


def test_retries_of_one_event_double_from_1_second_to_5_minutes_without_a_pause():
    schedule, now, gaps = make(), 0.0, []
    for _ in range(11):
        fail(schedule, "a", now=now)
        gaps.append(round(schedule.next_at() - now))
        now = schedule.next_at()
        assert not schedule.is_paused
    assert gaps == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_one_failed_batch_of_several_events_is_one_failure():
    schedule = make()
    fail(schedule, "a", "b", "c")
    assert not schedule.is_paused
    assert set(schedule.failing_events) == {"a", "b", "c"}
    fail(schedule, "d")
    assert schedule.is_paused


def test_success_of_another_event_makes_a_failed_event_due_once():
    schedule = make()
    fail(schedule, "a")
    schedule.succeeded(["b"])
    assert not schedule.blocked(0.0)
    fail(schedule, "a")
    schedule.succeeded(["b"])
    assert list(schedule.blocked(0.0)) == ["a"]


@pytest.mark.parametrize(("wish", "seconds"), [(60, 60), (3_600, 3_600), (86_400, 3_600), (NEVER, 3_600)])
def test_retry_after_applies_to_the_sink_for_up_to_an_hour_despite_not_before(wish, seconds):
    schedule = make()
    fail(schedule, "a", retry_after=wish, ahead=8, notice=8)
    assert schedule.mode(seconds - 0.001) is SendMode.WAIT
    assert schedule.next_at() == seconds
    assert schedule.mode(seconds) is SendMode.PROBE


@pytest.mark.parametrize("wish", [0, -5, float("nan")])
def test_retry_after_without_a_delay_is_ignored(wish):
    schedule = make()
    fail(schedule, "a", retry_after=wish)
    assert not schedule.is_paused


AHEAD = pytest.mark.parametrize(("ahead", "longest"), [(1e9, 15), (900, 15), (60, 15), (40, 10), (2, 1), (0.5, 1)])


def pause_for_long(schedule):
    """Pause the sink, fail twenty probes, and return the time of the last failure."""
    now = 0.0
    pause(schedule)
    for _ in range(20):
        now = schedule.next_at()
        fail(schedule, "a", now=now, during=SendMode.PROBE)
    assert schedule.next_at() - now == pytest.approx(300, abs=0.01)
    return now


@AHEAD
def test_event_waits_at_most_15_seconds_or_a_quarter_of_the_time_to_not_before(ahead, longest):
    schedule, now = make(), 0.0
    while now < 60:
        now = schedule.next_at() if schedule.is_troubled else now
        fail(schedule, "a", now=now, ahead=ahead)
    assert schedule.next_at() - now == pytest.approx(longest, abs=0.01)


@pytest.mark.parametrize("keys", ["a", "ab"], ids=["one event", "a paused sink"])
def test_retry_delay_is_at_most_5_seconds_in_the_first_minute_of_an_outage(keys):
    schedule, now, gaps = make(), 0.0, []
    for key in keys:
        fail(schedule, key, now=now, ahead=900, notice=900)
    while now < 90:
        gaps.append((now, round(schedule.next_at() - now)))
        now = schedule.next_at()
        fail(schedule, "a", now=now, during=schedule.mode(now), ahead=900, notice=900)
    assert max(gap for at, gap in gaps if at < 60) == 5
    assert max(gap for at, gap in gaps if at >= 60) == 15


@AHEAD
def test_upcoming_not_before_limits_the_wait_for_the_next_probe(ahead, longest):
    schedule, now = make(), 0.0
    pause(schedule)
    for _ in range(20):
        now = schedule.next_at()
        fail(schedule, "a", now=now, during=SendMode.PROBE, notice=ahead)
    assert schedule.next_at() - now == pytest.approx(longest, abs=0.01)


@AHEAD
def test_new_record_with_an_upcoming_not_before_shortens_a_pause(ahead, longest):
    schedule = make()
    now = pause_for_long(schedule)
    schedule.record_arrived("c", now, urgent=False)
    schedule.take_fresh()
    fail(schedule, "c", now=now, during=SendMode.FRESH, notice=ahead)
    assert schedule.next_at() - now == pytest.approx(longest)


@AHEAD
def test_new_record_with_an_upcoming_not_before_waits_only_for_retry_after(ahead, longest):
    schedule = make()
    now = pause_for_long(schedule)
    fail(schedule, "a", now=now, during=SendMode.PROBE, retry_after=20)
    schedule.record_arrived("c", now + 1, urgent=False, seconds_to_not_before=ahead)
    assert schedule.mode(now + 19) is SendMode.WAIT
    assert schedule.next_at() == pytest.approx(now + max(20, 1 + longest))


def test_urgent_and_other_probes_alternate():
    schedule = make()
    pause(schedule)
    schedule.record_arrived("urgent", 10.0, urgent=True)
    assert schedule.mode(10.0) is SendMode.URGENT
    fail(schedule, "urgent", now=10.0, during=SendMode.URGENT)
    assert schedule.mode(20.0) is SendMode.PROBE
    fail(schedule, "a", now=20.0, during=SendMode.PROBE, has_urgent=True)
    assert schedule.mode(20.1) is SendMode.URGENT


def test_probe_without_pending_records_ends_the_pause():
    schedule = make()
    pause(schedule)
    schedule.nothing_pending(SendMode.PROBE, 5.0)
    assert schedule.mode(5.0) is SendMode.ALL
    schedule.nothing_pending(SendMode.ALL, 5.0)
    assert not schedule.is_troubled
