"""What differs between operating systems in starting a program, and in ending it with all that it started.

POSIX: the program leads a session of its own (setsid), so one signal reaches its process group. A shell's job control
makes further groups in the same session; on Linux /proc shows those. Windows has no such signal: ``taskkill /t /f``
ends the tree of processes (Microsoft, "taskkill").
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Whether a program can be asked to end before it is killed.
CAN_ASK = sys.platform != "win32"

_KILL_ROUNDS = 3
_STAT_SESSION = 3
_TASKKILL_SECONDS = 5.0


def start(argv: Sequence[str], environment: Mapping[Any, Any], directory: str | None) -> subprocess.Popen[bytes]:
    """Start *argv* in a session of its own, standard input and error on pipes, standard output going nowhere.

    Raises OSError when it cannot be started, or when nobody would learn how it ended.
    """
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    elif signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # Inherited from whoever started this process. The kernel then forgets every exit code, and subprocess says 0.
        raise ChildProcessError(errno.ECHILD, "SIGCHLD is ignored, so that its exit code would be lost")
    return subprocess.Popen(  # noqa: S603 - whoever writes the configuration chooses the program; no shell reads it
        list(argv),
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=directory,
        env=environment,  # bytes throughout on POSIX
        start_new_session=True,
        creationflags=flags,
    )


def environment_of(added: Mapping[str, str], without: Collection[str]) -> Mapping[Any, Any]:
    """Return this process's environment as it came, in bytes where it is bytes, with *added* in UTF-8."""
    if sys.platform == "win32":
        kept = {name: value for name, value in os.environ.items() if name not in without}
        return {**kept, **added}
    dropped = {os.fsencode(name) for name in without}
    found = {name: value for name, value in os.environb.items() if name not in dropped}
    return {**found, **{name.encode(): value.encode("utf-8", "replace") for name, value in added.items()}}


def ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the process group of *process*, which must not have been reaped."""
    if sys.platform != "win32":
        # PermissionError: it became another user (sudo), and there is nothing more that we could do.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether *process* has ended, leaving it a zombie, so that its pid and group stay its own."""
    if sys.platform == "win32" or not hasattr(os, "waitid"):  # macOS before Python 3.13
        return False
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill *process*, which must not have been reaped, and all that belongs to it."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(  # noqa: S603
                ["taskkill", "/t", "/f", "/pid", str(process.pid)],  # noqa: S607
                capture_output=True,
                check=False,
                timeout=_TASKKILL_SECONDS,
            )
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for _ in range(_KILL_ROUNDS):  # whoever forks while it is looked for is found in the next round
        members = list(session(process.pid))
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            break


def session(leader: int) -> Iterator[int]:
    """Yield what lives in the session that *leader* leads, as /proc shows it (proc(5), stat); nothing elsewhere."""
    with contextlib.suppress(OSError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    # After the name in parentheses, which may hold anything: state, parent, group, session.
                    after_name = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                    if int(after_name[_STAT_SESSION]) == leader and after_name[0] != b"Z":
                        yield int(entry.name)
