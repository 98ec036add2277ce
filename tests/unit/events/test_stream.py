"""Stream ids: UUIDv7, later than every earlier start even if the clock was set back."""

import uuid
from datetime import datetime, timedelta, timezone

import pytest

from bridge.events.stream import new_stream_id

NOW = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
NOW_MILLISECONDS = int(NOW.timestamp() * 1000)


def milliseconds(stream_id):
    return uuid.UUID(stream_id).int >> 80


@pytest.mark.parametrize(
    "after", [None, "", "no uuid", str(uuid.UUID(int=2**128 - 1)), "0346898e-c86a-4973-aa45-b7ff95725ad5"]
)
def test_without_an_earlier_stream_the_time_is_now(after):
    found = uuid.UUID(new_stream_id(NOW, after))
    assert (found.version, found.variant, milliseconds(str(found))) == (7, uuid.RFC_4122, NOW_MILLISECONDS)


def test_clock_set_back_continues_one_millisecond_after_the_stored_stream():
    before = new_stream_id(NOW, None)
    after = new_stream_id(NOW - timedelta(days=1), before)
    assert milliseconds(after) == NOW_MILLISECONDS + 1
    assert after > before


def test_two_starts_in_one_millisecond_are_in_order():
    ids = [new_stream_id(NOW, None)]
    for _ in range(50):
        ids.append(new_stream_id(NOW, ids[-1]))
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
