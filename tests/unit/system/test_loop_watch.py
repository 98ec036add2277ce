"""A loop's promise: late only beyond what was promised and the slack."""

from bridge.system.loop_watch import SLACK_SECONDS, LoopWatch


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_loop_that_waits_as_long_as_it_said_is_not_late():
    clock = Clock()
    loop_watch = LoopWatch(clock)
    loop_watch.expect_within(60.0)
    clock.seconds = 60.0 + SLACK_SECONDS
    assert loop_watch.late_seconds == 0
    clock.seconds += 5.0
    assert loop_watch.late_seconds == 5.0
    loop_watch.expect_within(1.0)
    assert loop_watch.late_seconds == 0


def test_call_may_take_a_tenth_more_than_its_deadline():
    clock = Clock()
    loop_watch = LoopWatch(clock)
    loop_watch.expect_call_within(150.0)
    clock.seconds = 165.0 + SLACK_SECONDS
    assert round(loop_watch.late_seconds, 6) == 0
    clock.seconds += 1.0
    assert round(loop_watch.late_seconds, 6) == 1


def test_loop_that_has_ended_is_never_late():
    clock = Clock()
    loop_watch = LoopWatch(clock)
    assert loop_watch.late_seconds == 0
    loop_watch.expect_within(1.0)
    loop_watch.idle()
    clock.seconds = 1e9
    assert loop_watch.late_seconds == 0
