"""A disk of a few MiB that can be filled and freed. Only root can mount it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1024 * 1024


class SmallDisk:
    """A disk of a few MiB that can be filled and freed."""

    def __init__(self, path: Path, mib: float) -> None:
        self.path = path
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mib * 1024:.0f}k,mode=0755", "tmpfs", str(path)]
        self.is_mounted = shutil.which("mount") is not None and subprocess.run(mount, check=False).returncode == 0

    def fill(self) -> None:
        """Use all free space."""
        with (self.path / "ballast").open("ab", buffering=0) as ballast:
            for size in (MIB, 4096, 1):
                try:
                    while True:
                        ballast.write(b"\0" * size)
                except OSError:
                    continue

    def free(self) -> None:
        """Free the space that `fill` used."""
        (self.path / "ballast").unlink()

    def unmount(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)


@contextmanager
def small_disk(path: Path, mib: float) -> Iterator[SmallDisk]:
    """Mount a disk of *mib* MiB at *path*, or skip the test if that is not possible."""
    disk = SmallDisk(path, mib)
    if not disk.is_mounted:
        pytest.skip("A small disk can only be mounted by root.")
    try:
        yield disk
    finally:
        disk.unmount()
