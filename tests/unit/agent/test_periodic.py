"""Periodic tasks: each runs at its own interval, and never while the interval is 0."""

from bridge.agent.periodic import PeriodicTasks
from bridge.testing.simulator.clock import ManualClock


def done_at(seconds, *, until, now=False):
    """Return the times at which a task with this interval ran, with one turn per second."""
    time, moments = ManualClock(), []
    tasks = PeriodicTasks(time.clock)
    tasks.every(seconds, lambda: moments.append(time.monotonic()), now=now)
    for _ in range(until + 1):
        tasks.run_due()
        time.advance(1)
    return moments


def test_task_runs_at_its_interval():
    assert done_at(5.0, until=12) == [5, 10]
    assert done_at(5.0, until=12, now=True) == [0, 5, 10]
    assert done_at(0.0, until=12, now=True) == []


def test_interval_that_was_0_takes_effect_at_once():
    time, moments, pace = ManualClock(), [], [0.0]
    tasks = PeriodicTasks(time.clock)
    tasks.every(lambda: pace[0], lambda: moments.append(time.monotonic()), now=True)
    for tick in range(10):
        pace[0] = 2.0 if tick >= 4 else 0.0
        tasks.run_due()
        time.advance(1)
    assert moments == [4, 6, 8]


def test_shorter_interval_takes_effect_at_once():
    time, moments, pace = ManualClock(), [], [86_400.0]
    tasks = PeriodicTasks(time.clock)
    tasks.every(lambda: pace[0], lambda: moments.append(time.monotonic()))
    for tick in range(200):
        pace[0] = 60.0 if tick >= 10 else 86_400.0
        tasks.run_due()
        time.advance(1)
    assert moments == [60, 120, 180]


def test_failing_task_is_logged_once_and_does_not_stop_other_tasks(caplog):
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
