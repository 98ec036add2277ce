"""Takes threads or descriptors away from a process during a test."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

#: No machine has enough memory for this stack size, so each thread start fails.
_STACK_BYTES = 1 << 46


@contextmanager
def no_threads() -> Iterator[None]:
    """Prevent new threads, as a limit of tasks does."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Prevent new descriptors."""
    if sys.platform == "win32":
        pytest.skip("Windows has no limit of descriptors")
    import resource  # noqa: PLC0415

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/dev/fd").iterdir())
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


@contextmanager
def no_descriptors_in(pid: int) -> Iterator[None]:
    """Prevent new descriptors in the process *pid*."""
    if sys.platform != "linux":
        pytest.skip("Only Linux can limit the descriptors of another process.")
    import resource  # noqa: PLC0415

    taken = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    lowest_free = min(set(range(len(taken) + 1)) - taken)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def no_threads_in(pid: int) -> Iterator[None]:
    """Prevent new threads in the process *pid*, by a cgroup, because RLIMIT_NPROC does not limit root."""
    group = next((path / f"test-{pid}" for path in _PID_GROUPS if path.is_dir()), None)
    try:
        assert group is not None
        group.mkdir()
        (group / "pids.max").write_text("1")
        (group / "cgroup.procs").write_text(str(pid))
    except (AssertionError, OSError):
        with suppress(OSError, AttributeError):
            group.rmdir()  # type: ignore[union-attr]
        pytest.skip("Only root can limit the threads of another process, with the cgroup controller pids.")
    try:
        yield
    finally:
        (group / "pids.max").write_text("max")
        (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


_PID_GROUPS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
