"""Benchmarks of the documented figures, each with a limit.

    pytest -m bench -s tests/bench        all benchmarks, about ten minutes
    BENCH=short pytest -m bench ...       the short form, about four minutes
    BENCH_JSON=docs/figures pytest ...    also writes the values of the charts in the documentation

Most benchmarks measure the wheel ($WHEEL, or a new build) in a fresh venv, compiled, in processes without PYTHON*
variables. The metadata service runs in a separate process and does not count. Most limits are ratios within one run,
medians of several blocks, or sizes, because absolute times depend on the machine.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_CHECKOUT = _HERE.parents[1]
_NOT_FOR_AGENTS = ("PYTHON", "SCHEDULED_EVENTS_BRIDGE_", "STATE_DIRECTORY", "FORCE_COLOR", "CLICOLOR_FORCE")
_POLL_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
_END_SECONDS = 20.0
_POLL_FOR_SECONDS = 0.05
_CPUCLOCK_SCHED = 2

_figures: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print each figure on one line."""
    if _figures:
        terminalreporter.section("figures")
        for line in _figures:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def chart() -> Callable[..., None]:
    """Return a function that writes the values of a chart row to docs/figures/NAME.json if $BENCH_JSON is set."""

    def write(name: str, row_name: str, **values: float) -> None:
        if not (folder := os.environ.get("BENCH_JSON")):
            return
        file = Path(folder, f"{name}.json")
        figures = json.loads(file.read_text(encoding="utf-8"))
        [row] = [row for row in figures["rows"] if row["name"] == row_name]
        for key, value in values.items():
            shown = "" if key == "value" else key
            assert shown in row["values"], shown
            row["values"][shown] = float(f"{value:.3g}")
        row["date"], row["machine"] = time.strftime("%Y-%m-%d", time.gmtime()), _machine()
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

    return write


def _machine() -> str:
    system = platform.freedesktop_os_release()["PRETTY_NAME"].partition(" (")[0].replace("GNU/Linux ", "")
    return f"{os.cpu_count()} cores, {system}, Python {sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="session")
def figure() -> Callable[[str], None]:
    """Return a function that records a figure for the summary."""
    return lambda text: _figures.append(f"bench: {text}")


@pytest.fixture(scope="session")
def is_short() -> bool:
    """Return whether the short form is selected."""
    return os.environ.get("BENCH") == "short"


@pytest.fixture(scope="session")
def env() -> dict[str, str]:
    """Return the environment of the measured processes."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_AGENTS)}


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Path:
    """Return the bin directory of a venv with the compiled wheel."""
    directory = tmp_path_factory.mktemp("venv")
    venv.create(directory, with_pip=True, symlinks=True)
    python = directory / "bin" / "python"
    wheel = os.environ.get("WHEEL") or str(_built_wheel(python, tmp_path_factory.mktemp("wheel"), env))
    _call([python, "-m", "pip", "install", "--quiet", "--compile", wheel], env)
    return python.parent


def _built_wheel(python: Path, directory: Path, env: dict[str, str]) -> Path:
    if not (_CHECKOUT / "bridge").is_dir():
        pytest.fail("WHEEL is not set, and the source to build a wheel is missing.")
    _call([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, _CHECKOUT], env)
    (wheel,) = directory.glob("*.whl")
    return wheel


def _call(argv: list[str | Path], env: dict[str, str]) -> None:
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, argv))} ended with {done.returncode}:\n{done.stderr}")


@dataclass(frozen=True)
class Measured:
    """Reads the CPU time, memory, and I/O of a process."""

    process: subprocess.Popen[bytes]

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads, including ended threads, from clock_getcpuclockid(3)."""
        return time.clock_gettime_ns((~self.process.pid << 3) | _CPUCLOCK_SCHED) / 1e9

    def memory_bytes(self, name: str) -> int:
        """Return VmRSS or VmHWM of /proc/PID/status."""
        for line in self._proc("status").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise LookupError(f"/proc/{self.process.pid}/status has no {name}.")

    def write_calls(self) -> int:
        """Return the number of write(2) and similar calls, without calls that send on sockets."""
        return self._io("syscw")

    def disk_bytes(self) -> int:
        """Return the number of bytes that the process caused to be written to disk."""
        return self._io("write_bytes")

    def _io(self, name: str) -> int:
        fields = dict(line.split(": ") for line in self._proc("io").splitlines())
        return int(fields[name])

    def _proc(self, name: str) -> str:
        return Path(f"/proc/{self.process.pid}/{name}").read_text(encoding="ascii")


