"""The path of a document and of a decision through a running agent: few files, and one direction.

`python tests/bench/trace_path.py` prints both paths.
"""

import pytest
from trace_path import trace

#: The poller gives its history to the tracker. The worker gives two pure functions to the outbox, and its loop to the
#: thread of the sink.
_CALLBACKS = {
    "poller.py:was_started",
    "poller.py:has_ended",
    "poller.py:count",
    "worker.py:look",
    "worker.py:_choose",
    "worker.py:<lambda>",
    "worker.py:_deliver",
    "sender.py:send",
}


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    return trace(tmp_path_factory.mktemp("trace"))


@pytest.mark.parametrize(("number", "most_files"), [(0, 10), (1, 14)], ids=["document", "decision"])
def test_path_is_short_and_has_one_direction(ways, number, most_files):
    way = ways[number]
    print(way.report())  # noqa: T201

    assert len(way.files) <= most_files
    assert {entry.rpartition("/")[2] for entry in way.re_entered} <= _CALLBACKS
