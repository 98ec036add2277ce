"""Which of Azure's disks a mount lies on: the temporary one, or the one with the operating system.

Read from sysfs, which a container and a sandboxed unit see as well, by the marks that Microsoft's own udev rules go by
(80-azure-disk.rules of azure-vm-utils): the GUID of the virtual bus, the LUN on the first controller, the model of an
NVMe disk. Then from the links that those rules, the Azure Linux agent's and cloud-init's make below /dev/disk, where
they are to be seen. A partition, a RAID array and a logical volume are followed down to their disks.
"""

from __future__ import annotations

import enum
import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path

from bridge.system.mounts import Mount

_LINKS_OF_TEMPORARY = ("disk/cloud/azure_resource*", "disk/azure/resource*", "disk/azure/local/**")
_LINKS_OF_OS = ("disk/cloud/azure_root*", "disk/azure/root*", "disk/azure/os*")
#: The first SCSI controller of a VM of generation 2.
_FIRST_CONTROLLER = "f8b3781a-1e82-4818-a1c3-63d806ec15bb"
_GENERATION_1_OS = "00000000-0000-"
_GENERATION_1_TEMPORARY = "00000000-0001-"
_NVME_LOCAL = "Microsoft NVMe Direct Disk"
_NVME_REMOTE = "MSFT NVMe Accelerator"
_SCSI_ADDRESS = re.compile(r"\d+:\d+:\d+:(\d+)", re.ASCII)
_MEMORY = re.compile(r"(zram|ram)\d+", re.ASCII)


class AzureDisk(enum.Enum):
    """A disk that Azure gives a VM; null, elsewhere, is a data disk or is not known."""

    OS = "os"
    TEMPORARY = "temporary"
    MEMORY = "memory"
    """No disk at all: a block device in memory, such as zram."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """The block devices that a mount is made of, from the one that is mounted down to the disks."""

    kinds: frozenset[AzureDisk]
    names: frozenset[str]
    """As the kernel calls them: sda1, sda."""


def devices_of(mount: Mount, *, root: Path = Path("/")) -> Devices:
    """Return what *mount* is made of; nothing for one that has no block device. *root* takes the place of "/"."""
    paths: set[Path] = set()
    first = _device(mount, root)
    if first is not None:
        _descend(first, paths)
    names = frozenset(path.name for path in paths)
    kinds = {_kind(path, root) for path in paths}
    if names & _linked(root, _LINKS_OF_TEMPORARY):
        kinds.add(AzureDisk.TEMPORARY)
    if names & _linked(root, _LINKS_OF_OS):
        kinds.add(AzureDisk.OS)
    return Devices(kinds=frozenset(kind for kind in kinds if kind is not None), names=names)


def _device(mount: Mount, root: Path) -> Path | None:
    """Return the directory of the device in sysfs; where sysfs is not to be seen, it still has the name."""
    numbered = root / "sys/dev/block" / mount.number
    if os.path.lexists(numbered):
        return Path(os.path.realpath(numbered))
    if not mount.source.startswith("/dev/"):
        return None
    # btrfs has a number of its own; and /dev/mapper/NAME is a link to the name that the kernel uses.
    node = root / mount.source[1:]
    name = (node.readlink() if node.is_symlink() else node).name
    return Path(os.path.realpath(root / "sys/class/block" / name)) if name else None


def _descend(device: Path, found: set[Path]) -> None:
    if device in found:
        return
    found.add(device)
    if (device / "partition").exists():
        _descend(device.parent, found)
    slaves = device / "slaves"
    for part in sorted(slaves.iterdir()) if slaves.is_dir() else ():
        _descend(Path(os.path.realpath(part)), found)


def _kind(device: Path, root: Path) -> AzureDisk | None:
    if _MEMORY.fullmatch(device.name):
        return AzureDisk.MEMORY
    model = _attribute(device, "model", root)
    if model.startswith(_NVME_LOCAL):
        return AzureDisk.TEMPORARY
    if model.startswith(_NVME_REMOTE):
        return AzureDisk.OS if _attribute(device, "nsid", root) == "1" else None
    return _kind_on_scsi(_attribute(device, "device_id", root).strip("{}").lower(), _lun(device))


def _kind_on_scsi(bus: str, lun: str) -> AzureDisk | None:
    if bus.startswith(_GENERATION_1_OS) or (bus == _FIRST_CONTROLLER and lun == "0"):
        return AzureDisk.OS
    if bus.startswith(_GENERATION_1_TEMPORARY) or (bus == _FIRST_CONTROLLER and lun == "1"):
        return AzureDisk.TEMPORARY
    return None


def _lun(device: Path) -> str:
    addresses = (_SCSI_ADDRESS.fullmatch(parent.name) for parent in device.parents)
    return next((address[1] for address in addresses if address), "")


def _attribute(device: Path, name: str, root: Path) -> str:
    """Return what sysfs says of *device*, or of the nearest device that it hangs on; "" when none says anything."""
    top = Path(os.path.realpath(root / "sys"))
    for directory in (device, *device.parents):
        if directory == top or top not in directory.parents:
            break
        try:
            return (directory / name).read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            continue
    return ""


def _linked(root: Path, patterns: tuple[str, ...]) -> set[str]:
    """Return the names of the devices that the links called *patterns* lead to."""
    devices = root / "dev"
    # Not Path.glob: before 3.13 a directory that may not be listed makes it raise.
    found = (name for pattern in patterns for name in glob.glob(pattern, root_dir=devices, recursive=True))  # noqa: PTH207
    return {(devices / name).readlink().name for name in found if (devices / name).is_symlink()}
