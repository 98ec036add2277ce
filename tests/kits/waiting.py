"""Waits in real time for the work of other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(condition: Callable[[], Found], seconds: float = 30.0) -> Found:
    """Wait until *condition* is true, and return its value. *seconds* is far above the usual duration."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "The condition was not met in time."
        time.sleep(0.01)
    return found
