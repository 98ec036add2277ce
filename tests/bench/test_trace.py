"""The way of a document and of a decision through a running agent: few files, one direction, few round trips.

`python tests/bench/trace_path.py` prints it.
"""

import pytest
from trace_path import trace


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    return trace(tmp_path_factory.mktemp("trace"))


@pytest.mark.parametrize(
    ("number", "most_files", "most_round_trips"), [(0, 12, 3), (1, 18, 6)], ids=["document", "decision"]
)
def test_way_is_short_and_has_one_direction(ways, number, most_files, most_round_trips):
    way = ways[number]
    print(way.report())  # noqa: T201

    assert len(way.files) <= most_files
    assert len(way.round_trips) <= most_round_trips
    assert not way.re_entered
