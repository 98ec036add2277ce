"""What is done now and then: each at its own pace, and nothing while its pace is 0."""

import math
import os

from bridge.agent.periodic import FileWatch, PeriodicTasks
from bridge.testing.simulator.clock import ManualClock


def done_at(seconds, *, until, now=False):
    """Return at which of the runs, one a second, a task of that interval was done."""
    time, moments = ManualClock(), []
    tasks = PeriodicTasks(time.clock)
    tasks.every(seconds, lambda: moments.append(time.monotonic()), now=now)
    for _ in range(until + 1):
        tasks.run_due()
        time.advance(1)
    return moments


def test_task_is_done_at_its_own_pace():
    assert done_at(5.0, until=12) == [5, 10]
    assert done_at(5.0, until=12, now=True) == [0, 5, 10]
    assert done_at(0.0, until=12, now=True) == []


def test_fixed_paces_count_from_the_moment_that_is_given():
    time, moments = ManualClock(), {5.0: [], 2.0: []}
    tasks = PeriodicTasks(time.clock)
    tasks.count_from(time.monotonic() + 1)
    for seconds, done in moments.items():
        tasks.every(seconds, lambda done=done: done.append(time.monotonic()))
    for _ in range(13):
        tasks.run_due()
        time.advance(1)
    assert moments == {5.0: [6, 11], 2.0: [3, 5, 7, 9, 11]}


def test_pace_that_changes_counts_from_the_next_tick():
    time, moments, pace = ManualClock(), [], [0.0]
    tasks = PeriodicTasks(time.clock)
    tasks.every(lambda: pace[0], lambda: moments.append(time.monotonic()), now=True)
    for tick in range(10):
        pace[0] = 2.0 if tick >= 4 else 0.0
        tasks.run_due()
        time.advance(1)
    assert moments == [4, 6, 8]


def test_pace_that_is_quickened_is_in_force_at_once():
    time, moments, pace = ManualClock(), [], [86_400.0]
    tasks = PeriodicTasks(time.clock)
    tasks.every(lambda: pace[0], lambda: moments.append(time.monotonic()))
    for tick in range(200):
        pace[0] = 60.0 if tick >= 10 else 86_400.0
        tasks.run_due()
        time.advance(1)
    assert moments == [70, 130, 190]


def test_there_is_nothing_to_do_until_the_first_task_is_due():
    time = ManualClock()
    tasks = PeriodicTasks(time.clock)
    assert tasks.seconds_to_next() == math.inf
    tasks.every(5.0, lambda: None)
    tasks.every(lambda: 0.0, lambda: None)
    tasks.run_due()
    assert tasks.seconds_to_next() == 5
    tasks.every(lambda: 60.0, lambda: None, now=True)
    assert tasks.seconds_to_next() == 0
    tasks.run_due()
    time.advance(2)
    assert tasks.seconds_to_next() == 3
    time.advance(9)
    assert tasks.seconds_to_next() == 0


def test_tasks_of_one_interval_share_their_turns():
    time, moments = ManualClock(), []
    tasks = PeriodicTasks(time.clock)
    for name in "abc":
        tasks.every(5.0, lambda name=name: moments.append((name, time.monotonic())))
        time.advance(1.75)
    for _ in range(2):
        time.advance(tasks.seconds_to_next())
        tasks.run_due()
    assert moments == [(name, turn) for turn in (5.25, 10) for name in "abc"]


def test_task_that_fails_is_said_once_and_keeps_no_other_from_being_done(caplog):
    time, done, trouble = ManualClock(), [], [ValueError("no")]

    def failing():
        if trouble:
            raise trouble[0]

    tasks = PeriodicTasks(time.clock)
    tasks.every(1.0, failing)
    tasks.every(1.0, lambda: done.append(time.monotonic()))
    caplog.set_level("INFO")
    time.advance(1)
    for tick in range(1, 5):
        if tick == 4:
            trouble.clear()
        tasks.run_due()
        time.advance(1)
    assert done == [1, 2, 3, 4]
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "ValueError" in caplog.text


def test_file_that_is_touched_is_seen_once(tmp_path):
    file, seen = tmp_path / "nudge", []
    watch = FileWatch(file, lambda: seen.append(1))
    watch.check()
    assert seen == []
    file.touch()
    watch.check()
    watch.check()
    assert seen == [1]
    os.utime(file, ns=(1, 1))
    watch.check()
    assert seen == [1, 1]


def test_a_calm_agent_has_fewer_turns_and_a_disturbed_one_its_own_pace_at_once():
    time, moments, calm = ManualClock(), {5.0: [], 60.0: []}, [True]
    tasks = PeriodicTasks(time.clock, is_calm=lambda: calm[0])
    for seconds, done in moments.items():
        tasks.every(seconds, lambda done=done: done.append(time.monotonic()))
    for tick in range(100):
        calm[0] = not 47 <= tick < 62
        tasks.run_due()
        time.advance(1)
    assert moments == {5.0: [5, 15, 30, 45, 50, 55, 60, 65, 75, 90], 60.0: [60]}
