"""The memory of a process with thousands of connections: given back when it was freed, and seldom searched for cycles.

Of 5,000 connections with TLS what was freed is a quarter of what the process shows. The C library keeps it otherwise,
between what is still in use, and in a heap of its own for each thread that reads the database (mallopt(3),
malloc_trim(3)). Both are of glibc alone; elsewhere nothing is changed. That it is the C library which holds the small
objects too is `bridge.system.allocator`'s doing.

A search of everything for cycles stops all polls for a quarter of a second at 5,000. None is needed for a connection
that ends, or for a poll that is answered; what libraries leave behind is found young.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

TIDIES_EVERY_SECONDS = 15
#: Numbers of malloc.h. A size that is set does not grow by itself any more.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 128 * 1024
#: Objects more than at the last search of the youngest; searches of the youngest, and of the young, before the next.
_THRESHOLDS = (10_000, 10, 50)


def search_seldom() -> None:
    """Have what was loaded until now never searched for cycles, and the rest more seldom than a script needs it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def keep_little() -> None:
    """Have what is large allocated by itself, and all threads share one heap; before the first of them starts."""
    set_option = _of_the_c_library("mallopt")
    if set_option is not None:
        set_option(_ARENA_MAX, 1)
        set_option(_MMAP_THRESHOLD, _LARGE_BYTES)
        set_option(_TRIM_THRESHOLD, _LARGE_BYTES)


async def return_freed(*, tidy: Callable[[], None], connections: Callable[[], int], every_seconds: int) -> None:
    """Give back what was freed, each *every_seconds*, until it is cancelled; *tidy* is called before.

    Once nine of ten *connections* are gone, what Python keeps of them to use it again is given up too.
    """
    trim, most = _of_the_c_library("malloc_trim"), 0
    while True:
        for _ in range(every_seconds):
            await asyncio.sleep(1)
            most = max(most, connections())
        tidy()
        if connections() < most / 10:
            gc.collect()
            most = 0
        if trim is not None:
            await asyncio.get_running_loop().run_in_executor(None, trim, 0)


def _of_the_c_library(name: str) -> Any:
    return None if sys.platform == "win32" else getattr(ctypes.CDLL(None), name, None)
