"""Expensive work is limited per address block, and one block cannot delay the others."""

import asyncio

import pytest

from bridge.portal.addresses import AddressQueue, QueueFull, block_of


def test_blocks_and_clients_of_addresses():
    assert [block_of(each) for each in ("10.1.2.3", "::ffff:10.1.2.3", "2001:db8::1", "odd")] == [
        "10.1.2.0/24",
        "10.1.2.0/24",
        "2001:db8::/64",
        "odd",
    ]
    assert block_of("10.1.2.3", ipv4_bits=32) == "10.1.2.3/32"


class Work:
    def __init__(self, **limits):
        limits = {"running": 2, "running_of_block": 1, "waiting": 100, "waiting_of_block": 3, **limits}
        self.queue = AddressQueue(**limits)
        self.started = []

    async def begin(self, address):
        """Return an event that ends the work, and its task."""
        end = asyncio.Event()

        async def work():
            async with self.queue.turn(address):
                self.started.append(address)
                await end.wait()

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        return end, task


def test_one_block_waits_while_another_runs_and_blocks_take_turns():
    async def main():
        work = Work()
        first, _ = await work.begin("10.0.0.1")
        for number in (2, 3, 4):
            await work.begin(f"10.0.0.{number}")
        with pytest.raises(QueueFull):
            async with work.queue.turn("10.0.0.5"):
                pass
        await work.begin("10.0.1.1")
        assert work.started == ["10.0.0.1", "10.0.1.1"]
        await work.begin("10.0.2.1")
        first.set()
        await asyncio.sleep(0.01)
        assert work.started[2:] == ["10.0.2.1"]

    asyncio.run(main())


def test_canceled_work_releases_its_turn():
    async def main():
        work = Work(running=1)
        first, _ = await work.begin("10.0.0.1")
        _, second = await work.begin("10.0.1.1")
        third, _ = await work.begin("10.0.2.1")
        second.cancel()
        first.set()
        await asyncio.sleep(0.01)
        assert work.started == ["10.0.0.1", "10.0.2.1"]
        third.set()
        await asyncio.sleep(0.01)
        await work.begin("10.0.1.1")
        assert len(work.started) == 3

    asyncio.run(main())
