"""Work on a thread of its own, and a loop that is late only beyond its deadline and the slack."""

import threading
from concurrent.futures import wait

import pytest

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


def test_work_runs_on_a_daemon_thread_of_its_name_and_its_result_comes_back():
    def work(number, *, factor):
        thread = threading.current_thread()
        return thread.name, thread.daemon, number * factor

    assert run_daemon("aside", work, 21, factor=2).result(5) == ("aside", True, 42)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_whatever_work_raises_comes_back(error):
    def work():
        raise error

    assert run_daemon("aside", work).exception(5) is error


def test_work_that_began_is_not_cancelled():
    go_on = threading.Event()
    running = run_daemon("aside", go_on.wait, 5)
    assert not running.cancel()
    assert not wait([running], 0.01).done
    go_on.set()
    assert running.result(5)
