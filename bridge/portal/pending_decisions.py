"""Keeps valid decisions in memory and wakes the waiting polls.

Each portal process reads every new decision once, in order, and then wakes the polls of the VM that the decision is
for. The process that stores a decision reads the decision immediately.

PostgreSQL notifies the other processes of new decisions, and each process also checks for new decisions every second.
Once a minute, each process reloads all valid decisions to remove expired decisions from memory.

Call the methods only on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from bridge.clock import CLOCK_SKEW_SECONDS, Clock
from bridge.logs import ThrottledLog
from bridge.portal.store.database import StoreThreads, StoreUnavailable, epoch
from bridge.portal.store.decisions import live_decisions

logger = logging.getLogger(__name__)

#: The limits of one response (PROTOCOL.md, section 3).
MAX_DECISIONS = 1_000
MAX_ANSWER_BYTES = 1024 * 1024
#: The bytes around each decision, and the bytes of the other members of the response.
_EACH_BYTES, _ENVELOPE_BYTES = 3, 512
_CATCH_UP_SECONDS = 0.8
_RELOAD_SECONDS = 60.0
#: A VM has one open poll, and more if the portal has not yet detected that earlier connections were lost.
_MOST_WAITING_OF_A_VM = 4


class Answer(msgspec.Struct, frozen=True):
    """The response to a poll."""

    index: int
    decisions: tuple[str, ...]
    epoch: str


class PendingDecisions:
    """The decisions and the waiting polls, by VM."""

    def __init__(self, store: StoreThreads, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)
        self._by_vm: dict[str, list[tuple[int, str]]] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._catching_up = asyncio.Lock()
        self._new = asyncio.Event()
        self.is_stopping = False
        """Whether the portal answers every poll at once and closes the connection."""
        self.index = 1
        """Every decision up to this number is in memory."""
        self.epoch = ""
        """The numbers of decisions are valid only within this epoch."""

    async def load(self) -> None:
        """Read all valid decisions from the database."""
        self.epoch = await self._store.read(epoch)
        async with self._catching_up:
            index, found = await self._store.read(live_decisions, now_seconds=self._oldest_seconds())
            self._by_vm = {}
            self._add(index, found)

    async def catch_up(self) -> None:
        """Read the new decisions and wake their polls."""
        async with self._catching_up:
            now = self._oldest_seconds()
            self._add(*await self._store.read(live_decisions, now_seconds=now, after=self.index))

    async def follow(self) -> None:
        """Read new decisions until the task is canceled."""
        loop = asyncio.get_running_loop()
        loaded_at = loop.time()
        while True:
            timer = loop.call_later(_CATCH_UP_SECONDS, self._new.set)
            await self._new.wait()
            timer.cancel()
            self._new.clear()
            try:
                if loop.time() - loaded_at >= _RELOAD_SECONDS:
                    await self.load()
                    loaded_at = loop.time()
                else:
                    await self.catch_up()
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"No agent gets new decisions. {error}")
            else:
                self._log.recovered("store", "Agents get new decisions again.")

    def notify_new(self) -> None:
        """Read new decisions at once, after a notification by another process."""
        self._new.set()

    def has_new(self, vm_key: str, after: int) -> bool:
        """Return whether *vm_key* has a decision with a number above *after*."""
        known = self._by_vm.get(vm_key)
        return known is not None and known[-1][0] > after

    def answer(self, vm_key: str, after: int) -> Answer:
        """Return the decisions of *vm_key* with a number above *after* that fit into one response."""
        room = MAX_ANSWER_BYTES - _ENVELOPE_BYTES
        page: list[str] = []
        last = after
        for index, jws in self._by_vm.get(vm_key, ()):
            if index <= after:
                continue
            room -= len(jws) + _EACH_BYTES
            if room < 0 or len(page) == MAX_DECISIONS:
                return Answer(last, tuple(page), self.epoch)
            page.append(jws)
            last = index
        return Answer(self.index, tuple(page), self.epoch)

    def wait(self, vm_key: str, answer: Callable[[], None]) -> None:
        """Call *answer* when the next decision for *vm_key* arrives."""
        waiting = self._waiting.setdefault(vm_key, [])
        waiting.append(answer)
        if len(waiting) > _MOST_WAITING_OF_A_VM:
            waiting.pop(0)()

    def stop_waiting(self, vm_key: str, answer: Callable[[], None]) -> None:
        """Remove *answer*."""
        waiting = self._waiting.get(vm_key, [])
        if answer in waiting:
            waiting.remove(answer)
        if not waiting:
            self._waiting.pop(vm_key, None)

    def open_polls(self) -> int:
        """Return the number of waiting polls."""
        return sum(map(len, self._waiting.values()))

    def stop(self) -> None:
        """Answer all waiting polls now, and later polls as soon as they arrive."""
        self.is_stopping = True
        self._answer(list(self._waiting))

    def _add(self, index: int, found: Sequence[tuple[int, str, str]]) -> None:
        for number, vm_key, jws in found:
            self._by_vm.setdefault(vm_key, []).append((number, jws))
        vm_keys = {vm_key for number, vm_key, _ in found if number > self.index}
        self.index = max(self.index, index)
        self._answer(vm_keys)

    def _answer(self, vm_keys: Iterable[str]) -> None:
        for vm_key in vm_keys:
            for answer in self._waiting.pop(vm_key, ()):
                answer()

    def _oldest_seconds(self) -> float:
        return self._clock.timestamp() - CLOCK_SKEW_SECONDS
