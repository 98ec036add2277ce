"""A loop's promise: late only beyond what was promised and the slack."""

from bridge.system.loop_watch import SLACK_SECONDS, LoopWatch
from bridge.testing.clock import ManualClock


def test_loop_that_waits_as_long_as_it_said_is_not_late():
    time = ManualClock()
    loop_watch = LoopWatch(time.clock)
    loop_watch.expect_within(60.0)
    time.advance(60.0 + SLACK_SECONDS)
    assert loop_watch.late_seconds == 0
    time.advance(5.0)
    assert loop_watch.late_seconds == 5.0
    loop_watch.expect_within(1.0)
    assert loop_watch.late_seconds == 0


def test_call_may_take_a_tenth_more_than_its_deadline():
    time = ManualClock()
    loop_watch = LoopWatch(time.clock)
    loop_watch.expect_call_within(150.0)
    time.advance(165.0 + SLACK_SECONDS)
    assert round(loop_watch.late_seconds, 6) == 0
    time.advance(1.0)
    assert round(loop_watch.late_seconds, 6) == 1


def test_loop_that_has_ended_is_never_late():
    time = ManualClock()
    loop_watch = LoopWatch(time.clock)
    assert loop_watch.late_seconds == 0
    loop_watch.expect_within(1.0)
    loop_watch.idle()
    time.advance(1e9)
    assert loop_watch.late_seconds == 0
