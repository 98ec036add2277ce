"""Whether an outbox is the newest that its stream had: a sequence may not be given to two records.

A state directory can go back in time: a disk is restored, or the agent dies while it works from memory, and what memory
had told the sinks is not in the file. Gone on from there, the stream would give the same sequences to other records. So
how far a stream came is kept beside the outbox, in memory of the system that outlives the agent but not the boot
(`StreamCounter`). For a start after a boot there is a note of an orderly stop in the file ``nudge`` (`stop_note`). It
counts when the boot, or the start where it is the same boot, followed soon, and for the very file that was closed: a
copy that was put back with its note is another. A start that has neither begins a new
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
_PREFIX = "scheduled-events-bridge-"
#: What it is, the boot, the next sequence, the changes of decisions.
_LAYOUT = struct.Struct("<8s36s4xQQ")
#: Behind that the streams that it followed, the newest first: which, its next sequence, its changes of decisions.
_EARLIER = struct.Struct("<16sQQ")
_MOST_EARLIER = 64
_FILE_BYTES = _LAYOUT.size + _MOST_EARLIER * _EARLIER.size
_FIGURES = struct.Struct("<QQ")
_FIGURES_AT = _LAYOUT.size - _FIGURES.size
_MAGIC = b"SEBCOUNT"


class _StopNote(msgspec.Struct, frozen=True, kw_only=True):
    """When the outbox was closed in order, and what it held then; kept as JSON under these names."""

    at: str
    next_sequence: str | None
    decision_changes: int
    last_good_at: str | None
    file: str | None = None
    """Which file it was, where the file system tells; a copy that was put in its place is another."""


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

    A mapped page, so that a commit costs no system call for it, and nothing that stops the disk stops this. A stream
    that follows another takes over what the file of that one tells, so there is one file however many there were.
    """

    def __init__(self, place: Path | None) -> None:
        self._place = place
        self._page: mmap.mmap | None = None
        self._stream_id: str | None = None
        self._asked_for: str | None = None

    def read(self, stream_id: str) -> Progress | None:
        """Return how far *stream_id* came in this boot; None when that is not known."""
        self._asked_for = stream_id
        _, known = self._file_about(stream_id)
        return known.get(stream_id)

    def note(self, stream_id: str, progress: Progress) -> None:
        """Note that *stream_id* came as far as *progress*."""
        if stream_id != self._stream_id:
            before = self._stream_id or self._asked_for or stream_id
            self.close()
            self._stream_id = stream_id
            with suppress(OSError, ValueError):
                self._begin(stream_id, progress, before)
        if self._page is not None:
            _FIGURES.pack_into(self._page, _FIGURES_AT, progress.next_sequence, progress.decision_changes)

    def close(self) -> None:
        """Leave the stream where it is."""
        if self._page is not None:
            self._page.close()
        self._page = self._stream_id = None

    def _begin(self, stream_id: str, progress: Progress, before: str) -> None:
        if self._place is None:
            return
        path = self._path(stream_id)
        followed, known = self._file_about(before)
        known.pop(stream_id, None)
        self._page = _mapped(path, progress, known)
        if followed not in (None, path):
            followed.unlink()

    def _path(self, stream_id: str) -> Path:
        return (self._place or Path()) / f"{_PREFIX}{uuid.UUID(stream_id)}"

    def _file_about(self, stream_id: str) -> tuple[Path | None, dict[str, Progress]]:
        """Return the file that tells of *stream_id*, and all streams that it tells of, the newest first."""
        if self._place is not None:
            with suppress(OSError, ValueError):
                for path in (self._path(stream_id), *sorted(self._place.glob(f"{_PREFIX}*"))):
                    known = _streams_in(path)
                    if stream_id in known:
                        return path, known
        return None, {}


