"""The event loop thread: deadlines, and no leaked threads or sockets."""

import asyncio
import contextlib
import threading

import pytest
from leaks import nothing_left_behind

from bridge.testing.watching import in_time
from sinks.eventhubs.event_loop import Ended, LoopThread, Overdue


def loop_thread(**keys):
    async def close():
        pass

    return LoopThread("eventhubs:test", **{"idle_seconds": 30.0, "close": close, **keys})


def test_task_that_ignores_cancellation_ends_at_the_deadline(silent_port):
    async def stubborn():
        reader, _ = await asyncio.open_connection("127.0.0.1", silent_port)
        while True:
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await reader.read(1)
                await asyncio.sleep(60)

    def cut():
        loop = loop_thread()
        with pytest.raises(Overdue):
            loop.call(stubborn, seconds=0.4, end_seconds=0.05)
        loop.end(grace_seconds=0, wait_seconds=5)

    with nothing_left_behind():
        in_time(cut, deadline_seconds=0.5)


def test_blocked_loop_is_abandoned_at_the_deadline_and_ends_later():
    release = threading.Event()

    async def block():
        release.wait(30)

    loops = []

    def leave():
        loops.append(loop_thread())
        with pytest.raises(Overdue):
            loops[-1].call(block, seconds=0.4, end_seconds=0.05)
        assert loops[-1].has_ended

    with nothing_left_behind():
        in_time(leave, deadline_seconds=0.5)
        release.set()
        for loop in loops:
            loop.end(grace_seconds=0, wait_seconds=5)


def test_call_after_the_end_raises_ended():
    async def answer():
        return 7

    loop = loop_thread(idle_seconds=0.05)
    assert loop.call(answer, seconds=5, end_seconds=5) == 7
    loop.end(grace_seconds=0, wait_seconds=5)
    with pytest.raises(Ended):
        loop.call(answer, seconds=5, end_seconds=5)
