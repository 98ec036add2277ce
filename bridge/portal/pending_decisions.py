"""The decisions that count, in memory, and the polls that wait for them. For the event loop alone.

A poll never asks the database: whatever is decided comes here once, in its order, and wakes the polls of its VMs. A
process that decides something has the book catch up at once, and PostgreSQL tells the others (`news`); within a second
each does so by itself, too. Once a minute everything is read again, which forgets what has expired.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from bridge.clock import CLOCK_SKEW_SECONDS, Clock
from bridge.logs import ThrottledLog
from bridge.portal.store.database import StoreThreads, StoreUnavailable, epoch
from bridge.portal.store.decisions import Decisions, decisions_after, live_decisions

logger = logging.getLogger(__name__)

#: PROTOCOL.md, section 3.
MAX_DECISIONS = 1_000
MAX_ANSWER_BYTES = 1024 * 1024
#: Quotes and a comma about each decision, and all that is not a decision.
_EACH_BYTES, _ENVELOPE_BYTES = 3, 512

#: Whoever waits is awake within a second, also when nobody tells of the news.
_CATCH_UP_SECONDS = 0.8
_RELOAD_SECONDS = 60.0
#: A VM has one agent, and one poll; a second one comes where a connection was lost unseen.
_MOST_WAITING_OF_A_VM = 4


class Answer(msgspec.Struct, frozen=True):
    """What a poll is answered with."""

    index: int
    decisions: tuple[str, ...]
    epoch: str


class PendingDecisions:
    """The decisions that count, by VM."""

    def __init__(self, store: StoreThreads, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)
        self._by_vm: dict[str, list[tuple[int, str]]] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._catching_up = asyncio.Lock()
        self._new = asyncio.Event()
        self._is_stopping = False
        self.index = 1
        """Every decision up to this number is here."""
        self.epoch = ""
        """The history in which numbers count."""

    @property
    def is_stopping(self) -> bool:
        """Return whether polls are to be answered at once, and their connections closed."""
        return self._is_stopping

    @property
    def waiting(self) -> int:
        """Return how many polls wait."""
        return sum(map(len, self._waiting.values()))

    async def load(self) -> None:
        """Read everything that counts, in place of what is here."""
        self.epoch = await self._store.read(epoch)
        async with self._catching_up:
            found = await self._store.read(live_decisions, now_seconds=self._oldest_seconds())
            self._by_vm = {}
            self._take(found)

    async def catch_up(self) -> None:
        """Read what was decided since; wake whoever waits for it."""
        async with self._catching_up:
            found = await self._store.read(decisions_after, self.index, now_seconds=self._oldest_seconds())
            self._take(found)

    async def follow(self) -> None:
        """Catch up at news and each second, and read everything each minute, until it is cancelled."""
        loop = asyncio.get_running_loop()
        loaded_at = loop.time()
        while True:
            sweep = loop.call_later(_CATCH_UP_SECONDS, self._new.set)
            await self._new.wait()
            sweep.cancel()
            self._new.clear()
            try:
                if loop.time() - loaded_at >= _RELOAD_SECONDS:
                    await self.load()
                    loaded_at = loop.time()
                else:
                    await self.catch_up()
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"New decisions cannot be read; agents are not told. {error}")
            else:
                self._log.recovered("store", "New decisions are read again.")

    def notify_new(self) -> None:
        """Have what was decided read at once: another process says that there is something."""
        self._new.set()

    def has_new(self, vm_key: str, after: int) -> bool:
        """Return whether there is a decision for *vm_key* with a greater number than *after*."""
        known = self._by_vm.get(vm_key)
        return known is not None and known[-1][0] > after

    def answer(self, vm_key: str, after: int) -> Answer:
        """Return what there is for *vm_key* after the number *after*, as much as fits into one answer."""
        room = MAX_ANSWER_BYTES - _ENVELOPE_BYTES
        page: list[str] = []
        last = self.index
        known = [each for each in self._by_vm.get(vm_key, ()) if each[0] > after]
        for index, jws in known:
            room -= len(jws) + _EACH_BYTES
            if room < 0 or len(page) == MAX_DECISIONS:
                break
            page.append(jws)
            last = index
        is_whole = len(page) == len(known)
        return Answer(self.index if is_whole else last, tuple(page), self.epoch)

    def wait(self, vm_key: str, woken: asyncio.Future[None]) -> None:
        """Have *woken* done when there is something for *vm_key*; the oldest of too many is done at once."""
        waiting = self._waiting.setdefault(vm_key, [])
        waiting.append(woken)
        if len(waiting) > _MOST_WAITING_OF_A_VM:
            _wake(waiting.pop(0))

    def forget(self, vm_key: str, woken: asyncio.Future[None]) -> None:
        """Have *woken* wait no more."""
        waiting = self._waiting.get(vm_key, [])
        if woken in waiting:
            waiting.remove(woken)
        if not waiting:
            self._waiting.pop(vm_key, None)

    def stop(self) -> None:
        """Have every poll answered, now and from now on."""
        self._is_stopping = True
        for waiting in self._waiting.values():
            for woken in waiting:
                _wake(woken)

    def _take(self, found: Decisions) -> None:
        for each in found.found:
            self._by_vm.setdefault(each.vm_key, []).append((each.index, each.jws))
        for vm_key in {each.vm_key for each in found.found if each.index > self.index}:
            for woken in self._waiting.get(vm_key, ()):
                _wake(woken)
        self.index = max(self.index, found.index)

    def _oldest_seconds(self) -> float:
        """Return which decisions still count: those that expire later, and a minute for clocks that differ."""
        return self._clock.timestamp() - CLOCK_SKEW_SECONDS


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