@dataclass(frozen=True)
class Documents:
    """A running document_server.py with its simulated VMs."""

    process: subprocess.Popen[bytes]
    ports: list[int]

    @property
    def endpoints(self) -> list[str]:
        """Return the base URL of each machine."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def urls(self) -> list[str]:
        """Return the URL of each machine's document."""
        return [endpoint + _POLL_PATH for endpoint in self.endpoints]

    def polls(self) -> list[int]:
        """Return the number of polls of each machine."""
        with urllib.request.urlopen(f"{self.endpoints[0]}/polls", timeout=10) as answer:
            counts = json.load(answer)
        return [counts[str(port)] for port in self.ports]

    def wait_for_polls(self, least: int, *, within_seconds: float) -> None:
        """Wait until every machine has been polled *least* times."""
        deadline = time.monotonic() + within_seconds
        while min(self.polls()) < least:
            if time.monotonic() > deadline:
                pytest.fail(f"After {within_seconds:g} s the polls of the machines are {self.polls()}, not {least}.")
            time.sleep(_POLL_FOR_SECONDS)

    def changes(self) -> Iterator[dict[str, Any]]:
        """Yield the output line for each served document. Block until the next line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Stop the processes of a test at its end, the document server last."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in reversed(started):
        process.send_signal(signal.SIGTERM)
    for process in reversed(started):
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def serve(processes: list[subprocess.Popen[bytes]], env: dict[str, str]) -> Callable[..., Documents]:
    """Return a function that starts a document server with the options of document_server.py."""

    def start(**options: int) -> Documents:
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        argv = [sys.executable, str(_HERE / "document_server.py"), *words]
        process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        return Documents(process, json.loads(process.stdout.readline()))

    return start


@pytest.fixture
def start_agent(
    scripts: Path, processes: list[subprocess.Popen[bytes]], env: dict[str, str], tmp_path: Path
) -> Callable[..., Measured]:
    """Return a function that runs the installed agent in tmp_path/*home*, with config.toml, state/, and agent.log."""

    def start(home: str, endpoint: str, *, sinks: str, poll_interval_seconds: float, stdout: Any) -> Measured:
        directory = tmp_path / home
        directory.mkdir()
        config = directory / "config.toml"
        config.write_text(
            f'[imds]\nendpoint = "{endpoint}"\npoll_interval_seconds = {poll_interval_seconds}\n'
            f'[state]\ndirectory = "{directory / "state"}"\n[status]\nlisten = "127.0.0.1:0"\n{sinks}\n'
        )
        with (directory / "agent.log").open("wb") as log:
            process = subprocess.Popen(
                [scripts / "scheduled-events-bridge", "run", "--config", config],
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=log,
            )
        processes.append(process)
        return Measured(process)

    return start


@pytest.fixture
def start_bare_loop(
    scripts: Path, processes: list[subprocess.Popen[bytes]], env: dict[str, str]
) -> Callable[[str, float], Measured]:
    """Return a function that starts a bare loop in the agent's venv."""

    def start(url: str, interval_seconds: float) -> Measured:
        process = subprocess.Popen(
            [scripts / "python", _HERE / "bare_loop.py", url, str(interval_seconds)],
            env=env,
            stdin=subprocess.DEVNULL,
        )
        processes.append(process)
        return Measured(process)

    return start


@pytest.fixture
def start_bare_relay(
    scripts: Path, processes: list[subprocess.Popen[bytes]], env: dict[str, str], tmp_path: Path
) -> Callable[[str, str, float], Measured]:
    """Return a function that starts a bare relay from a document URL to a webhook URL in the agent's venv."""

    def start(document_url: str, webhook_url: str, interval_seconds: float) -> Measured:
        program, database = _HERE / "bare_relay.py", tmp_path / "relay.db"
        process = subprocess.Popen(
            [scripts / "python", program, document_url, webhook_url, str(interval_seconds), database],
            env=env,
            stdin=subprocess.DEVNULL,
        )
        processes.append(process)
        return Measured(process)

    return start


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], dict[str, tuple[int, int]]]:
    """Return a function that returns the size and modification time of every file in tmp_path."""

    def look() -> dict[str, tuple[int, int]]:
        found = ((str(path), path.stat()) for path in sorted(tmp_path.rglob("*")))
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found}

    return look
