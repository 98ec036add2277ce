"""A portal with thousands of connections does not stop to search all of them for cycles, and leaves none behind."""

import subprocess
import sys

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
