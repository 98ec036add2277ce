"""Whether an outbox is the newest that its stream had: a sequence may not be given to two records.

A state directory can go back in time: a disk is restored, or the agent dies while it works from memory, and what memory
had told the sinks is not in the file. Gone on from there, the stream would give the same sequences to other records. So
how far a stream came is kept beside the outbox, in memory of the system that outlives the agent but not the boot
(`StreamCounter`). For a start after a boot there is a note of an orderly stop in the file ``nudge`` (`stop_note`). It
counts when the boot, or the start where it is the same boot, followed soon. A start that has neither begins a new
stream. Neither is in the database, whose shape is that of the version before, and which may be restored alone.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import msgspec

from bridge.clock import format_time, parse_time
from bridge.outbox import meta

#: An orderly reboot takes seconds to minutes; what starts later may as well have been restored.
_STOP_COUNTS = timedelta(minutes=15)
_CLOCK_TOLERANCE = timedelta(minutes=1)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # a file there is only taken when it is a plain one of our own
#: What it is, the boot, the next sequence, the changes of decisions.
_LAYOUT = struct.Struct("<8s36s4xQQ")
_FIGURES = struct.Struct("<QQ")
_FIGURES_AT = _LAYOUT.size - _FIGURES.size
_MAGIC = b"SEBCOUNT"


class _StopNote(msgspec.Struct, frozen=True, kw_only=True):
    """When the outbox was closed in order, and what it held then; kept as JSON under these names."""

    at: str
    next_sequence: str | None
    decision_changes: int
    last_good_at: str | None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a stream came."""

    next_sequence: int
    decision_changes: int


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """Why it is not sure that an outbox is the newest that its stream had."""

    why: str
    may_lack_decisions: bool
    lacks_decisions: bool


def runtime_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where files outlive the agent but not the boot; None where there is no such place."""
    named = environment.get("RUNTIME_DIRECTORY", "").partition(":")[0]  # systemd sets it
    if named.startswith("/"):
        return Path(named)
    return _SHARED_MEMORY if sys.platform != "win32" and _SHARED_MEMORY.is_dir() else None


class StreamCounter:
    """How far the stream of one outbox came, for a start after this one; a place of None keeps nothing.

    A mapped page, so that a commit costs no system call for it, and nothing that stops the disk stops this.
    """

    def __init__(self, place: Path | None) -> None:
        self._place = place
        self._page: mmap.mmap | None = None
        self._stream_id: str | None = None

    def read(self, stream_id: str) -> Progress | None:
        """Return how far *stream_id* came in this boot; None when that is not known."""
        try:
            descriptor = self._open(stream_id, os.O_RDONLY)
        except (OSError, ValueError):
            return None
        try:
            magic, boot, next_sequence, decision_changes = _LAYOUT.unpack(os.read(descriptor, _LAYOUT.size))
        except (OSError, struct.error):
            return None
        finally:
            os.close(descriptor)
        if magic != _MAGIC or boot != _boot():
            return None
        return Progress(next_sequence=next_sequence, decision_changes=decision_changes)

    def note(self, stream_id: str, progress: Progress) -> None:
        """Note that *stream_id* came as far as *progress*."""
        if stream_id != self._stream_id:
            self.close()
            self._stream_id = stream_id
            with suppress(OSError, ValueError):
                self._page = self._mapped(stream_id, progress)
        if self._page is not None:
            _FIGURES.pack_into(self._page, _FIGURES_AT, progress.next_sequence, progress.decision_changes)

    def close(self) -> None:
        """Leave the stream where it is."""
        if self._page is not None:
            self._page.close()
        self._page = self._stream_id = None

    def _mapped(self, stream_id: str, progress: Progress) -> mmap.mmap:
        descriptor = self._open(stream_id, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size != _LAYOUT.size:
                os.ftruncate(descriptor, 0)
            # Written, not only made larger: a page that has no memory behind it would end the process when touched.
            page = _LAYOUT.pack(_MAGIC, _boot(), progress.next_sequence, progress.decision_changes)
            with suppress(OSError):
                os.pwrite(descriptor, page, 0)
            return mmap.mmap(descriptor, _LAYOUT.size)
        finally:
            os.close(descriptor)

    def _open(self, stream_id: str, flags: int) -> int:
        """Return a descriptor of the file of *stream_id*; raise OSError for one that is not plainly our own."""
        if self._place is None:
            raise FileNotFoundError
        path = self._place / f"scheduled-events-bridge-{uuid.UUID(stream_id)}"
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            os.close(descriptor)
            raise PermissionError(path)
        return descriptor


def doubt_of(known: Mapping[str, str], counter: StreamCounter, now: datetime, note: str | None) -> Doubt | None:
    """Return why the outbox that remembers *known* may not be the newest of its stream; None when it surely is.

    *note* is that of its last stop: "" where a version before was at work, None where it does not count.
    """
    found = Progress(next_sequence=meta.next_sequence(known), decision_changes=meta.decision_changes(known))
    reached = counter.read(known["stream_id"])
    if reached is not None:
        lacks_decisions = found.decision_changes < reached.decision_changes
        if found.next_sequence >= reached.next_sequence and not lacks_decisions:
            return None
        why = f"its stream came to sequence {reached.next_sequence - 1}, it has {found.next_sequence - 1}"
        return Doubt(why=why, may_lack_decisions=lacks_decisions, lacks_decisions=lacks_decisions)
    if note is not None and (not note or _is_in_order(note, known, now)):
        return None
    return Doubt(why="the agent did not end in order, or long ago", may_lack_decisions=True, lacks_decisions=False)


def stop_note(known: Mapping[str, str], now: datetime) -> str:
    """Return the note of an orderly stop of the outbox that remembers *known*."""
    return msgspec.json.encode(_note(known, format_time(now))).decode()


def _note(known: Mapping[str, str], at: str) -> _StopNote:
    return _StopNote(
        at=at,
        next_sequence=known.get("next_sequence"),
        decision_changes=meta.decision_changes(known),
        last_good_at=known.get("last_good_at"),
    )


def _is_in_order(text: str, known: Mapping[str, str], now: datetime) -> bool:
    """Return whether the note *text* is of the last thing that happened, as far as the machine was up since."""
    try:
        note = msgspec.json.decode(text, type=_StopNote)
        stopped_at = parse_time(note.at)
    except (ValueError, msgspec.MsgspecError):
        return False
    if note != _note(known, note.at):
        return False  # something was written since
    booted_at = now - timedelta(seconds=_uptime_seconds())
    began = booted_at if booted_at > stopped_at else now
    return -_CLOCK_TOLERANCE <= began - stopped_at <= _STOP_COUNTS


def _uptime_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@cache
def _boot() -> bytes:
    try:
        return _BOOT_ID.read_bytes()[:36].ljust(36, b"\0")
    except OSError:
        return bytes(36)
