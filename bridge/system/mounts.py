"""Which mount a directory lies on, without asking a disk that may never answer.

A mount of a dead file server holds whoever asks for a file on it, so the way to a directory is walked by name: the
mounts come from /proc/self/mountinfo, and no link is read on one that is not a disk or the memory of this machine.

proc_pid_mountinfo(5): the later of two mounts on one point covers the earlier, and a mount covers all that lay below
its point. So the ids of the parents decide, not the longest path.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MEMORY = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs"})
LAYERS = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs", "squashfs"})
_LOCAL = MEMORY | LAYERS | {"btrfs", "bcachefs", "zfs", "proc", "sysfs"}
#: As many as Linux follows, and as long as it takes a path (path_resolution(7), PATH_MAX).
_MOST_LINKS = 40
_LONGEST_PATH = 4096
_LEAST_FIELDS = 6
_NUMBER = re.compile(r"\d+:\d+", re.ASCII)
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of mountinfo."""

    mount_id: str
    parent_id: str
    number: str
    """The device as major:minor; the major is 0 where no block device is behind it, or not one alone."""
    root: str
    """Which directory of the file system is mounted: "/" but for a bind mount, or a subvolume."""
    point: str
    kind: str
    """The type of the file system: ext4, tmpfs, overlay."""
    source: str

    @property
    def has_device(self) -> bool:
        """Return whether it is one block device."""
        return not self.number.startswith("0:")

    @property
    def is_local(self) -> bool:
        """Return whether it is this machine that answers for its files, and not a server or another process."""
        return self.has_device or self.kind in _LOCAL


class Mounts:
    """The mounts that a process sees."""

    def __init__(self, mounts: Iterable[Mount]) -> None:
        self.all = tuple(mounts)
        self._ids = {mount.mount_id for mount in self.all}
        self._at: dict[str, list[Mount]] = {}
        for mount in self.all:
            self._at.setdefault(mount.point, []).append(mount)

    def holding(self, path: str) -> Mount | None:
        """Return the mount that *path* lies on; *path* is absolute and has no link in it. Null when none is known."""
        way = [self._first()]
        for name in path.split("/"):
            if name:
                way.append(self._step(way[-1], name))
        return way[-1][1]

    def place(self, path: str, *, root: Path = Path("/")) -> Mount | None:
        """Return the mount that the absolute *path* leads to; what does not exist yet is no link.

        Null where the way leads over a mount that nobody here answers for. *root* takes the place of "/".
        """
        way, ahead, links = [self._first()], path.split("/")[::-1], 0
        while ahead and links <= _MOST_LINKS:
            name = ahead.pop()
            if name in {"", "."}:
                continue
            if name == "..":
                del way[max(1, len(way) - 1) :]
                continue
            here, mount = self._step(way[-1], name)
            if mount is None or not mount.is_local or len(here) > _LONGEST_PATH:
                return None
            target = _link(root, here)
            if not target:
                way.append((here, mount))
                continue
            links += 1
            ahead.extend(target.split("/")[::-1])
            if target.startswith("/"):
                del way[1:]
        return way[-1][1] if links <= _MOST_LINKS else None

    def _first(self) -> tuple[str, Mount | None]:
        return "/", self._topmost("/", None)

    def _step(self, last: tuple[str, Mount | None], name: str) -> tuple[str, Mount | None]:
        """Return the directory *name* in the directory *last*, and the mount that it lies on."""
        point = posixpath.join(last[0], name)
        return point, self._topmost(point, last[1])

    def _topmost(self, point: str, below: Mount | None) -> Mount | None:
        """Return what lies on top at *point*, where *below* is the mount that has the directory; else *below*."""
        left = list(self._at.get(point, ()))
        while over := [mount for mount in left if self._is_on(mount, below)]:
            below = over[-1]
            left.remove(below)
        return below

    def _is_on(self, mount: Mount, below: Mount | None) -> bool:
        if below is not None:
            return mount.parent_id == below.mount_id
        # The parent of the first mount is not listed, or is that mount itself.
        return mount.parent_id not in self._ids or mount.parent_id == mount.mount_id


def read_mounts(root: Path = Path("/")) -> Mounts:
    """Return the mounts of this process; raise OSError where the system does not tell."""
    return parse_mounts((root / "proc/self/mountinfo").read_bytes())


def parse_mounts(text: bytes) -> Mounts:
    """Return the mounts that *text* lists; a line that is none is left out."""
    # By newline and space alone: other white space stands in a path as it is.
    parsed = (_parsed(line) for line in text.split(b"\n"))
    return Mounts(mount for mount in parsed if mount is not None)


def _parsed(line: bytes) -> Mount | None:
    # Any number of optional fields, then a lone hyphen, then three fields of which the source may be empty.
    before, _, after = line.partition(b" - ")
    first, last = ([_text(field) for field in part.split(b" ")] for part in (before, after))
    if len(first) < _LEAST_FIELDS or len(last) < 2 or not _NUMBER.fullmatch(first[2]):  # noqa: PLR2004
        return None
    mount_id, parent_id, number, root, point = first[:5]
    return Mount(
        mount_id=mount_id,
        parent_id=parent_id,
        number=number,
        root=root,
        point=point,
        kind=last[0],
        source=last[1],
    )


def _text(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))


def _link(root: Path, path: str) -> str:
    """Return where the link *path* leads, "" when it is no link."""
    try:
        return os.readlink(os.path.join(root, path[1:]))  # noqa: PTH115, PTH118  # the text, as it stands there
    except OSError:
        return ""
