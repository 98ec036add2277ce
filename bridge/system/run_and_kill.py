"""Runs a program, and kills the program and its child processes at a deadline.

A program can print without end, read no input, ignore signals, or leave a child that keeps its standard error open.
Such a program must not block the agent. Standard input is therefore a file, standard output is discarded, and a thread
reads standard error and keeps its last bytes. The agent waits for the exit of the program, and not for the end of its
output.

On POSIX, the program leads its own process group. The group gets SIGTERM five seconds before the deadline, and SIGKILL
half a second before the deadline. If the deadline is short, these times are 10 % and 5 % of the deadline. A child that
calls setsid leaves the group, but the cgroup of the systemd unit still contains it. On Windows, ``taskkill /t /f`` ends
the process tree (Microsoft, "taskkill").
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import wait
from enum import Enum
from typing import IO, Any

import msgspec

from bridge.system.threads import RunningTime, run_daemon
from bridge.text import one_line

_TAIL_BYTES = 4096
_TAIL_CHARACTERS = 256
_CHUNK_BYTES = 64 * 1024
_NOTICE_SECONDS, _NOTICE_SHARE = 5.0, 0.1
_KILL_SECONDS, _KILL_SHARE = 0.5, 0.05
#: The time for a killed program to end.
_REAP_SECONDS, _REAP_SHARE = 1.0, 0.02
_CLOSE_NOTICE_SECONDS = 0.3
#: `close` waits this long for a program that starts, because the start may hang on a dead file server.
_START_SECONDS = 1.0
_TASKKILL_SECONDS = 5.0
#: The time to read the rest of standard error after the end of the program.
_LAST_OUTPUT_SECONDS = 0.2
_POLL_SECONDS = 0.02

#: Temporary reasons why a program cannot be started. ETXTBSY: a new version of the program is being written.
PASSING_ERRORS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY, errno.EINTR})


class Ending(str, Enum):
    """The reason why a program is no longer running."""

    ITSELF = "itself"
    DEADLINE = "deadline"
    CLOSED = "closed"


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a program."""

    ending: Ending
    exit_code: int | None
    """The exit code, or minus the number of the signal that ended it; None if it is still running."""
    error_output: str
    """The last 256 characters of standard error, on one line without control characters."""


class Runner:
    """Runs one program at a time. Any thread can call `close`, which prevents further starts."""

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
        """Run *argv* without a shell for up to *deadline_seconds*, not counting VM freezes.

        The program inherits this process's environment variables, except those in *without*, and also receives
        *environment*. Raise OSError if the program cannot start.
        """
        started = time.monotonic()
        # Without this, the program could still run when the next agent starts its own programs.
        at_exit = weakref.finalize(self, self.close)
        try:
            with self._starting:
                if self._is_closed:
                    return Finished(ending=Ending.CLOSED, exit_code=None, error_output="")
                program = self._program = _Program(argv, stdin, _environment(environment or {}, without), directory)
            if self._is_closed:  # `close` did not wait for a slow start
                program.end(Ending.CLOSED, notice_seconds=0.0)
            return program.finish(started, deadline_seconds)
        finally:
            self._program = None
            at_exit.detach()

    def close(self) -> None:
        """Send SIGTERM to the program, kill it after 0.3 s, and do not start any more programs."""
        self._is_closed = True
        if self._starting.acquire(timeout=_START_SECONDS):
            program = self._program
            self._starting.release()
            if program is not None:
                program.end(Ending.CLOSED, notice_seconds=_CLOSE_NOTICE_SECONDS)


