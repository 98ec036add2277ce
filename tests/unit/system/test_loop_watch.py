"""A loop's promise: late only beyond what was promised and the slack."""

from bridge.system.loop_watch import SLACK_SECONDS, LoopWatch


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_loop_that_waits_as_long_as_it_said_is_not_late():
    clock = Clock()
    pulse = LoopWatch(clock)
    pulse.promise(60.0)
    clock.seconds = 60.0 + SLACK_SECONDS
    assert pulse.late_seconds == 0
    clock.seconds += 5.0
    assert pulse.late_seconds == 5.0
    pulse.promise(1.0)
    assert pulse.late_seconds == 0


def test_call_may_take_a_tenth_more_than_its_deadline():
    clock = Clock()
    pulse = LoopWatch(clock)
    pulse.promise_call(150.0)
    clock.seconds = 165.0 + SLACK_SECONDS
    assert round(pulse.late_seconds, 6) == 0
    clock.seconds += 1.0
    assert round(pulse.late_seconds, 6) == 1


def test_loop_that_has_ended_is_never_late():
    clock = Clock()
    pulse = LoopWatch(clock)
    assert pulse.late_seconds == 0
    pulse.promise(1.0)
    pulse.rest()
    clock.seconds = 1e9
    assert pulse.late_seconds == 0