def _mapped(path: Path, progress: Progress, earlier: Mapping[str, Progress]) -> mmap.mmap:
    """Return the head of the file at *path*, which tells of *progress* and of *earlier* streams."""
    page = bytearray(_FILE_BYTES)
    _LAYOUT.pack_into(page, 0, _MAGIC, _boot(), progress.next_sequence, progress.decision_changes)
    for number, (stream_id, its) in enumerate(list(earlier.items())[:_MOST_EARLIER]):
        values = uuid.UUID(stream_id).bytes, its.next_sequence, its.decision_changes
        _EARLIER.pack_into(page, _LAYOUT.size + number * _EARLIER.size, *values)
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        if os.fstat(descriptor).st_size != _FILE_BYTES:
            os.ftruncate(descriptor, 0)
        # Written, not only made larger: a page that has no memory behind it would end the process when touched.
        with suppress(OSError):
            os.pwrite(descriptor, page, 0)
        return mmap.mmap(descriptor, _LAYOUT.size)
    finally:
        os.close(descriptor)


def _streams_in(path: Path) -> dict[str, Progress]:
    """Return how far each stream came that the file at *path* tells of; nothing where it is not of this boot."""
    try:
        descriptor = _open(path, os.O_RDONLY)
    except OSError:
        return {}
    try:
        page = os.read(descriptor, _FILE_BYTES)
    finally:
        os.close(descriptor)
    try:
        own_id = str(uuid.UUID(path.name.removeprefix(_PREFIX)))
        magic, boot, next_sequence, decision_changes = _LAYOUT.unpack_from(page)
    except (ValueError, struct.error):
        return {}
    if magic != _MAGIC or boot != _boot():
        return {}
    streams = {own_id: Progress(next_sequence=next_sequence, decision_changes=decision_changes)}
    rest = page[_LAYOUT.size :]
    for stream, following, changes in _EARLIER.iter_unpack(rest[: len(rest) // _EARLIER.size * _EARLIER.size]):
        if any(stream):
            streams[str(uuid.UUID(bytes=stream))] = Progress(next_sequence=following, decision_changes=changes)
    return streams


def _open(path: Path, flags: int) -> int:
    """Return a descriptor of the file at *path*; raise OSError for one that is not plainly our own."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        os.close(descriptor)
        raise PermissionError(path)
    return descriptor


def doubt_of(
    known: Mapping[str, str], counter: StreamCounter, now: datetime, note: str | None, *, file_id: str | None
) -> Doubt | None:
    """Return why the outbox that remembers *known* may not be the newest of its stream; None when it surely is.

    *note* is that of its last stop: "" where a version before was at work, None where it does not count. *file_id*
    says which file it is, None where that is not known.
    """
    found = Progress(next_sequence=meta.next_sequence(known), decision_changes=meta.decision_changes(known))
    reached = counter.read(known["stream_id"])
    if reached is not None:
        lacks_decisions = found.decision_changes < reached.decision_changes
        if found.next_sequence >= reached.next_sequence and not lacks_decisions:
            return None
        why = f"its stream came to sequence {reached.next_sequence - 1}, it has {found.next_sequence - 1}"
        return Doubt(why=why, may_lack_decisions=lacks_decisions, lacks_decisions=lacks_decisions)
    if note is not None and (not note or _is_in_order(note, known, now, file_id)):
        return None
    return Doubt(why="the agent did not end in order, or long ago", may_lack_decisions=True, lacks_decisions=False)


def stop_note(known: Mapping[str, str], now: datetime, file_id: str | None) -> str:
    """Return the note of an orderly stop of the outbox that remembers *known*."""
    return msgspec.json.encode(_note(known, format_time(now), file_id)).decode()


def _note(known: Mapping[str, str], at: str, file_id: str | None) -> _StopNote:
    return _StopNote(
        at=at,
        next_sequence=known.get("next_sequence"),
        decision_changes=meta.decision_changes(known),
        last_good_at=known.get("last_good_at"),
        file=file_id,
    )


def _is_in_order(text: str, known: Mapping[str, str], now: datetime, file_id: str | None) -> bool:
    """Return whether the note *text* is of the last thing that happened, as far as the machine was up since."""
    try:
        note = msgspec.json.decode(text, type=_StopNote)
        stopped_at = parse_time(note.at)
    except (ValueError, msgspec.MsgspecError):
        return False
    if note != _note(known, note.at, note.file):
        return False  # something was written since
    if None not in (note.file, file_id) and note.file != file_id:
        return False  # a copy, of whenever
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
