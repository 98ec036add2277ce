"""Runner: runs a program with a deadline, ends it with its whole process group, and always comes back.

A program may print without end, read nothing, ignore signals, or leave a child behind that holds its standard error
open; none of that may hang the caller. So standard input is a file, standard output goes nowhere, of standard error
only the last bytes are kept, and the caller waits for the program itself, never for the end of a pipe.

The program leads a process group of its own (POSIX, setsid), so that a signal reaches what it started: SIGTERM five
seconds before the deadline (10 % of it, if that is less), SIGKILL half a second before it (5 %). Groups that a shell's
job control makes and descendants that call setsid escape; a cgroup, such as systemd's, holds those too. Windows has no
such signal: ``taskkill /t /f`` ends the tree of processes (Microsoft, "taskkill"). What a program leaves running after
it ended by itself is left alone.

`Runner.close`, or the exit of this process, kills the program as well. A SIGKILL of this process does not: the kernel
can tell a child of that only for the one thread that forked it, so what was started lives on, unless a cgroup says
otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import IO, Any

import msgspec

from bridge.system.threads import RunningTime, run_daemon
from bridge.text import one_line

_TAIL_BYTES = 4096
_TAIL_CHARACTERS = 256
_CHUNK_BYTES = 64 * 1024
#: SIGTERM comes this long before the deadline, or this share of it if that is less.
_NOTICE_SECONDS = 5.0
_NOTICE_SHARE = 0.1
#: SIGKILL comes this long before it: on a machine under load, what follows must not make the caller late.
_KILL_SECONDS = 0.5
_KILL_SHARE = 0.05
#: How long a killed program may take to be gone, as a share of its deadline and at most.
_REAP_SHARE = 0.02
_REAP_SECONDS = 1.0
_CLOSE_NOTICE_SECONDS = 0.3
#: How long `close` waits for a program that is just being started, which may hang on a dead file server.
_START_SECONDS = 1.0
_TASKKILL_SECONDS = 5.0
#: For the rest of standard error, after the program ended; a child left behind may hold it open for ever.
_LAST_OUTPUT_SECONDS = 0.2
_SHORTEST_TICK_SECONDS = 0.001
_LONGEST_TICK_SECONDS = 0.05
_CAN_POLL = hasattr(select, "poll")


#: Why a program cannot be started for want of something that comes back by itself; ETXTBSY: a new version of it is
#: just being written.
PASSING_ERRORS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY, errno.EINTR})


class Ending(str, Enum):
    """Why a program is no longer running."""

    ITSELF = "itself"
    DEADLINE = "deadline"
    CLOSED = "closed"


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended."""

    ending: Ending
    exit_code: int | None
    """Its exit code, or minus the number of the signal that ended it (POSIX); None when it could not be killed."""
    error_output: str
    """The last 256 characters that it wrote to standard error, on one line without control characters."""


class Runner:
    """Runs one program at a time; `close` ends it from any thread and lets no other begin."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._program: _Program | None = None
        self._is_closed = False

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline_seconds: float,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        without: Collection[str] = (),
        directory: str | None = None,
    ) -> Finished:
        """Run *argv* without a shell and return how it ended, within *deadline_seconds* in which this process ran.

        It inherits this process's environment but for the names in *without*, and gets *environment* on top. Raises
        OSError when it cannot be started: FileNotFoundError, PermissionError, or for want of processes or memory.
        """
        started = time.monotonic()
        # An agent that stops does not wait for this program; it must not run on beside the next agent's.
        # (`atexit` keeps a slot for ever for each that was registered: 16 bytes a program.)
        at_exit = weakref.finalize(self, self.close)
        try:
            with self._starting:
                if self._is_closed:
                    return Finished(ending=Ending.CLOSED, exit_code=None, error_output="")
                program = self._program = _Program(argv, stdin, _environment(environment or {}, without), directory)
            if self._is_closed:  # `close` did not wait for a start that took too long
                program.end(Ending.CLOSED, notice_seconds=0.0)
            return program.finish(started, deadline_seconds)
        finally:
            self._program = None
            at_exit.detach()

    def close(self) -> None:
        """Kill what runs, with a third of a second's notice (SIGTERM), and start nothing any more."""
        self._is_closed = True
        if self._starting.acquire(timeout=_START_SECONDS):
            program = self._program
            self._starting.release()
            if program is not None:
                program.end(Ending.CLOSED, notice_seconds=_CLOSE_NOTICE_SECONDS)


