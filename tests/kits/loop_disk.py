"""An ext4 file system in a file, which root can freeze, thaw, break, and repair."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MIB = 1024 * 1024
_TOOLS = ("mkfs.ext4", "e2fsck", "mount", "umount", "findmnt", "fsfreeze")


class LoopDisk:
    """A file system in *image*, mounted at *path*. It thaws automatically a minute after a freeze."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._image = path.with_name(f"{path.name}.image")
        self._thaw_later: subprocess.Popen[bytes] | None = None
        path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(32 * _MIB)
        self.is_mounted = all(map(shutil.which, _TOOLS)) and _can(["mkfs.ext4", "-q", "-F", self._image])
        self.is_mounted = self.is_mounted and self._mount()

    def _mount(self) -> bool:
        return _can(["mount", "-o", "loop,errors=remount-ro", self._image, self.path])

    def freeze(self) -> bool:
        # A process that hangs on a frozen file system cannot even be killed, so the thaw must not depend on the test.
        self._thaw_later = subprocess.Popen(["sh", "-c", 'sleep 60; fsfreeze -u "$0"', self.path])
        return _can(["fsfreeze", "-f", self.path])

    def thaw(self) -> bool:
        if self._thaw_later is not None:
            self._thaw_later.kill()
            self._thaw_later.wait()
            self._thaw_later = None
        return _can(["fsfreeze", "-u", self.path])

    def remount(self, mode: str) -> None:
        """Remount the file system with *mode* ``ro`` or ``rw``; no file may be open for writing."""
        subprocess.run(["mount", "-o", f"remount,{mode}", self.path], check=True)

    def break_down(self) -> None:
        """Let the kernel find an error, so that it remounts the file system read-only."""
        command: list[str | Path] = ["findmnt", "-no", "SOURCE", self.path]
        device = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()).name
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")

    def repair(self) -> None:
        """Check and mount the file system again, as a reboot does."""
        subprocess.run(["umount", self.path], check=True, timeout=30)
        subprocess.run(["e2fsck", "-fy", self._image], check=False, capture_output=True, timeout=30)
        assert self._mount()

    @contextmanager
    def crash_of_the_host(self) -> Iterator[None]:
        """Discard all unsynced pages at the start of the block. End all programs with open files in the block."""
        synced = self._image.with_suffix(".synced")
        shutil.copyfile(self._image, synced)  # the file contains only the synced pages
        yield
        subprocess.run(["umount", self.path], check=True, timeout=30)
        synced.replace(self._image)
        subprocess.run(["e2fsck", "-fy", self._image], check=False, capture_output=True, timeout=30)
        assert self._mount()

    def unmount(self) -> None:
        if self._thaw_later is not None:
            self.thaw()
        if self.is_mounted:
            subprocess.run(["umount", "-l", self.path], check=True)


def _can(command: list[str | Path]) -> bool:
    return subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 0


@contextmanager
def loop_disk(path: Path) -> Iterator[LoopDisk]:
    """Mount a file system at *path*; skip the test if that is not possible."""
    disk = LoopDisk(path)
    try:
        if not (disk.is_mounted and disk.freeze() and disk.thaw()):
            pytest.skip("Only root can mount and freeze a file system, with mkfs.ext4 and fsfreeze.")
        yield disk
    finally:
        disk.unmount()
