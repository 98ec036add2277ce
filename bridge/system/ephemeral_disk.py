"""Why a directory would not survive, in one sentence: what the agent owes its sinks is only as safe as its disk.

Azure, "Ephemeral OS disks" and "Azure managed disks overview", temporary disk: both are local to the host and come
back empty after a redeploy. A redeploy is one of the very events that the agent announces, and what it saw of one is
told afterwards, from this directory. It is advice: what cannot be found out is no reason, and nothing raises.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path, PureWindowsPath

from bridge.system.azure_disks import AzureDisk, Devices, devices_of
from bridge.system.mounts import LAYERS, MEMORY, Mount, Mounts, read_mounts

#: The Azure agents for Linux and Windows, and Ubuntu's image, put it on the temporary disk.
_MARK = "DATALOSS_WARNING_README.txt"
_EMPTY_DIR = "/volumes/kubernetes.io~empty-dir/"
_DRIVE_LENGTH = len("D:")
_TEMPORARY = "on Azure's temporary disk, which comes back empty after a redeploy, a resize or a deallocation"
_EPHEMERAL_OS = "on an ephemeral OS disk, which a redeploy or a reimage makes anew"


def why_ephemeral(directory: Path, *, os_disk_is_ephemeral: bool | None, root: Path = Path("/")) -> str | None:
    """Return a sentence that says why *directory* would not survive and what to do; null when nothing says so.

    *os_disk_is_ephemeral* is what the instance document says (see `parse_os_disk`), null while it is unknown. Links
    are followed. *root* takes the place of "/", below which /proc, /sys and /dev are read.
    """
    try:
        if sys.platform == "win32":
            drive = PureWindowsPath(os.path.realpath(directory)).drive
            system_drive = os.environ.get("SYSTEMDRIVE", "C:")
            reason = reason_on_windows(drive, is_on_ephemeral_os=_same(drive, system_drive) and os_disk_is_ephemeral)
        else:
            reason = _reason_on_linux(directory, os_disk_is_ephemeral=os_disk_is_ephemeral, root=root)
    except (OSError, ValueError):  # not to be read, or a path that is none
        return None
    if reason is None:
        return None
    sentence = f"{directory} lies {reason}. Set state.directory to a disk that survives a redeploy."
    # A path is bytes to Linux, and a log wants Unicode.
    return sentence.encode("utf-8", "replace").decode()


def parse_os_disk(body: bytes) -> bool | None:
    """Return whether the answer of ``/metadata/instance/compute`` names an ephemeral OS disk; null if it names none.

    ``storageProfile.osDisk.diffDiskSettings.option`` is "Local" for an ephemeral one, and "" or left out for any other.
    """
    try:
        disk = json.loads(body)["storageProfile"]["osDisk"]
        settings = disk.get("diffDiskSettings")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    option = settings.get("option") if isinstance(settings, dict) else None
    return isinstance(option, str) and option.casefold() == "local"


def reason_on_windows(drive: str, *, is_on_ephemeral_os: bool | None, root: Path = Path("/")) -> str | None:
    """Return why what is on *drive*, such as "D:", would not survive; a share is never asked."""
    if len(drive) != _DRIVE_LENGTH:
        return None
    if (root / f"{drive}\\" / _MARK).is_file():
        return f"{_TEMPORARY} ({drive})"
    return f"{_EPHEMERAL_OS} ({drive})" if is_on_ephemeral_os else None


def _same(drive: str, other: str) -> bool:
    return drive.casefold() == other.casefold()


def _reason_on_linux(directory: Path, *, os_disk_is_ephemeral: bool | None, root: Path) -> str | None:
    mounts = read_mounts(root)
    mount = mounts.place(os.path.join(os.getcwd(), directory), root=root)  # noqa: PTH109, PTH118  # a plain text
    if mount is None:
        return None
    if mount.kind in MEMORY:
        return f"in memory ({mount.kind} at {mount.point}), which a reboot empties"
    if mount.kind in LAYERS:
        return (
            f"in the layer of a container or of a live image ({mount.kind} at {mount.point}), "
            "which is gone with it unless a volume is mounted there"
        )
    if _EMPTY_DIR in mount.root:
        return f"in an emptyDir of its pod (at {mount.point}), which is gone with the pod"
    return _reason_of_device(mount, mounts, os_disk_is_ephemeral=os_disk_is_ephemeral, root=root)


def _reason_of_device(mount: Mount, mounts: Mounts, *, os_disk_is_ephemeral: bool | None, root: Path) -> str | None:
    devices = devices_of(mount, root=root)
    if AzureDisk.MEMORY in devices.kinds:
        return f"in memory (a disk made of memory at {mount.point}), which a reboot empties"
    if AzureDisk.TEMPORARY in devices.kinds or _is_marked(mount, mounts, root):
        return f"{_TEMPORARY} ({mount.point})"
    if os_disk_is_ephemeral and _is_os_disk(mount, devices, mounts, root):
        return f"{_EPHEMERAL_OS} ({mount.point})"
    return None


def _is_marked(mount: Mount, mounts: Mounts, root: Path) -> bool:
    """Return whether the warning lies at the mount's root, or at the file system's own where that is mounted too."""
    tops = [mount, *(other for other in mounts.all if other.number == mount.number and other.root == "/")]
    return any((root / top.point[1:] / _MARK).is_file() for top in tops if mounts.holding(top.point) == top)


def _is_os_disk(mount: Mount, devices: Devices, mounts: Mounts, root: Path) -> bool:
    top = mounts.holding("/")
    if AzureDisk.OS in devices.kinds:
        return True
    # Where nothing marks the disk: the one that "/" is on. In a container "/" is on none.
    return top is not None and (mount.number == top.number or bool(devices.names & devices_of(top, root=root).names))
