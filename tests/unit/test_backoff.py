"""Backoff delays are bounded, jittered, never zero, and short enough for the event."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.backoff import delivery_gap, full_jitter, poll_delay

chances = st.floats(min_value=0, max_value=1, exclude_max=True)
attempts = st.integers(min_value=0, max_value=100_000)


def longest():
    return 1.0


def gap(tries, *, ahead=None, urgent=False, retry_after=None, random=longest, outage_seconds=60.0):
    return delivery_gap(
        tries,
        seconds_to_not_before=ahead,
        urgent=urgent,
        retry_after=retry_after,
        random=random,
        outage_seconds=outage_seconds,
    )


@given(attempt=attempts, chance=chances)
def test_jitter_stays_between_floor_and_cap(attempt, chance):
    assert 0.1 <= full_jitter(attempt, base_seconds=1, cap_seconds=300, random=lambda: chance) <= 300


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [(None, 300), (-5, 300), (0, 300), (0.5, 1), (2, 1), (4, 1), (40, 10), (60, 15), (61, 15), (900, 15), (1e9, 15)],
)
def test_delay_is_at_most_15_seconds_or_a_quarter_of_the_time_left(ahead, expected):
    assert gap(50, ahead=ahead) == expected


@pytest.mark.parametrize(("ahead", "expected"), [(None, 300), (0, 300), (2, 1), (12, 3), (20, 5), (900, 5)])
def test_delay_is_at_most_5_seconds_in_the_first_minute_of_an_outage(ahead, expected):
    assert gap(50, ahead=ahead, outage_seconds=59.9) == expected


@given(tries=attempts, chance=chances, retry_after=st.none() | st.floats(min_value=0), ahead=st.none() | st.floats())
def test_urgent_events_never_wait_more_than_two_seconds(tries, chance, retry_after, ahead):
    delay = gap(tries, ahead=ahead, urgent=True, retry_after=retry_after, random=lambda: chance)
    assert 0.1 <= delay <= 2


def test_poll_interval_is_constant_except_after_429_and_410():
    for status in (None, 200, 400, 404, 500, 503):
        assert poll_delay(1.0, failures=7, status=status, retry_after=60) == 1.0


@pytest.mark.parametrize("status", [429, 410])
def test_poll_backoff_doubles_up_to_five_seconds(status):
    delays = [poll_delay(1.0, failures=n, status=status, retry_after=None) for n in (1, 2, 3, 4, 5000)]
    assert delays == [2, 4, 5, 5, 5]


def test_poll_respects_retry_after_up_to_a_limit():
    assert poll_delay(1.0, failures=1, status=429, retry_after=3) == 3
    assert poll_delay(1.0, failures=1, status=410, retry_after=70) == 5
