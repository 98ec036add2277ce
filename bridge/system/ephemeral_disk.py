"""Why the state directory would not survive a redeploy of the VM, in one sentence, and the watch that warns of it.

Azure, "Ephemeral OS disks" and "Azure managed disks overview", temporary disk: both are local to the host and come
back empty after a redeploy. A redeploy is one of the very events that the agent announces, and what it saw of one is
told afterwards, from this directory. It is advice: what cannot be found out is no reason, and nothing raises. On the
mount of a file server nothing is looked at, because one that is dead would hold the caller.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

logger = logging.getLogger(__name__)

_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs"})
_LAYERS = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs", "squashfs"})
_EMPTY_DIR = "/volumes/kubernetes.io~empty-dir/"
#: The Azure agents for Linux and Windows, and Ubuntu's image, put it on the temporary disk.
_MARK = "DATALOSS_WARNING_README.txt"
#: What lies on the disk with the operating system: in a container a file that the node mounts there.
_ON_THE_OS_DISK = ("/", "/etc/hosts")
_DRIVE_LENGTH = len("D:")
_TEMPORARY = "on Azure's temporary disk, which comes back empty after a redeploy, a resize or a deallocation"
_EPHEMERAL_OS = "on an ephemeral OS disk, which a redeploy or a reimage makes anew"
_LINE = re.compile(rb"\d+ \d+ (\d+:\d+) (\S+) (\S+) .*? - (\S+) ")
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")


class _Mount(NamedTuple):
    """One line of /proc/self/mountinfo (proc_pid_mountinfo(5))."""

    number: str
    """The device as major:minor; the major is 0 where no block device is behind it, or not one alone."""
    top: str
    """Which directory of the file system is mounted: "/" but for a bind mount, or a subvolume."""
    point: str
    kind: str

    @property
    def has_device(self) -> bool:
        return not self.number.startswith("0:")


class EphemeralDiskWatch:
    """Warns once when *directory* would not survive, and tells *show* each time it was looked at.

    What the mounts say is known at start; *os_disk_is_ephemeral* returns None until IMDS has answered.
    """

    def __init__(
        self, directory: Path, *, os_disk_is_ephemeral: Callable[[], bool | None], show: Callable[[bool], object]
    ) -> None:
        self._directory = directory
        self._os_disk_is_ephemeral = os_disk_is_ephemeral
        self._show = show
        self._is_first = True
        self._known: bool | None = None
        self._warned_of: str | None = None

    def check(self) -> None:
        """Look again if IMDS says anything new; cheap otherwise."""
        answer = self._os_disk_is_ephemeral()
        if not self._is_first and (answer is None or answer == self._known):
            return
        self._is_first, self._known = False, answer
        why = why_ephemeral(self._directory, os_disk_is_ephemeral=answer)
        self._show(why is not None)
        if why is not None and why != self._warned_of:
            logger.warning("%s", why)
        self._warned_of = why


def why_ephemeral(directory: Path, *, os_disk_is_ephemeral: bool | None, root: Path = Path("/")) -> str | None:
    """Return a sentence that says why *directory* would not survive and what to do; None when nothing says so.

    *os_disk_is_ephemeral* is what the instance document says, None while it is unknown. *root* takes the place of
    "/", below which /proc and /sys are read.
    """
    try:
        path = os.path.realpath(directory)
        if sys.platform == "win32":
            drive = PureWindowsPath(path).drive
            is_system = drive.casefold() == os.environ.get("SYSTEMDRIVE", "C:").casefold()
            reason = reason_on_windows(drive, is_on_ephemeral_os=is_system and os_disk_is_ephemeral)
        else:
            reason = _reason_on_linux(path, os_disk_is_ephemeral=os_disk_is_ephemeral, root=root)
    except (OSError, ValueError):  # not to be read, or a path that is none
        return None
    if reason is None:
        return None
    sentence = f"{directory} lies {reason}. Set state.directory to a disk that survives a redeploy."
    # A path is bytes to Linux, and a log wants Unicode.
    return sentence.encode("utf-8", "replace").decode()


def reason_on_windows(drive: str, *, is_on_ephemeral_os: bool | None, root: Path = Path("/")) -> str | None:
    """Return why what is on *drive*, such as "D:", would not survive; a share is never asked."""
    if len(drive) != _DRIVE_LENGTH:
        return None
    if (root / f"{drive}\\" / _MARK).is_file():
        return f"{_TEMPORARY} ({drive})"
    return f"{_EPHEMERAL_OS} ({drive})" if is_on_ephemeral_os else None


def _reason_on_linux(path: str, *, os_disk_is_ephemeral: bool | None, root: Path) -> str | None:
    mounts = list(_mounts((root / "proc/self/mountinfo").read_bytes()))
    mount = _mount_of(path, mounts)
    if mount is None:
        return None
    reason = _reason_of_kind(mount)
    if reason is None and _is_marked(mount, mounts, root):
        reason = f"{_TEMPORARY} ({mount.point})"
    if reason is None and os_disk_is_ephemeral and _is_on_os_disk(mount, mounts, root):
        reason = f"{_EPHEMERAL_OS} ({mount.point})"
    return reason


def _reason_of_kind(mount: _Mount) -> str | None:
    if mount.kind in _MEMORY:
        return f"in memory ({mount.kind} at {mount.point}), which a reboot empties"
    if mount.kind in _LAYERS:
        return (
            f"in the layer of a container or of a live image ({mount.kind} at {mount.point}), "
            "which is gone with it unless a volume is mounted there"
        )
    if _EMPTY_DIR in mount.top:
        return f"in an emptyDir of its pod (at {mount.point}), which is gone with the pod"
    return None


def _mounts(text: bytes) -> Iterator[_Mount]:
    for line in text.split(b"\n"):
        found = _LINE.match(line)
        if found is not None:
            fields = (_ESCAPE.sub(lambda code: bytes([int(code[1], 8)]), field) for field in found.groups())
            yield _Mount(*map(os.fsdecode, fields))


def _mount_of(path: str, mounts: list[_Mount]) -> _Mount | None:
    """Return the deepest mount above *path*; the later of two on one point covers the earlier."""
    above = [mount for mount in mounts if f"{path}/".startswith(f"{mount.point.rstrip('/')}/")]
    return max(reversed(above), key=lambda mount: len(mount.point), default=None)


def _is_marked(mount: _Mount, mounts: list[_Mount], root: Path) -> bool:
    """Return whether the warning lies at the mount's root, or at the file system's own where that is mounted too."""
    tops = [mount, *(other for other in mounts if other.number == mount.number and other.top == "/")]
    return mount.has_device and any((root / top.point[1:] / _MARK).is_file() for top in tops)


def _is_on_os_disk(mount: _Mount, mounts: list[_Mount], root: Path) -> bool:
    found = [_mount_of(path, mounts) for path in _ON_THE_OS_DISK]
    disks = {disk for other in found if other is not None for disk in _disks(other, root)}
    return not disks.isdisjoint(_disks(mount, root))


def _disks(mount: _Mount, root: Path) -> set[str]:
    """Return the disks that *mount* is made of, as sysfs calls them, and its own number."""
    if not mount.has_device:
        return set() if mount.kind in _LAYERS | _MEMORY else {mount.number}
    return {mount.number, *_disks_below(Path(os.path.realpath(root / "sys/dev/block" / mount.number)))}


def _disks_below(device: Path) -> Iterator[str]:
    """Yield the disks under *device*: a partition's disk, or what an array or a logical volume is made of."""
    parts = sorted((device / "slaves").glob("*"))
    for part in parts:
        yield from _disks_below(Path(os.path.realpath(part)))
    if not parts:
        yield device.parent.name if (device / "partition").exists() else device.name
