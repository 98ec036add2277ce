"""Detects leaked threads and descriptors of a block, with a wait for those that are about to close."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Generous time for threads to end and for other threads to close sockets.
_PATIENCE_SECONDS = 15.0
_DESCRIPTORS = Path("/proc/self/fd")


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail if the block leaves additional threads or descriptors that do not go away."""
    gc.collect()  # an earlier exception might reference a closed socket
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
            continue  # the descriptor of the listing, or closed in the meantime
    return found
