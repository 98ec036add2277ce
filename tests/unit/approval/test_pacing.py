"""When the portal is asked again, as PROTOCOL.md promises."""

from __future__ import annotations

import pytest

from bridge.approval.portal_poller import Pacing
from bridge.clock import Clock
from bridge.testing import ManualClock


def pacing(chance, clock=None):
    return Pacing(Clock(monotonic=(clock or ManualClock()).monotonic, random=lambda: chance))


def test_news_is_followed_at_once_and_nothing_by_a_second_since_the_last_request_began():
    clock = ManualClock()
    clock.advance(100.0)
    pace = pacing(0.5, clock)

    assert pace.after_news() == 0.0
    assert pace.after_nothing(began_at=99.75) == 0.75
    clock.advance(30.0)
    assert pace.after_nothing(began_at=100.0) == 0.0


def test_an_index_that_grows_for_ever_is_followed_ten_times_a_second():
    clock = ManualClock()
    pace = pacing(0.5, clock)
    delays = []
    for _ in range(1_000):
        delays.append(pace.after_news())
        clock.advance(delays[-1] + 0.001)

    assert delays[:500] == [0.0] * 500
    assert sum(delays[600:]) / 400 >= 0.09
    clock.advance(3_600)
    assert pace.after_news() == 0.0


def test_failures_wait_for_a_random_time_in_a_window_that_doubles_to_a_minute():
    longest, half = pacing(1.0), pacing(0.5)

    assert [longest.after_failure(None) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [half.after_failure(None) for _ in range(3)] == [0.5, 1, 2]
    longest.after_nothing(began_at=0.0)
    assert longest.after_failure(None) == 1


@pytest.mark.parametrize(("wanted", "given"), [(7.0, 7.0), (86_400.0, 3_600.0), (0.0, 1.0), (None, 1.0)])
def test_the_portals_own_wish_counts_up_to_an_hour(wanted, given):
    assert pacing(1.0).after_failure(wanted) == given
