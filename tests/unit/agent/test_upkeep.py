"""How often the outbox is looked after: seldom while there is nothing to find, as before while there may be."""

from concurrent.futures import Future

import pytest

from bridge.agent.upkeep import OutboxUpkeep
from bridge.errors import OutboxError
from bridge.testing.simulator.clock import ManualClock


class CountingOutbox:
    """Notes when it was called; *answers* is what each call of `clean` returns, or raises."""

    def __init__(self, clock, answers=()):
        self.clock, self.answers = clock, list(answers)
        self.in_memory = False
        self.tended, self.cleaned = [], []

    def tend(self):
        self.tended.append(self.clock.monotonic())

    def clean(self):
        self.cleaned.append(self.clock.monotonic())
        future = Future()
        answer = self.answers.pop(0) if self.answers else 0
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return future


@pytest.fixture
def clock():
    return ManualClock()


def upkeep_of(outbox, *, is_watched=True, keep_delivered_seconds=604_800.0):
    return OutboxUpkeep(
        outbox,
        keep_delivered_seconds=keep_delivered_seconds,
        is_watched=lambda: is_watched,
        clock=outbox.clock.clock,
    )


def tended_at(clock, outbox, upkeep, *, until):
    for _ in range(0, until, 5):
        upkeep.tend()
        clock.advance(5)
    return outbox.tended


def test_file_is_looked_at_every_30_seconds_where_the_kernel_tells_of_the_rest(clock):
    outbox = CountingOutbox(clock)
    assert tended_at(clock, outbox, upkeep_of(outbox), until=70) == [0, 30, 60]


def test_file_is_looked_at_each_time_where_it_does_not_and_in_memory(clock):
    outbox = CountingOutbox(clock)
    assert tended_at(clock, outbox, upkeep_of(outbox, is_watched=False), until=15) == [0, 5, 10]
    outbox.in_memory = True
    assert tended_at(clock, outbox, upkeep_of(outbox), until=15)[3:] == [15, 20, 25]


def test_change_in_the_directory_has_the_file_looked_at_at_once_but_not_in_memory(clock):
    outbox = CountingOutbox(clock)
    upkeep = upkeep_of(outbox)
    upkeep.directory_changed()
    clock.advance(1)
    upkeep.directory_changed()
    outbox.in_memory = True
    upkeep.directory_changed()
    assert outbox.tended == [0, 1]


@pytest.mark.parametrize(
    ("answers", "keep_delivered_seconds", "cleaned"),
    [
        pytest.param([], 604_800.0, [0, 600, 1200], id="nothing"),
        pytest.param([500, 3], 604_800.0, [0, 60, 120, 720], id="more than goes at once"),
        pytest.param([OutboxError("no")], 604_800.0, [0, 60, 660], id="failed"),
        pytest.param([], 1200.0, [0, 120, 240], id="kept for less"),
    ],
)
def test_delivered_records_are_looked_for_each_minute_only_while_there_are_any(
    clock, answers, keep_delivered_seconds, cleaned
):
    outbox = CountingOutbox(clock, answers)
    upkeep = upkeep_of(outbox, keep_delivered_seconds=keep_delivered_seconds)
    for _ in range(0, 1260, 60):
        upkeep.clean()
        clock.advance(60)
    assert outbox.cleaned[: len(cleaned)] == cleaned
