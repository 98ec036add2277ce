"""Memory that was freed, back to the system: of 5,000 connections with TLS it is a quarter of what the process shows.

The C library keeps it otherwise, between what is still in use, and in a heap of its own for each thread that reads the
database (mallopt(3), malloc_trim(3)). Both are of glibc alone; elsewhere nothing is changed.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from typing import Any

_EVERY_SECONDS = 15.0
#: Numbers of malloc.h. A size that is set does not grow by itself any more.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 128 * 1024


def keep_little() -> None:
    """Have what is large allocated by itself, and all threads share one heap; before the first of them starts."""
    set_option = _of_the_c_library("mallopt")
    if set_option is not None:
        set_option(_ARENA_MAX, 1)
        set_option(_MMAP_THRESHOLD, _LARGE_BYTES)
        set_option(_TRIM_THRESHOLD, _LARGE_BYTES)


async def return_freed() -> None:
    """Give back what was freed, now and then, until it is cancelled."""
    trim = _of_the_c_library("malloc_trim")
    while trim is not None:
        await asyncio.sleep(_EVERY_SECONDS)
        await asyncio.get_running_loop().run_in_executor(None, trim, 0)


def _of_the_c_library(name: str) -> Any:
    return None if sys.platform == "win32" else getattr(ctypes.CDLL(None), name, None)
