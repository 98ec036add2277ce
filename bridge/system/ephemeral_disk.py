"""Detects a state directory that does not survive a redeploy of the VM, and warns once.

An ephemeral OS disk and the temporary disk are local to the host and are empty after a redeploy (Azure, "Ephemeral OS
disks" and "Azure managed disks overview"). The agent reports redeploys, so it needs its state after a redeploy. If
the system does not provide the facts, the directory counts as durable, and nothing is raised. Mounts of file servers
are not accessed, because a dead server would block the caller.
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
#: The Azure agents for Linux and Windows, and Ubuntu's image, create this file on the temporary disk.
_MARK = "DATALOSS_WARNING_README.txt"
#: Paths on the OS disk. In a container, the node mounts its own file at the second path.
_ON_THE_OS_DISK = ("/", "/etc/hosts")
_DRIVE_LENGTH = len("D:")
_TEMPORARY = "on Azure's temporary disk, which is empty after a redeploy, a resize, or a deallocation"
_EPHEMERAL_OS = "on an ephemeral OS disk, which a redeploy or a reimage replaces"
#: ID, parent, device, top directory, mount point, options, "-", type (proc_pid_mountinfo(5)).
_LINE = re.compile(r"\d+ \d+ (\d+:\d+) (\S+) (\S+) .*? - (\S+) ")


class _Mount(NamedTuple):
    """One line of /proc/self/mountinfo. A device with the major number 0 is not a block device."""

    device: str
    top: str
    point: str
    kind: str

    @property
    def is_on_block_device(self) -> bool:
        return not self.device.startswith("0:")


class EphemeralDiskWatch:
    """Warns once if *directory* is ephemeral, and passes each result to *show*.

    *os_disk_is_ephemeral* returns None until IMDS has responded.
    """

    def __init__(
        self, directory: Path, *, os_disk_is_ephemeral: Callable[[], bool | None], show: Callable[[bool], object]
    ) -> None:
        self._directory = directory
        self._os_disk_is_ephemeral = os_disk_is_ephemeral
        self._show = show
        self._is_first = True
        self._known: bool | None = None
        self._warning: str | None = None

    def check(self) -> None:
        """Check at the first call, and again if IMDS returns another value."""
        is_ephemeral = self._os_disk_is_ephemeral()
        if not self._is_first and is_ephemeral in (None, self._known):
            return
        self._is_first, self._known = False, is_ephemeral
        why = why_ephemeral(self._directory, os_disk_is_ephemeral=is_ephemeral)
        self._show(why is not None)
        if why is not None and why != self._warning:
            logger.warning("%s", why)
        self._warning = why


def why_ephemeral(directory: Path, *, os_disk_is_ephemeral: bool | None, root: Path = Path("/")) -> str | None:
    """Return why *directory* does not survive a redeploy and the required action, None without a known reason.

    *os_disk_is_ephemeral* comes from the instance document. Tests replace "/" with *root*.
    """
    try:
        path = os.path.realpath(directory)
        if sys.platform == "win32":
            drive = PureWindowsPath(path).drive
            is_system = drive.casefold() == os.environ.get("SYSTEMDRIVE", "C:").casefold()
            reason = reason_on_windows(drive, is_on_ephemeral_os=is_system and os_disk_is_ephemeral)
        else:
            reason = _reason_on_linux(path, os_disk_is_ephemeral=os_disk_is_ephemeral, root=root)
    except (OSError, ValueError):  # no /proc, or an invalid path
        return None
    if reason is None:
        return None
    sentence = f"{directory} is {reason}. Set state.directory to a disk that survives a redeploy."
    return sentence.encode("utf-8", "replace").decode()  # a path may contain bytes that are not UTF-8


def reason_on_windows(drive: str, *, is_on_ephemeral_os: bool | None, root: Path = Path("/")) -> str | None:
    """Return why *drive*, such as "D:", does not survive a redeploy. A network share is not accessed."""
    if len(drive) != _DRIVE_LENGTH:
        return None
    if (root / f"{drive}\\" / _MARK).is_file():
        return f"{_TEMPORARY} ({drive})"
    return f"{_EPHEMERAL_OS} ({drive})" if is_on_ephemeral_os else None


def _reason_on_linux(path: str, *, os_disk_is_ephemeral: bool | None, root: Path) -> str | None:
    mounts = list(_mounts((root / "proc/self/mountinfo").read_text(errors="surrogateescape")))
    mount = _mount_of(path, mounts)
    reason = None if mount is None else _reason_of_kind(mount)
    if mount is None or reason is not None:
        return reason
    if mount.is_on_block_device and (root / mount.point[1:] / _MARK).is_file():
        return f"{_TEMPORARY} ({mount.point})"
    if os_disk_is_ephemeral and _is_on_os_disk(mount, mounts, root):
        return f"{_EPHEMERAL_OS} ({mount.point})"
    return None


def _reason_of_kind(mount: _Mount) -> str | None:
    where = f"({mount.kind} at {mount.point})"
    if mount.kind in _MEMORY:
        return f"in memory {where}, which is empty after a reboot"
    if mount.kind in _LAYERS:
        return f"in the layer of a container or of a live image {where}, which is deleted unless a volume is mounted"
    if _EMPTY_DIR in mount.top:
        return f"in an emptyDir (at {mount.point}), which is deleted with its pod"
    return None


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is not None:
            yield _Mount(*(field.replace("\\040", " ") for field in found.groups()))


def _mount_of(path: str, mounts: list[_Mount]) -> _Mount | None:
    """Return the deepest mount above *path*; the later of two mounts on one point covers the earlier."""
    above = [mount for mount in mounts if f"{path}/".startswith(f"{mount.point.rstrip('/')}/")]
    return max(reversed(above), key=lambda mount: len(mount.point), default=None)


def _is_on_os_disk(mount: _Mount, mounts: list[_Mount], root: Path) -> bool:
    found = [_mount_of(path, mounts) for path in _ON_THE_OS_DISK]
    disks = {disk for other in found if other is not None for disk in _disks(other, root)}
    return not disks.isdisjoint(_disks(mount, root))


def _disks(mount: _Mount, root: Path) -> set[str]:
    """Return the disks below *mount*: the disk of a partition, or the parts of an array or a logical volume."""
    if not mount.is_on_block_device:
        return set()
    return {mount.device, *_disks_below(Path(os.path.realpath(root / "sys/dev/block" / mount.device)))}


def _disks_below(device: Path) -> Iterator[str]:
    parts = sorted((device / "slaves").glob("*"))
    for part in parts:
        yield from _disks_below(Path(os.path.realpath(part)))
    if not parts:
        yield device.parent.name if (device / "partition").exists() else device.name
