"""An argv with a deadline and its whole process group: what runs other people's programs, and always comes back.

A program may print without end, read nothing, ignore signals, or leave a child behind that holds its pipes open; none
of that may hang the caller. So the pipes are served by two threads of their own that can be told to stop, only the last
bytes of standard error are kept, standard output goes nowhere, and the caller waits for the program itself, never for
the end of a pipe.

The program gets a session of its own (POSIX, setsid), so that a signal reaches everything it started: SIGTERM to its
process group five seconds before the deadline (10 % of it, if that is less), SIGKILL half a second before it (5 %) to
the whole session, which on Linux includes groups that a shell's job control made. A descendant that calls setsid itself
escapes; a cgroup, such as systemd's, holds that too. What a program leaves running after it ended by itself is left
alone.

Whoever is asked to end it (`Runner.close`, or the exit of this process) kills it as well. A SIGKILL of this process
does not: the kernel can tell a child of that only for the one thread that forked it, so what was started lives on,
unless a cgroup says otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from bridge.system.process_group import CAN_ASK, ask_to_end, environment_of, has_ended, kill, session, start
from bridge.text import one_line

_TAIL_BYTES = 4096
_TAIL_CHARACTERS = 256
_CHUNK_BYTES = 64 * 1024
_PIPE_BUF = getattr(select, "PIPE_BUF", 512)
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
#: For the rest of standard error, after the program ended; a child left behind may hold it open for ever.
_LAST_OUTPUT_SECONDS = 0.2
_SHORTEST_LOOK_SECONDS = 0.001
_LONGEST_LOOK_SECONDS = 0.05
_CAN_POLL = hasattr(select, "poll")


class Ending(str, Enum):
    """Why a program is no longer running."""

    ITSELF = "itself"
    DEADLINE = "deadline"
    CLOSED = "closed"


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended."""

    ending: Ending
    exit_code: int | None
    """Its exit code, or minus the number of the signal that ended it (POSIX); null when it could not be killed."""
    error_output: str
    """The last 256 characters that it wrote to standard error, on one line without control characters."""


class Runner:
    """Runs one program at a time; `close` ends it from any thread and lets no other begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run: _Run | None = None
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
        """Run *argv* without a shell and return how it ended, within *deadline_seconds*.

        It inherits this process's environment but for the names in *without*, and gets *environment* on top. Raises
        OSError when it cannot be started: FileNotFoundError, PermissionError, or for want of processes or memory.
        """
        started = time.monotonic()
        if self._is_closed:
            return Finished(ending=Ending.CLOSED, exit_code=None, error_output="")
        run = _Run(argv, stdin, environment=environment_of(environment or {}, without), directory=directory)
        with self._lock:
            self._run = run
        # An agent that stops does not wait for this program; it must not run on beside the next agent's.
        # (`atexit` keeps a slot for ever for each that was registered: 16 bytes a program.)
        at_exit = weakref.finalize(run, self.close)
        try:
            if self._is_closed:  # while it was being started, which takes its time on a dead file server
                run.end(Ending.CLOSED, notice_seconds=0.0)
            return run.finish(started, deadline_seconds)
        finally:
            at_exit.detach()
            with self._lock:
                self._run = None

    def close(self) -> None:
        """Kill what runs, with a third of a second's notice (SIGTERM), and start nothing any more."""
        with self._lock:
            self._is_closed = True
            run = self._run
        if run is not None:
            run.end(Ending.CLOSED, notice_seconds=_CLOSE_NOTICE_SECONDS)


