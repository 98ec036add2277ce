"""DirectoryWatch: Linux sends a signal when something in the state directory is made, deleted, renamed or touched.

A look at a file each second costs an idle agent a tenth of its CPU; the kernel's own word for it costs nothing. It is
dnotify (fcntl(2), "File and directory change notification"): older than inotify, and all that is needed here, without
ctypes, whose import alone takes 0.3 MiB. Where there is none (another system, a sandbox, a kernel built without it)
`is_on` stays False, and the caller looks at the files itself.
"""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform == "linux":
    import fcntl

_F_SETOWN_EX = 15
_F_OWNER_TID = 0


class DirectoryWatch:
    """Has the kernel send SIGIO to the main thread; the handler of that signal is the caller's.

    What is written to a file that is there brings none: the outbox would wake the agent with each commit.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: list[int] = []

    @property
    def is_on(self) -> bool:
        """Whether the signal comes; else the caller has to look."""
        return bool(self._descriptors)

    def renew(self) -> bool:
        """Watch the directory that is at the path now; return whether that is another than before, and watched."""
        if sys.platform != "linux":
            return False
        try:
            found = os.stat(self._directory)  # noqa: PTH116  # compared with the open one
            if self._descriptors and os.path.samestat(os.fstat(self._descriptors[0]), found):
                return False
            self.close()
            inside = fcntl.DN_CREATE | fcntl.DN_DELETE | fcntl.DN_RENAME | fcntl.DN_ATTRIB
            self._descriptors.append(_watched(self._directory, inside))
        except OSError:
            return False
        with suppress(OSError):  # that the directory itself is moved shows in the one above, if that may be read
            self._descriptors.append(_watched(self._directory.parent, fcntl.DN_RENAME))
        return True

    def close(self) -> None:
        """Have no more signals sent; closing twice is fine."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)


def _watched(directory: Path, changes: int) -> int:
    """Return a descriptor of *directory*; until it is closed, each of *changes* in it brings a SIGIO."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if sys.platform == "linux":
            # The main thread alone, whose id is the process': another one's calls to the disk would be broken off.
            fcntl.fcntl(descriptor, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, os.getpid()))
            fcntl.fcntl(descriptor, fcntl.F_NOTIFY, changes | fcntl.DN_MULTISHOT)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
