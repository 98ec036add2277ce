"""The load of the outbox, on a thread of its own, and what takes its place while that lasts.

A disk that hangs, a lock of another program, or a large file that is damaged may keep the outbox for seconds, or for
good. Polls begin without it (`bridge.outbox.unloaded`): what is urgent, near or new is told from memory at once. What
the first document showed may have been told before, so it waits for the outbox, for half a minute; then all of it is
told from memory. Nothing is approved before the outbox is there.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import NamedTuple

from bridge.clock import REAL_CLOCK, AgeClock
from bridge.config.loader import Settings
from bridge.outbox.locks import DirectoryLock, prepare_directory
from bridge.outbox.outbox import Outbox
from bridge.system.threads import run_daemon

logger = logging.getLogger(__name__)

#: A healthy disk takes milliseconds.
_WAIT_SECONDS = 2.0
#: How long what the outbox may know waits for it.
HOLD_SECONDS = 30.0


class OpenOutbox(NamedTuple):
    """An outbox, and the lock on its directory."""

    lock: DirectoryLock
    outbox: Outbox


class OutboxLoad:
    """Loads the outbox in *directory*; raises what stands against that from `result`."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self.started_at = time.monotonic()
        self._opened: Future[OpenOutbox] = run_daemon("outbox-load", self._open)

    @property
    def is_done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._opened.done()

    @property
    def is_loaded(self) -> bool:
        """Return whether the outbox is there."""
        return self.is_done and self._opened.exception() is None

    @property
    def is_late(self) -> bool:
        """Return whether nothing waits for it any more."""
        return time.monotonic() - self.started_at >= HOLD_SECONDS

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
        prepare_directory(self._directory)
        lock = DirectoryLock(self._directory)
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
