"""The event loop on a thread of its own: what it cuts, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.testing.watching import Lag
from sinks.eventhubs.event_loop import Ended, LoopThread, Overdue


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Return a port that accepts, by the kernel's hand, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def counted() -> tuple[int, int]:
    descriptors = Path("/proc/self/fd")
    return threading.active_count(), len(list(descriptors.iterdir())) if descriptors.is_dir() else 0


def held() -> tuple[int, int]:
    """Return how many threads and descriptors this process has, once that is steady: a thread takes a moment to end."""
    gc.collect()  # an exception of before may hold a socket that is closed already
    steady = [counted()]
    while len(steady) < 10 or len(set(steady[-10:])) > 1:
        threading.Event().wait(0.02)
        steady.append(counted())
    return steady[-1]


def loop_thread(**keys: Any) -> LoopThread:
    async def close() -> None:
        pass

    return LoopThread("eventhubs:test", **{"idle_seconds": 30.0, "close": close, **keys})


def test_work_that_swallows_its_cancellation_is_cut_all_the_same(silent_port) -> None:
    async def stubborn() -> None:
        reader, _ = await asyncio.open_connection("127.0.0.1", silent_port)
        while True:
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await reader.read(1)
                await asyncio.sleep(60)

    before = held()
    loop = loop_thread()
    started = time.monotonic()
    with Lag() as lag, pytest.raises(Overdue):
        loop.call(stubborn, seconds=0.4)
    assert time.monotonic() - started <= 1.1 * 0.4 + 0.05 + lag.seconds
    loop.end(grace_seconds=0, wait_seconds=5)
    assert held() == before


def test_loop_that_does_not_turn_is_left_at_the_deadline_and_ends_by_itself() -> None:
    release = threading.Event()

    async def block() -> None:
        release.wait(30)

    loop = loop_thread()
    before = threading.active_count()
    started = time.monotonic()
    with Lag() as lag, pytest.raises(Overdue):
        loop.call(block, seconds=0.4)
    assert time.monotonic() - started <= 1.1 * 0.4 + 0.05 + lag.seconds
    assert loop.has_ended
    release.set()
    loop.end(grace_seconds=0, wait_seconds=5)
    assert threading.active_count() == before - 1


def test_call_after_the_end_says_so_and_an_idle_loop_ends() -> None:
    async def answer() -> int:
        return 7

    loop = loop_thread(idle_seconds=0.05)
    assert loop.call(answer, seconds=5) == 7
    loop.end(grace_seconds=0, wait_seconds=5)
    with pytest.raises(Ended):
        loop.call(answer, seconds=5)


def test_failing_close_still_ends_the_loop() -> None:
    async def close() -> None:
        raise RuntimeError("broken")

    async def answer() -> int:
        return 7

    before = threading.active_count()
    loop = loop_thread(close=close)
    loop.call(answer, seconds=5)
    loop.end(grace_seconds=1, wait_seconds=5)
    assert threading.active_count() == before
