"""What a block of a test leaves behind: threads and descriptors, looked at until what is on its way out is gone."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: For threads that end and sockets that another thread closes; far above what that takes.
_PATIENCE_SECONDS = 15.0
_DESCRIPTORS = Path("/proc/self/fd")


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail if the block leaves additional threads or descriptors that do not go away."""
    gc.collect()  # an exception of before may hold a socket that is closed already
    before = _threads(), _descriptors()
    yield
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        gc.collect()
        grown = [
            f"{len(now)} instead of {len(was)}, among them {now - was}"
            for was, now in zip(before, (_threads(), _descriptors()), strict=True)
            if len(now) > len(was)
        ]
        if not grown:
            return
        assert time.monotonic() < deadline, "; ".join(grown)
        threading.Event().wait(0.02)


def new_threads(before: list[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that have been started since *before*, and are alive."""
    return [each for each in threading.enumerate() if each not in before]


def _threads() -> set[threading.Thread | str]:
    return set(threading.enumerate())


def _descriptors() -> set[threading.Thread | str]:
    found: set[threading.Thread | str] = set()
    for each in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.is_dir() else ():  # noqa: PTH208  # names are enough
        try:
            found.add(f"{each} -> {(_DESCRIPTORS / each).readlink()}")
        except OSError:
            continue  # the listing's own, or closed meanwhile
    return found
