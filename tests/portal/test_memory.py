"""A portal with thousands of connections does not stop to search all of them for cycles, and leaves none behind."""

import asyncio
import contextlib
import gc
import subprocess
import sys

import pytest

from bridge.portal.memory import return_freed

_CODE = """
import gc, weakref
from bridge.portal.memory import search_seldom

class Cycle:
    def __init__(self):
        self.itself = self

search_seldom()
before = gc.get_stats()[2]["collections"]
kept = [[] for _ in range(300_000)]  # as five thousand connections have
assert gc.get_stats()[2]["collections"] == before, gc.get_stats()
alive = weakref.WeakSet()
for _ in range(50_000):
    alive.add(Cycle())
assert len(alive) < 25_000, len(alive)
"""


def test_what_lives_long_is_not_searched_and_what_is_left_behind_young_is_found():
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=60)


@pytest.mark.parametrize(("left", "searches"), [(5, 1), (60, 0)])
def test_what_python_keeps_for_later_is_given_up_once_nearly_everybody_is_gone(left, searches):
    there, tidied, before = [100], [], []

    def tidy():
        tidied.append(there[0])
        before.append(gc.get_stats()[2]["collections"])
        there[0] = left

    async def main():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(return_freed(tidy=tidy, connections=lambda: there[0], every_seconds=1), 3.5)

    gc.collect()
    asyncio.run(main())
    assert tidied[:2] == [100, left]
    assert gc.get_stats()[2]["collections"] - before[0] == searches