def find_program(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the path of the program that `Runner.run` starts as *name*, or None."""
    path = (environment or {}).get("PATH")
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) if path is None else path)


class _Program:
    def __init__(
        self, argv: Sequence[str], stdin: bytes, environment: Mapping[Any, Any], directory: str | None
    ) -> None:
        self._lock = threading.Lock()
        self._ending: Ending | None = None
        self._is_group_gone = False
        self._tail = b""
        self._process = _start(argv, stdin, environment, directory)
        try:
            self._reading = run_daemon("process:stderr", self._read_to_the_end)
        except RuntimeError as error:  # no thread is available
            self.end(Ending.CLOSED, notice_seconds=0.0)
            raise BlockingIOError(errno.EAGAIN, str(error)) from error

    def finish(self, started: float, deadline_seconds: float) -> Finished:
        kill_before = min(_KILL_SECONDS, deadline_seconds * _KILL_SHARE)
        notice = min(_NOTICE_SECONDS, deadline_seconds * _NOTICE_SHARE) - kill_before
        limit = RunningTime(deadline_seconds - kill_before - (time.monotonic() - started))
        if not self._wait(limit, until_left=0.0 if sys.platform == "win32" else notice):
            self.end(Ending.DEADLINE, notice_seconds=limit.left_seconds)
            self._wait(RunningTime(min(_REAP_SECONDS, deadline_seconds * _REAP_SHARE)))
        wait([self._reading], _LAST_OUTPUT_SECONDS if self._ending is None else 0.0)
        if self._process.returncode is None:
            # The program is in a system call that SIGKILL cannot interrupt. Wait on a thread, to leave no zombie.
            with contextlib.suppress(RuntimeError):
                run_daemon("process:reap", self._process.wait)
        return Finished(
            ending=self._ending or Ending.ITSELF,
            exit_code=self._process.returncode,
            error_output=" ".join(one_line(self._tail.decode("utf-8", "replace")).split())[-_TAIL_CHARACTERS:],
        )

    def end(self, ending: Ending, *, notice_seconds: float) -> None:
        """Send SIGTERM to the process group, and SIGKILL after *notice_seconds*."""
        until = time.monotonic() + notice_seconds
        with self._lock:
            if self._ending is None and self._process.poll() is not None:
                return
            self._ending = self._ending or ending
        if sys.platform == "win32":
            _kill_tree(self._process)
            return
        self._signal(signal.SIGTERM)
        while (left := until - time.monotonic()) > 0 and not (self._has_ended() and not self._signal(0)):
            time.sleep(min(left, _POLL_SECONDS))
        self._signal(signal.SIGKILL)

    def _wait(self, limit: RunningTime, *, until_left: float = 0.0) -> bool:
        while not self._has_ended():
            seconds = min(limit.next_wait(), limit.left_seconds - until_left)
            if seconds <= 0:
                return False
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        return True

    def _has_ended(self) -> bool:
        with self._lock:
            return self._process.poll() is not None

    def _signal(self, number: int) -> bool:
        """Send a signal, and return whether the group has a member."""
        with self._lock:
            if not self._is_group_gone:
                try:
                    os.killpg(self._process.pid, number)
                except (ProcessLookupError, PermissionError):  # PermissionError: sudo changed the user of the program
                    self._is_group_gone = True
            return not self._is_group_gone

    def _read_to_the_end(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - for mypy: it is a pipe
        with self._process.stderr as stderr, contextlib.suppress(OSError):
            while chunk := os.read(stderr.fileno(), _CHUNK_BYTES):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]


def _start(
    argv: Sequence[str], stdin: bytes, environment: Mapping[Any, Any], directory: str | None
) -> subprocess.Popen[bytes]:
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    elif signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # The parent process can set this. The kernel then discards exit codes, and subprocess would report 0.
        raise ChildProcessError(errno.ECHILD, "SIGCHLD is ignored, so the exit code of the process would be lost")
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
            env=environment,  # bytes on POSIX
            start_new_session=True,
            creationflags=flags,
        )


def _scratch_file() -> IO[bytes]:
    """Return a temporary file, on Linux in memory, because the disk might be full."""
    try:
        return os.fdopen(os.memfd_create("stdin"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


def _environment(added: Mapping[str, str], without: Collection[str]) -> Mapping[Any, Any]:
    if sys.platform == "win32":
        dropped_names = {name.upper() for name in without}  # names are case-insensitive on Windows
        return {**{name: value for name, value in os.environ.items() if name.upper() not in dropped_names}, **added}
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
