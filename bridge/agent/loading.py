"""The load of the outbox, on a thread of its own, and what takes its place while that lasts.

A disk that hangs, a lock of another program, or a large file that is damaged may keep the outbox for seconds, or for
good. Polls begin without it (`bridge.outbox.unloaded`): what is urgent, near or new is told from memory at once. What
the first document showed may have been told before, so it waits for the outbox, for half a minute; then all of it is
told from memory. Nothing is approved before the outbox is there.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bridge.agent.parts import JOIN_SECONDS, Parts
from bridge.clock import REAL_CLOCK, AgeClock
from bridge.config.loader import Settings
from bridge.errors import StateDirectoryError
from bridge.events.event import VmIdentity
from bridge.outbox.locks import DirectoryLock, prepare_directory
from bridge.outbox.outbox import Outbox
from bridge.polling.seen import SeenDocuments
from bridge.system.threads import run_daemon

if TYPE_CHECKING:
    from bridge.outbox.unloaded import Taken

logger = logging.getLogger(__name__)

#: A healthy disk takes milliseconds.
_WAIT_SECONDS = 2.0
#: How long what the outbox may know waits for it.
HOLD_SECONDS = 30.0
#: What is being sent, or asked, when the outbox is loaded may take so long.
HANDOVER_SECONDS = 2.0
_AGAIN_SECONDS = 1.0
_WANTS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
#: The identity's, the poll's, and those of the first sink; the others come when the old ones have ended.
_THREADS_NEEDED = 4


class OpenOutbox(NamedTuple):
    """An outbox, and the lock on its directory."""

    lock: DirectoryLock
    outbox: Outbox


class OutboxLoad:
    """Loads the outbox in *directory*; raises what stands against that from `result`."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._started_at = time.monotonic()
        self._seen_done_at = math.inf
        self._opened: Future[OpenOutbox] = run_daemon("outbox-load", self._open)

    @property
    def is_done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._opened.done()

    @property
    def is_loaded(self) -> bool:
        """Return whether the outbox is there."""
        return self.is_done and self._opened.exception() is None

    def may_hand_over(self, parts: Parts) -> bool:
        """Return whether it has ended, and nothing is on its way from *parts* to a sink, or has been for too long."""
        if not self.is_done:
            return False
        self._seen_done_at = min(self._seen_done_at, time.monotonic())
        is_sending = any((parts.pending(JOIN_SECONDS) or {}).values())
        may_begin = not is_sending or time.monotonic() - self._seen_done_at >= HOLD_SECONDS
        return may_begin and _are_there_threads()

    def end_hold_if_late(self, parts: Parts) -> bool:
        """Let nothing in *parts* wait for it any more if it takes too long; return whether that was done now."""
        is_late = not self.is_done and time.monotonic() - self._started_at >= HOLD_SECONDS
        if not is_late or parts.outbox.records.hold is None:
            return False
        parts.outbox.write(parts.outbox.records.end_hold).result()
        logger.error(
            "The outbox is still not loaded, and nothing waits for it any more: all that is seen is told from "
            "memory, also what may have been told before. What the outbox holds is sent once it is loaded."
        )
        return True

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, so long at most."""
        wait_for([self._opened], max(seconds, 0.0))

    def is_done_soon(self) -> bool:
        """Wait for it as long as a start may; return whether it has ended."""
        return bool(wait_for([self._opened], _WAIT_SECONDS).done)

    def result(self) -> OpenOutbox:
        """Return the outbox, however long that takes."""
        return self._opened.result()

    def when_done(self, wake: threading.Event) -> None:
        """Set *wake* once it has ended."""
        self._opened.add_done_callback(lambda _: wake.set())

    def abandon(self, timeout_seconds: float) -> None:
        """Close the outbox, if it was loaded and nobody has taken it."""
        if self.is_loaded:
            lock, outbox = self._opened.result()
            if outbox.close(timeout_seconds):
                lock.release()

    def substitute(self) -> Outbox:
        """Return an outbox in memory for the time until this one is loaded."""
        from bridge.outbox.unloaded import open_unloaded  # noqa: PLC0415  # hardly ever needed

        logger.warning(
            "The outbox is being loaded, which takes long: the disk hangs, another program has it locked, or it is "
            "large or damaged. Polls begin without it. What is urgent, near or new is told from memory; what may have "
            "been told before waits for the outbox, %d s at most. Nothing is approved meanwhile.",
            HOLD_SECONDS,
            extra={"directory": str(self._directory)},
        )
        state = self._settings.state
        return open_unloaded(
            self._directory,
            max_bytes=state.max_bytes,
            keep_delivered_seconds=state.keep_delivered_seconds,
            ages=AgeClock(REAL_CLOCK),
        )

    def _open(self) -> OpenOutbox:
        """Return the outbox, as soon as the machine has the descriptors and the threads for it."""
        is_told = False
        while True:
            try:
                return self._try_to_open()
            except (OSError, RuntimeError, StateDirectoryError) as error:
                if not _is_for_want(error):
                    raise
                if not is_told:
                    logger.error("The outbox cannot be loaded for now; trying again.", extra={"why": str(error)})  # noqa: TRY400
                is_told = True
            time.sleep(_AGAIN_SECONDS)

    def _try_to_open(self) -> OpenOutbox:
        lock = self._locked()
        try:
            outbox = Outbox(
                self._directory,
                max_bytes=self._settings.state.max_bytes,
                keep_delivered_seconds=self._settings.state.keep_delivered_seconds,
                ages=AgeClock(REAL_CLOCK),
                claim=lock.claim,
            )
        except BaseException:
            lock.release()
            raise
        return OpenOutbox(lock=lock, outbox=outbox)

    def _locked(self) -> DirectoryLock:
        """Return the lock on the directory, made if need be: also one that is moved away while the disk hangs."""
        while True:
            prepare_directory(self._directory)
            try:
                return DirectoryLock(self._directory)
            except StateDirectoryError as error:
                if not isinstance(error.__cause__, FileNotFoundError) or self._directory.is_symlink():
                    raise


def _is_for_want(error: BaseException) -> bool:
    """Return whether *error* is a want of descriptors, threads or memory, which passes."""
    cause = error.__cause__ or error
    if isinstance(cause, OSError):
        return cause.errno in _WANTS
    return isinstance(cause, RuntimeError) and "thread" in str(cause)


def _are_there_threads() -> bool:
    """Return whether a few threads can be started: without them neither the old parts nor the new ones would run."""
    may_end = threading.Event()
    try:
        for _ in range(_THREADS_NEEDED):
            run_daemon("outbox-load", may_end.wait)
    except (RuntimeError, MemoryError):
        return False
    finally:
        may_end.set()
    return True


class _Build(Protocol):
    def __call__(self, on: OpenOutbox, *, known_vm: VmIdentity | None) -> Parts: ...


def hand_over(before: Parts, opened: OpenOutbox, *, build: _Build) -> tuple[Parts, SeenDocuments | None, Taken]:
    """Return the parts for the outbox that is loaded now, not started yet, what was seen before it, and what was taken.

    What may take long on a slow disk is done while the poll of *before* goes on; then that ends.
    """
    from bridge.outbox.unloaded import keep_taken, read_taken  # noqa: PLC0415  # hardly ever needed

    before.pool.drain(time.monotonic() + HANDOVER_SECONDS)
    identity, outbox = before.identity, opened.outbox
    after = build(opened, known_vm=identity.vm if identity.is_found else None)
    outbox.records.taken = before.outbox.read(read_taken).result()
    after.prepare(lambda: False)  # records are named by who this VM is, also those that a stop is to store
    before.stop_watching(time.monotonic() + HANDOVER_SECONDS)
    taken = outbox.records.taken = before.outbox.read(read_taken).result()
    after.imds.go_on_from(before.imds)
    skipping = {each.name for each in after.settings.sinks if each.sink_class.skips_what_is_over(each.config)}
    outbox.write(keep_taken, taken, now=outbox.ages.timestamp(), skipping=skipping)
    return after, None if before.poller is None else before.poller.seen, taken
