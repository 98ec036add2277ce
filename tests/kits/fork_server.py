"""Starts the command line by forking a process with all imports, which saves two thirds of the start time.

Each test still gets its own process with its own environment, directory, descriptors, signals, and exit code. The
process runs `bridge` like `python -m bridge`. Each set of the variables that Python reads at start (PYTHON*, the
locale, the time zone) has its own server. Tests of the start itself start the program directly: see
tests/e2e/test_demo.py, tests/docs, and tests/packaging. With COLD_STARTS=1, or without fork, all processes start
directly.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

_HEADER = struct.Struct("!I")
_REPORT = struct.Struct("!i")
_READ_AT_START = ("PYTHON", "LC_", "LANG", "TZ")
#: The modules that an agent with a webhook, `status`, `approve`, and `decide` import.
_IMPORTED = (
    "bridge.cli.commands",
    "bridge.cli.approve",
    "bridge.cli.check_config.report",
    "bridge.cli.decide",
    "bridge.cli.events",
    "bridge.cli.outbox",
    "bridge.cli.run",
    "bridge.cli.status",
    "sinks.command",
    "sinks.stdout",
    "sinks.webhook.sink",
)


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use, for a process whose parent is the server."""

    def __init__(self, report: int) -> None:
        self.returncode: int | None = None
        self._report = report
        self.pid = self._read()

    def _read(self) -> int:
        return int(_REPORT.unpack(os.read(self._report, _REPORT.size))[0])

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises TimeoutExpired after *timeout* seconds."""
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"the forked process {self.pid}", timeout or 0.0)
            self.returncode = self._read()
            os.close(self._report)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the signal *number* unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


#: A process of the command, forked or started directly.
Process = ForkedProcess | subprocess.Popen  # type: ignore[type-arg]


class _Server:
    """The forking process for one set of the variables that Python reads at start."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._control, its_end = socket.socketpair()
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(its_end.fileno())], env=dict(env), pass_fds=[its_end.fileno()]
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._control.close()
        self._process.wait()

    def start(self, request: Mapping[str, Any], descriptors: list[int]) -> ForkedProcess:
        text = json.dumps(request).encode()
        report, its_end = os.pipe()
        try:
            socket.send_fds(self._control, [_HEADER.pack(len(text))], [*descriptors, its_end])
            self._control.sendall(text)
        finally:
            os.close(its_end)
        return ForkedProcess(report)


_lock = threading.Lock()
_servers: dict[tuple[tuple[str, str], ...], _Server] = {}


def start(
    *arguments: object,
    env: Mapping[str, str],
    cwd: Path,
    stdout: IO[Any] | int,
    stderr: IO[Any] | int,
    stdin: IO[Any] | int | None = None,
) -> Process:
    """Start the command with *arguments*. Without *stdin*, its standard input is empty."""
    words = list(map(str, arguments))
    with ExitStack() as stack:
        stdin = stack.enter_context(open(os.devnull, "rb")) if stdin is None else stdin  # noqa: PTH123  # no Path
        if not hasattr(os, "fork") or os.environ.get("COLD_STARTS"):
            command = [sys.executable, "-m", "bridge", *words]
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=dict(env), cwd=cwd)
        key = tuple(sorted((name, value) for name, value in env.items() if name.startswith(_READ_AT_START)))
        descriptors = [each if isinstance(each, int) else each.fileno() for each in (stdin, stdout, stderr)]
        with _lock:
            if key not in _servers:
                _servers[key] = _Server(env)
            os.umask(umask := os.umask(0))
            request = {"arguments": words, "env": dict(env), "cwd": str(cwd), "umask": umask}
            return _servers[key].start(request, descriptors)


def call(
    *arguments: object, env: Mapping[str, str], cwd: Path, stdin: bytes = b"", timeout_seconds: float = 60
) -> tuple[int, str, str]:
    """Run the command, and return (exit code, standard output, standard error)."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = start(*arguments, env=env, cwd=cwd, stdin=given, stdout=out, stderr=err)
        try:
            code = process.wait(timeout_seconds)
        finally:
            process.kill()
        for each in (out, err):
            each.seek(0)
        return code, out.read().decode(), err.read().decode()


# The server.


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork for each request until the tests end. Return the request in the forked process."""
    while True:
        header, descriptors, _, _ = socket.recv_fds(control, _HEADER.size, 4)
        with suppress(ChildProcessError):  # no child
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not header:
            os._exit(0)
        text = b""
        while len(text) < _HEADER.unpack(header)[0]:
            text += control.recv(_HEADER.unpack(header)[0] - len(text))
        if os.fork():
            for each in descriptors:
                os.close(each)
            continue
        control.close()
        *streams, report = descriptors
        if child := os.fork():
            for each in streams:  # otherwise, readers also wait for the end of this process
                os.close(each)
            os.write(report, _REPORT.pack(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
            os._exit(0)
        for number, each in enumerate(streams):
            os.dup2(each, number)
            os.close(each)
        request: dict[str, Any] = json.loads(text)
        return {**request, "report": report}


def _become(request: Mapping[str, Any]) -> None:
    """Restore the state of a freshly started Python process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.argv[1:] = request["arguments"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        stream = open(number, old.mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.write(request["report"], _REPORT.pack(os.getpid()))
    os.close(request["report"])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for each in _IMPORTED:
        importlib.import_module(each)
    gc.collect()
    gc.freeze()  # a collection writes to every page, which copies it
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
    runpy.run_module("bridge", run_name="__main__", alter_sys=True)
