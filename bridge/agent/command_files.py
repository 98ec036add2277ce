"""The files in the state directory that commands touch, and the directory itself: what the agent looks at, and when.

A command beside the agent says by the file ``nudge`` that it has written to the outbox, and a person makes and removes
``approvals.disabled``. Where the kernel tells of changes in the directory (`bridge.system.directory_watch`) nothing is
looked at until it does; elsewhere there is a look each second. A turn each second costs a fifth of what the poll does,
and a look each second half of that.

All of it belongs to one thread, which may hang with the disk: the poll and the main thread must not.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.agent.periodic import FileWatch
from bridge.outbox.locks import DISABLED_FILE, NUDGE_FILE, DirectoryLock
from bridge.system.directory_watch import DirectoryWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.agent.upkeep import OutboxUpkeep
    from bridge.outbox.outbox import Outbox

_TICK_SECONDS = 1.0
#: A turn that is nearly due is due; and what else is renamed beside the directory brings signals, perhaps without end.
_LEAST_WAIT_SECONDS = 0.05
#: After a change in the directory: whoever moves a file away may be about to put another in its place.
_SETTLED_SECONDS = 0.5


class CommandFiles:
    """Those of *directory*; *turn* is set when they are to be looked at before their time."""

    def __init__(self, directory: Path, turn: threading.Event) -> None:
        self._directory = directory
        self._turn = turn
        self._watch = DirectoryWatch(directory)
        self._followed: _Followed | None = None
        self._was_called = False
        """Whether this turn came before its time."""
        self._look_at = math.inf
        """When to look after the directory and the outbox's file, because something has changed there."""

    @property
    def is_watched(self) -> bool:
        """Return whether the kernel tells of changes in the directory."""
        return self._watch.is_on

    def follow(
        self,
        lock: DirectoryLock,
        outbox: Outbox,
        upkeep: OutboxUpkeep,
        *,
        nudged: Callable[[], object],
        switched: Callable[[], object],
        has_switch: Callable[[], bool],
    ) -> None:
        """Begin to look, at the directory that *lock* holds with *outbox* in it; not before: its disk may hang.

        *nudged* is called when a command has written, *switched* when the off switch came or went; that is looked at
        while *has_switch* returns True.
        """
        self._followed = _Followed(lock, outbox, upkeep, has_switch)
        self._followed.nudge = FileWatch(self._directory / NUDGE_FILE, nudged)
        self._followed.off_switch = FileWatch(self._directory / DISABLED_FILE, switched)

    def renew(self) -> None:
        """Have SIGIO, whose handler sets the turn, tell of changes; on the thread that calls `look`."""
        if self._watch.renew():
            self._turn.set()  # what came until now brought no signal

    def close(self) -> None:
        """Have no signal sent any more."""
        self._watch.close()

    def wait(self, stop: threading.Event, seconds: float) -> None:
        """Wait *seconds*, or until there may be something to look at, or the turn is set."""
        if self._was_called:
            stop.wait(_LEAST_WAIT_SECONDS)
        end = min(time.monotonic() + max(seconds, _TICK_SECONDS), self._look_at)
        longest = math.inf if self.is_watched else _TICK_SECONDS
        while not (was_called := self._turn.wait(min(end - time.monotonic(), longest))):
            if time.monotonic() >= end - _LEAST_WAIT_SECONDS or self._has_command_come():
                break
        self._was_called = was_called
        if was_called:
            self._look_at = min(self._look_at, time.monotonic() + _SETTLED_SECONDS)
        self._turn.clear()

    def _has_command_come(self) -> bool:
        files = self._followed
        if files is None:
            return False
        is_switched = files.has_switch() and files.off_switch.is_touched
        return is_switched or not files.nudge.is_there or files.nudge.is_touched

    def look(self) -> None:
        """Look at them; raise StateDirectoryError when another agent has the directory.

        It was deleted or moved then: two agents would tell every record twice, and this one can only stop.
        """
        files = self._followed
        if files is None:
            return
        is_in_place = files.nudge.check()  # where the file in it is the same one, so is the directory
        if files.has_switch():
            files.off_switch.check()
        is_look_due = time.monotonic() >= self._look_at - _LEAST_WAIT_SECONDS
        if is_look_due or not (is_in_place or self._was_called):
            self._look_at = math.inf
            self._look_after_directory(files, has_changed=is_look_due)

    def _look_after_directory(self, files: _Followed, *, has_changed: bool) -> None:
        with suppress(OSError):  # without a directory the outbox works from memory, and says so
            if files.lock.claim():
                files.outbox.tend()
            elif has_changed:
                files.upkeep.directory_changed()
        if self.is_watched:
            self.renew()


class _Followed:
    """What is looked at, once there is an outbox on the disk."""

    nudge: FileWatch
    off_switch: FileWatch

    def __init__(
        self, lock: DirectoryLock, outbox: Outbox, upkeep: OutboxUpkeep, has_switch: Callable[[], bool]
    ) -> None:
        self.lock = lock
        self.outbox = outbox
        self.upkeep = upkeep
        self.has_switch = has_switch
