"""A model of the retry schedule, with a sink and a worker under random failures."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridge.delivery.retry_schedule import FailedEvent, RetrySchedule, SendMode


class Model:
    """A sink, its pending records, and a worker that follows the schedule. Sends take no time.

    The model checks the rules of the schedule after each step: the causes and the end of a pause, the events that wait
    for a Retry-After header, the events that a new record makes due, and the longest wait of an urgent record.
    """

    def __init__(self, chances, outcomes):
        chances, self.outcomes = itertools.cycle(chances), itertools.cycle(outcomes)
        self.schedule = RetrySchedule(lambda: next(chances))
        self.now = 0.0
        self.pending = {}  # the arrival times of the pending records of each event
        self.attempts = {}
        self.tried_at = {}
        self.bound_until = 0.0
        self.last_failed = None
        assert self.schedule.mode(0.0) is SendMode.ALL
        assert not self.schedule.is_troubled

    def arrive(self, key):
        self.pending.setdefault(key, []).append(self.now)
        if is_urgent(key):
            self.tried_at.setdefault(key, self.now)
        was_paused = self.schedule.is_paused
        if self.schedule.is_troubled:
            self.schedule.record_arrived(key, self.now, urgent=is_urgent(key))
        self.work()
        if not was_paused and not self.schedule.is_paused:
            assert key not in self.pending or self.tried_at[key] == self.now, f"{key} was not tried at once."

    def wait(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.schedule.next_at(), end)
            self.work()

    def work(self):
        for _ in range(200):
            mode = self.schedule.mode(self.now)
            key = self.pick(mode)
            if key is not None:
                self.send(key, mode)
                continue
            self.schedule.nothing_pending(mode, self.now)
            if not self.schedule.is_paused and mode is SendMode.PROBE:
                self.bound_until, self.last_failed = 0.0, None
            if mode in {SendMode.ALL, SendMode.WAIT}:
                break
        else:
            pytest.fail("The worker spins.")
        assert self.schedule.next_at() > self.now
        self.check_urgent()

    def pick(self, mode):
        schedule, now, keys = self.schedule, self.now, sorted(self.pending, key=lambda key: self.pending[key][0])
        if mode is SendMode.WAIT:
            return None
        if mode is SendMode.FRESH:
            keys = [key for key in [schedule.take_fresh()] if key in self.pending]
        elif mode is SendMode.URGENT:
            keys = [key for key in keys if is_urgent(key) and key not in schedule.urgent_blocked(now)]
        elif mode is SendMode.PROBE:
            keys = [key for key in keys if key not in schedule.urgent_failing]
        else:
            clean = [key for key in keys if schedule.last_send_failed and key not in schedule.failing_events]
            keys = clean or [key for key in keys if key not in schedule.blocked(now)]
        attempts = {} if mode is SendMode.ALL else self.attempts
        return min(keys, key=lambda key: (not is_urgent(key), attempts.get(key, 0)), default=None)

    def send(self, key, mode):
        assert is_urgent(key) or self.now >= self.bound_until, f"{key} breaks a Retry-After."
        outcome = next(self.outcomes)
        if outcome == "accept":
            self.accept(key)
            return
        self.attempts[key] = self.attempts.get(key, 0) + 1
        self.tried_at[key] = self.now
        retry_after = outcome if isinstance(outcome, float) else None
        is_pause = self.schedule.is_paused or self.last_failed not in {None, key} or bool(retry_after)
        self.bound_until = max(self.bound_until, self.now + min(retry_after or 0.0, 3_600.0))
        self.last_failed = key
        event = FailedEvent(event_key=key, urgent=is_urgent(key), seconds_to_not_before=None)
        self.schedule.failed(
            [event],
            self.now,
            during=mode,
            has_urgent=any(map(is_urgent, self.pending)),
            seconds_to_notice=None,
            retry_after=retry_after,
        )
        assert self.schedule.is_paused == is_pause

    def accept(self, key):
        self.pending[key].pop(0)
        if not self.pending[key]:
            del self.pending[key]
        self.tried_at.pop(key, None)
        self.attempts.pop(key, None)
        was_paused = self.schedule.is_paused
        self.schedule.succeeded([key])
        self.bound_until, self.last_failed = 0.0, None
        assert self.schedule.mode(self.now) is SendMode.ALL
        assert key not in self.schedule.failing_events
        assert not was_paused or not self.schedule.blocked(self.now)

    def check_urgent(self):
        for key, tried_at in self.tried_at.items():
            if is_urgent(key):
                assert self.now - tried_at <= 2.0 + 1e-6, f"{key} waits for {self.now - tried_at} s."


def is_urgent(key):
    return key.startswith("urgent")


keys = st.sampled_from(["a", "b", "c", "urgent-1", "urgent-2", "urgent-3"])
waits = st.floats(min_value=0.01, max_value=500)
outcomes = st.sampled_from(["accept", "accept", "fail", "fail", "fail", 0.0, 30.0, 7_200.0])
chances = st.lists(st.floats(min_value=0, max_value=1, exclude_max=True), min_size=1, max_size=7)


@given(steps=st.lists(keys | waits, max_size=40), outcomes=st.lists(outcomes, min_size=1, max_size=20), chances=chances)
@example(steps=["a", "b", "urgent-1", "urgent-2", 100.0], outcomes=["fail"], chances=[0.999])
@example(steps=["a", "urgent-1", "urgent-2", "urgent-3", 100.0], outcomes=[7_200.0], chances=[0.999, 0.0])
@example(steps=["urgent-1", "a", 100.0], outcomes=[7_200.0, 30.0, *["fail"] * 60], chances=[0.999])
@example(steps=["urgent-2", 1.625, 284.75, "urgent-1", 1.0], outcomes=["fail"], chances=[0.5, 0.06640625, 0.28125])
def test_urgent_record_waits_at_most_two_seconds_without_busy_loops(steps, outcomes, chances):
    model = Model(chances, outcomes)
    for step in steps:
        model.arrive(step) if isinstance(step, str) else model.wait(step)


@given(steps=st.lists(keys | waits, min_size=1, max_size=30), chances=chances, fails=st.integers(0, 60))
def test_recovered_sink_gets_all_records_within_the_longest_delay(steps, chances, fails):
    model = Model(chances, ["accept"])
    model.outcomes = itertools.chain(["fail"] * fails, itertools.repeat("accept"))
    for step in steps:
        model.arrive(step) if isinstance(step, str) else model.wait(step)
    model.outcomes = itertools.repeat("accept")
    model.wait(300.0)
    assert not model.pending


@given(poison=st.sets(keys, min_size=1, max_size=4), chances=chances)
def test_events_that_always_fail_do_not_stop_the_others(poison, chances):
    model = Model(chances, ["accept"])
    send = model.send

    def answer_by_event(key, mode):
        model.outcomes = itertools.repeat("fail" if key in poison else "accept")
        send(key, mode)

    model.send = answer_by_event
    for _ in range(20):
        for key in ["urgent-1", "urgent-2", "urgent-3", "a", "b", "c"]:
            model.pending.setdefault(key, []).append(0.0)
    model.work()
    model.wait(30.0)
    assert set(model.pending) == poison
