"""Work on a thread of its own, and a loop that is late only beyond its deadline and the slack."""

import threading

from bridge.system.threads import SLACK_SECONDS, LoopWatch, run_daemon
from bridge.testing.simulator.clock import ManualClock


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


def test_work_runs_on_a_daemon_thread_of_its_name_and_its_result_comes_back():
    def work(number, *, factor):
        thread = threading.current_thread()
        return thread.name, thread.daemon, number * factor

    assert run_daemon("aside", work, 21, factor=2).result(5) == ("aside", True, 42)
