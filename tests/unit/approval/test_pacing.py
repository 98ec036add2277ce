"""When the portal is asked again, as PROTOCOL.md promises."""

from __future__ import annotations

import pytest

from bridge.approval.pacing import Pacing


def test_news_is_followed_at_once_and_nothing_by_a_second_since_the_last_request_began():
    pace = Pacing(random=lambda: 0.5)

    assert pace.after_news(100.0) == 0.0
    assert pace.after_nothing(100.0, began_at=99.75) == 0.75
    assert pace.after_nothing(130.0, began_at=100.0) == 0.0


def test_an_index_that_grows_for_ever_is_followed_ten_times_a_second():
    pace, now = Pacing(random=lambda: 0.5), 0.0
    delays = []
    for _ in range(1_000):
        delays.append(pace.after_news(now))
        now += delays[-1] + 0.001

    assert delays[:500] == [0.0] * 500
    assert sum(delays[600:]) / 400 >= 0.09
    assert pace.after_news(now + 3_600) == 0.0


def test_failures_wait_for_a_random_time_in_a_window_that_doubles_to_a_minute():
    longest, half = Pacing(random=lambda: 1.0), Pacing(random=lambda: 0.5)

    assert [longest.after_failure(None) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [half.after_failure(None) for _ in range(3)] == [0.5, 1, 2]
    longest.after_nothing(0.0, began_at=0.0)
    assert longest.after_failure(None) == 1


@pytest.mark.parametrize(("wanted", "given"), [(7.0, 7.0), (86_400.0, 3_600.0), (0.0, 1.0), (None, 1.0)])
def test_the_portals_own_wish_counts_up_to_an_hour(wanted, given):
    assert Pacing(random=lambda: 1.0).after_failure(wanted) == given
