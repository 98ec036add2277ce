"""Which allocator Python's small objects are from; it is chosen when a process begins.

Python's own gives memory back in pieces of 1 MiB, each only when the last object in it is gone. Of 5,000 connections
that vanish from the portal, the few objects that outlive them, many of them in the free lists of libraries, hold on to
four fifths of it. The C library's gives back every page that is free (malloc_trim(3), which `bridge.portal.memory` has
called).
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "PYTHONMALLOC"


def restart_with_that_of_the_c_library() -> None:
    """Begin this process anew, with the allocator of glibc; return where there is none, or the variable is set already.

    Nothing must have been done yet but to read the command line. The process keeps its number.
    """
    if _VARIABLE in os.environ or sys.flags.ignore_environment or not is_glibc() or not _is_whole_process():
        return
    os.environ[_VARIABLE] = "malloc"
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # the very command that began it
    except OSError:  # it goes on as it is, and holds on to more
        del os.environ[_VARIABLE]


def is_glibc() -> bool:
    """Return whether the C library is glibc."""
    try:
        return sys.platform == "linux" and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (OSError, ValueError):
        return False


def _is_whole_process() -> bool:
    """Return whether Python was started for the command, and not by a program that calls it with other arguments."""
    arguments = sys.argv[1:]
    return bool(sys.executable) and bool(arguments) and sys.orig_argv[-len(arguments) :] == arguments
