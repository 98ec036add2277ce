"""Times and sizes in the output for a person."""

import pytest

from bridge.cli.terminal import ago, countdown, size
from bridge.text import duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (750, "in 12 min 30 s"),
        (60, "in 1 min"),
        (3_600, "in 1 h"),
        (3_660, "in 1 h 1 min"),
        (90_000, "in 1 d 1 h"),
        (0.4, "now"),
        (-0.9, "now"),
        (-12, "12 s ago"),
        (-250, "4 min ago"),
        (-3_700, "1 h 1 min ago"),
    ],
)
def test_countdown_uses_its_largest_units(seconds, said):
    assert countdown(seconds) == said


def test_durations_and_sizes_are_formatted_with_units():
    assert (duration(0), duration(59.9), duration(86_400), ago(0.42)) == ("0 s", "59 s", "1 d", "0.4 s ago")
    assert (size(0), size(512 * 1024), size(268_435_456)) == ("0 KiB", "512 KiB", "256.0 MiB")