def find_program(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the path of the program that `Runner.run` would start as *name*; None when there is none."""
    path = (environment or {}).get("PATH")
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) if path is None else path)


class _Program:
    """One program that was started, with its process group and the end of its standard error."""

    def __init__(
        self, argv: Sequence[str], stdin: bytes, environment: Mapping[Any, Any], directory: str | None
    ) -> None:
        self._lock = threading.Lock()
        self._ending: Ending | None = None
        self._is_group_gone = False
        self._tail = b""
        self._is_quiet = False
        self._process = _start(argv, stdin, environment, directory)
        assert self._process.stderr is not None  # noqa: S101 - for mypy: it was asked for
        self._stderr = self._process.stderr
        if not _CAN_POLL:  # Windows: a read ends when whoever holds the other end is gone
            run_daemon("process:stderr", self._read_to_the_end)

    def finish(self, started: float, deadline_seconds: float) -> Finished:
        """Wait for the end, make it come at the deadline, and let go of everything."""
        kill_before = min(_KILL_SECONDS, deadline_seconds * _KILL_SHARE)
        notice = (
            0.0 if sys.platform == "win32" else min(_NOTICE_SECONDS, deadline_seconds * _NOTICE_SHARE) - kill_before
        )
        limit = RunningTime(deadline_seconds - kill_before - (time.monotonic() - started))
        if not self._wait(limit, until_left=notice):
            self.end(Ending.DEADLINE, notice_seconds=limit.left_seconds, pause=self._read)
            self._wait(RunningTime(min(_REAP_SECONDS, deadline_seconds * _REAP_SHARE)))
        rest_until = time.monotonic() + (_LAST_OUTPUT_SECONDS if self._ending is None else 0.0)
        while not self._is_quiet and self._read(max(rest_until - time.monotonic(), 0.0)):
            if time.monotonic() >= rest_until:
                break
        self._let_go()
        return Finished(
            ending=self._ending or Ending.ITSELF,
            exit_code=self._process.returncode,
            error_output=" ".join(one_line(self._tail.decode("utf-8", "replace")).split())[-_TAIL_CHARACTERS:],
        )

    def end(self, ending: Ending, *, notice_seconds: float, pause: Callable[[float], object] = time.sleep) -> None:
        """Ask the process group to end (SIGTERM), and kill what is left of it after the notice; call *pause* between.

        Nothing is done when the program has ended by itself.
        """
        until = time.monotonic() + notice_seconds
        with self._lock:
            if self._ending is None and self._process.poll() is not None:
                return
            self._ending = self._ending or ending
        if sys.platform == "win32":
            _kill_tree(self._process)
            return
        self._signal(signal.SIGTERM)
        while (left := until - time.monotonic()) > 0 and not self._is_over():
            pause(min(left, _LONGEST_TICK_SECONDS))
        self._signal(signal.SIGKILL)

    def _wait(self, limit: RunningTime, *, until_left: float = 0.0) -> bool:
        """Read standard error until the program is gone, or no more than *until_left* of *limit* is left.

        Return whether it is gone.
        """
        tick = _SHORTEST_TICK_SECONDS
        while not self._has_ended():
            wait_seconds = min(limit.next_wait(tick), limit.left_seconds - until_left)
            if wait_seconds <= 0:
                return False
            tick = _SHORTEST_TICK_SECONDS if self._read(wait_seconds) else min(2 * tick, _LONGEST_TICK_SECONDS)
        return True

    def _has_ended(self) -> bool:
        """Return whether the program itself has ended; its group may live on."""
        with self._lock:
            return self._process.poll() is not None

    def _is_over(self) -> bool:
        """Return whether neither the program nor anything of its group is left."""
        return self._has_ended() and not self._signal(0)

    def _signal(self, number: int) -> bool:
        """Send *number* to the process group; return whether anything of it is left.

        A group's number is not given away while it has a member, so it is never used again once it had none.
        """
        with self._lock:
            if not self._is_group_gone:
                try:
                    os.killpg(self._process.pid, number)
                # PermissionError: it became another user (sudo), and there is nothing more that we could do.
                except (ProcessLookupError, PermissionError):
                    self._is_group_gone = True
            return not self._is_group_gone

    def _read(self, seconds: float) -> bool:
        """Wait *seconds* for standard error and keep its end; return whether something came, were it its end."""
        if self._is_quiet or not _CAN_POLL:
            time.sleep(seconds)
            return False
        waiting = select.poll()
        waiting.register(self._stderr, select.POLLIN)
        if not waiting.poll(seconds * 1000):
            return False
        self._read_chunk()
        return True

    def _read_to_the_end(self) -> None:
        with self._stderr, contextlib.suppress(OSError):
            while not self._is_quiet:
                self._read_chunk()

    def _read_chunk(self) -> None:
        chunk = os.read(self._stderr.fileno(), _CHUNK_BYTES)
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        self._is_quiet = not chunk

    def _let_go(self) -> None:
        if _CAN_POLL:
            self._stderr.close()
        if self._process.returncode is None:
            # It was killed and is still there, in a system call that cannot be interrupted. No zombie shall remain.
            with contextlib.suppress(RuntimeError):
                run_daemon("process:reap", self._process.wait)


def _start(
    argv: Sequence[str], stdin: bytes, environment: Mapping[Any, Any], directory: str | None
) -> subprocess.Popen[bytes]:
    """Start *argv*; raise OSError when it cannot be started, or when its exit code would be lost."""
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    elif signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # Inherited from the parent of this process. The kernel then forgets every exit code, and subprocess says 0.
        raise ChildProcessError(errno.ECHILD, "SIGCHLD is ignored, so that its exit code would be lost")
    with _scratch_file() as file:
        file.write(stdin)
        file.seek(0)
        return subprocess.Popen(  # noqa: S603 - the configuration names the program; no shell reads it
            list(argv),
            bufsize=0,
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=environment,  # bytes throughout on POSIX
            start_new_session=True,
            creationflags=flags,
        )


def _scratch_file() -> IO[bytes]:
    """Return a new file without a name: in memory on Linux, since the disk may be full."""
    try:
        return os.fdopen(os.memfd_create("stdin"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


def _environment(added: Mapping[str, str], without: Collection[str]) -> Mapping[Any, Any]:
    """Return this process's environment as it came, in bytes where it is bytes, with *added* in UTF-8."""
    if sys.platform == "win32":
        gone = {name.upper() for name in without}  # names have no case there
        kept = {name: value for name, value in os.environ.items() if name.upper() not in gone}
        return {**kept, **added}
    dropped = {os.fsencode(name) for name in without}
    found = {name: value for name, value in os.environb.items() if name not in dropped}
    return {**found, **{name.encode(): value.encode("utf-8", "replace") for name, value in added.items()}}


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(  # noqa: S603
            ["taskkill", "/t", "/f", "/pid", str(process.pid)],  # noqa: S607
            capture_output=True,
            check=False,
            timeout=_TASKKILL_SECONDS,
        )
    process.kill()
