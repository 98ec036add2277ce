"""A process that is out of threads or out of descriptors, for as long as a test says."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

#: No machine has the memory for such a stack, so that none is given.
_STACK_BYTES = 1 << 46


@contextmanager
def no_threads() -> Iterator[None]:
    """Let no thread be started, as at a limit of tasks."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let no file be opened."""
    if sys.platform == "win32":
        pytest.skip("Windows has no limit of descriptors")
    import resource  # noqa: PLC0415

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/dev/fd").iterdir())
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