def find_program(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the path of the program that `Runner.run` would start as *name*; null when there is none."""
    path = (environment or {}).get("PATH")
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) if path is None else path)


class _Run:
    """One program that was started, and the two threads that serve its pipes."""

    def __init__(
        self,
        argv: Sequence[str],
        stdin: bytes,
        *,
        environment: Mapping[Any, Any],
        directory: str | None,
    ) -> None:
        self._lock = threading.Lock()  # between reaping and killing: a reaped pid may be somebody else's
        self._changed = threading.Event()
        self._quiet = threading.Event()
        self._killed = threading.Event()
        self._ending: Ending | None = None
        self._tail = b""
        self._stop_reading, self._stop_writing = os.pipe()
        try:
            self._process = start(argv, environment, directory)
        except BaseException:
            os.close(self._stop_reading)
            os.close(self._stop_writing)
            raise
        self._threads = [
            threading.Thread(target=self._feed, args=(stdin,), name="process:stdin", daemon=True),
            threading.Thread(target=self._drain, name="process:stderr", daemon=True),
        ]
        self._serve()

    def _serve(self) -> None:
        started = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
        except RuntimeError as error:  # no thread to be had: nothing may run that nobody watches
            self.end(Ending.CLOSED, notice_seconds=0.0)
            self._wait(time.monotonic() + _REAP_SECONDS)
            self._threads = started
            self._let_go()
            raise BlockingIOError(errno.EAGAIN, str(error)) from error

    def finish(self, started: float, deadline_seconds: float) -> Finished:
        """Wait for the end, make it come at the deadline, and let go of everything."""
        kill_at = started + deadline_seconds - min(_KILL_SECONDS, deadline_seconds * _KILL_SHARE)
        ask_at = started + deadline_seconds - min(_NOTICE_SECONDS, deadline_seconds * _NOTICE_SHARE)
        try:
            if not self._wait(ask_at if CAN_ASK else kill_at):
                self.end(Ending.DEADLINE, notice_seconds=kill_at - time.monotonic())
                self._wait(time.monotonic() + min(_REAP_SECONDS, deadline_seconds * _REAP_SHARE))
            self._quiet.wait(_LAST_OUTPUT_SECONDS if self._ending is None else 0.0)
        finally:
            self._let_go()
        return Finished(
            ending=self._ending or Ending.ITSELF,
            exit_code=self._process.returncode,
            error_output=_tail_line(self._tail),
        )

    def end(self, ending: Ending, *, notice_seconds: float) -> None:
        """Ask the process group to end (SIGTERM), then kill the session; returns once that is done."""
        until = time.monotonic() + notice_seconds
        if not self._signal(ending, ask_to_end):
            return
        while not self._is_over() and (left := until - time.monotonic()) > 0:
            self._killed.wait(min(left, _LONGEST_LOOK_SECONDS))
        self._signal(ending, kill)
        self._killed.set()
        self._changed.set()

    def _signal(self, ending: Ending, send: Callable[[subprocess.Popen[bytes]], None]) -> bool:
        """Call *send* unless the program has ended by itself; return whether it was called."""
        with self._lock:
            if self._process.returncode is not None or (self._ending is None and self._process.poll() is not None):
                return False
            self._ending = self._ending or ending
            send(self._process)
            return True

    def _is_over(self) -> bool:
        """Return whether nothing is left to be killed, as far as can be seen without reaping the program."""
        if self._killed.is_set():
            return True
        if not self._quiet.is_set() or not has_ended(self._process):
            return False
        return next(session(self._process.pid), None) is None

    def _wait(self, until: float) -> bool:
        """Return whether the program is gone, at *until* at the latest.

        Between the notice and the kill it is left a zombie: its pid keeps the group's number from being given away.
        """
        look_seconds = _SHORTEST_LOOK_SECONDS
        while True:
            with self._lock:
                if (self._ending is None or self._killed.is_set()) and self._process.poll() is not None:
                    return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            if self._changed.wait(min(look_seconds, left)):
                self._changed.clear()
                look_seconds = _SHORTEST_LOOK_SECONDS
            look_seconds = min(2 * look_seconds, _LONGEST_LOOK_SECONDS)

    def _let_go(self) -> None:
        os.close(self._stop_writing)
        if _CAN_POLL:
            for thread in self._threads:
                thread.join()
            for stream in (self._process.stdin, self._process.stderr):
                with contextlib.suppress(OSError):
                    stream.close() if stream else None
        os.close(self._stop_reading)
        if self._process.returncode is None:
            # It was killed and is still there, in a system call that cannot be interrupted. No zombie shall remain.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._process.wait, name="process:reap", daemon=True).start()

    def _feed(self, stdin: bytes) -> None:
        left = memoryview(stdin)
        assert self._process.stdin is not None  # noqa: S101 - for mypy: it was asked for
        descriptor = self._process.stdin.fileno()
        with contextlib.suppress(OSError):  # a program need not read
            while left and self._is_ready(descriptor, writing=True):
                left = left[os.write(descriptor, left[:_PIPE_BUF]) :]
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _drain(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - likewise
        descriptor = self._process.stderr.fileno()
        with contextlib.suppress(OSError):
            while self._is_ready(descriptor, writing=False) and (chunk := os.read(descriptor, _CHUNK_BYTES)):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        self._process.stderr.close()
        self._quiet.set()
        self._changed.set()

    def _is_ready(self, descriptor: int, *, writing: bool) -> bool:
        """Wait until *descriptor* can be used without blocking; return False once the run is over."""
        if not _CAN_POLL:
            return True  # Windows: the read or write ends when whoever holds the other end is gone
        waiting = select.poll()
        waiting.register(descriptor, select.POLLOUT if writing else select.POLLIN)
        waiting.register(self._stop_reading, select.POLLIN)
        return all(found != self._stop_reading for found, _ in waiting.poll())


def _tail_line(output: bytes) -> str:
    return " ".join(one_line(output.decode("utf-8", "replace")).split())[-_TAIL_CHARACTERS:]
