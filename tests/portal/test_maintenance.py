"""Tests for the return of free memory. tests/bench/test_portal.py measures it with 5,000 connections."""

import platform
import subprocess
import sys

import pytest
from portal_kit import RunningPortal
from waiting import until

from bridge.portal import maintenance

SCRIPT = """
from pathlib import Path
from bridge.portal.maintenance import return_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

before = resident()
blocks = [bytes(50_000) for _ in range(4_000)]
pinned = blocks[::50]
del blocks
with_holes = resident()
return_free_memory()
print(with_holes - before, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc needs this function")
def test_memory_of_holes_in_the_heap_returns_to_the_system():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    with_holes, afterwards = map(int, done.stdout.split())
    assert with_holes > 10_000
    assert afterwards < 0.3 * with_holes


def test_portal_returns_free_memory(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(maintenance, "return_free_memory", lambda: calls.append(1))
    with RunningPortal(tmp_path):
        until(lambda: calls)
