"""Detects a state directory whose contents are lost when Azure redeploys the VM.

After a redeploy, Azure's temporary disk, memory, a container layer, and an emptyDir are empty (Microsoft, "Azure
managed disks overview"). The agent would then lose the records that it has not yet sent. If the system does not provide
the necessary information, the directory counts as durable. The check does not access mounts of file servers, because a
dead server would block the check.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path, PureWindowsPath

logger = logging.getLogger(__name__)

_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs"})
_LAYERS = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs", "squashfs"})
_EMPTY_DIR = "/volumes/kubernetes.io~empty-dir/"
#: The Azure agents for Linux and Windows, and Ubuntu's image, create this file on the temporary disk.
_MARK = "DATALOSS_WARNING_README.txt"
_TEMPORARY = "on Azure's temporary disk, which is empty after a redeploy, a resize, or a deallocation"
#: ID, parent, device, top directory, mount point, options, "-", type (proc_pid_mountinfo(5)).
_LINE = re.compile(r"\d+ \d+ (\d+):\d+ (\S+) (\S+) .*? - (\S+) ")


def warn_if_ephemeral(directory: Path) -> bool:
    """Return True and log a warning if a redeploy would delete *directory*."""
    why = why_ephemeral(directory)
    if why is not None:
        logger.warning("%s", why)
    return why is not None


def why_ephemeral(directory: Path, *, root: Path = Path("/")) -> str | None:
    """Return the problem and the required action, or None. *root* replaces / in tests."""
    try:
        path = os.path.realpath(directory)
        reason = _reason_on_windows(path) if sys.platform == "win32" else _reason_on_linux(path, root)
    except (OSError, ValueError):  # no /proc, or an invalid path
        return None
    if reason is None:
        return None
    unit = "" if sys.platform == "win32" else " With systemd, add the directory to ReadWritePaths= of the unit."
    sentence = f"{directory} is {reason}. Set state.directory to a disk that survives a redeploy.{unit}"
    return sentence.encode("utf-8", "replace").decode()  # a path may contain bytes that are not UTF-8


def _reason_on_windows(path: str) -> str | None:
    drive = PureWindowsPath(path).drive
    is_local = drive.endswith(":")
    return f"{_TEMPORARY} ({drive})" if is_local and Path(f"{drive}\\", _MARK).is_file() else None


def _reason_on_linux(path: str, root: Path) -> str | None:
    text = (root / "proc/self/mountinfo").read_text(errors="surrogateescape")
    deepest = -1
    reason = None
    for major, top, escaped_point, kind in _LINE.findall(text):
        point = escaped_point.replace("\\040", " ")
        if f"{path}/".startswith(f"{point.rstrip('/')}/") and len(point) >= deepest:
            deepest = len(point)
            reason = _reason_of_mount(kind, point, top)
            is_on_block_device = major != "0"
            if reason is None and is_on_block_device and (root / point[1:] / _MARK).is_file():
                reason = f"{_TEMPORARY} ({point})"
    return reason


def _reason_of_mount(kind: str, point: str, top: str) -> str | None:
    where = f"({kind} at {point})"
    if kind in _MEMORY:
        return f"in memory {where}, which is empty after a reboot"
    if kind in _LAYERS:
        return f"in the layer of a container or of a live image {where}, which is deleted unless a volume is mounted"
    if _EMPTY_DIR in top:
        return f"in an emptyDir (at {point}), which is deleted with its pod"
    return None
