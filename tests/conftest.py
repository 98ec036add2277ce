"""Shared by all tests: the environment of agents, the Hypothesis profiles, the workers, and a check for leaked threads.

An agent under test must not inherit variables that hide its faults. PYTHONUNBUFFERED hides output that is lost in a
buffer, and PYTHONDONTWRITEBYTECODE increases memory. A forced color or a configuration file of the developer changes
the output and the behavior of the agent.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_NOT_FOR_AGENTS = (
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "FORCE_COLOR",
    "CLICOLOR_FORCE",
    "SCHEDULED_EVENTS_BRIDGE_CONFIG",
    "STATE_DIRECTORY",
)
_LAST_THREADS_SECONDS = 2.0
_WORKERS = 10
_HERE = Path(__file__).parent
_OTHER_TIERS = ("deploy", "interop", "packaging")

# No deadline and no too_slow check, because a busy machine is not a fault of the code. Examples are random on a
# developer's machine, where a new counter-example is welcome. In CI they are the same in every run, so that a failure
# means that the commit broke the test.
_PROFILE = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("desk", _PROFILE)
settings.register_profile("ci", _PROFILE, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_configure(config: pytest.Config) -> None:
    """Restore the default signal handlers and set a strict umask.

    A shell that starts the tests in the background leaves SIGINT ignored. With a umask of 002, files of the tests would
    be writable by the group, and agents would refuse to approve.
    """
    _begin_elsewhere(config)
    os.umask(os.umask(0o022) | 0o022)
    # Agents keep files until the next boot in this directory. It is removed after the run.
    runtime = tempfile.mkdtemp(prefix="runtime-")
    os.environ["RUNTIME_DIRECTORY"] = runtime
    atexit.register(shutil.rmtree, runtime, ignore_errors=True)
    for name, handler in (
        ("SIGINT", signal.default_int_handler),
        ("SIGTERM", signal.SIG_DFL),
        ("SIGHUP", signal.SIG_DFL),
    ):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the default suite as with `-n 10 --dist worksteal`, unless the command line sets `-n`.

    Most tests wait for a deadline or a process, so ten workers keep two cores busy. Single files run without workers,
    because the workers would take longer to start than the tests. The other tiers run without workers as well, because
    their tests measure time or share machines.
    """
    is_chosen = config.option.markexpr not in config.getini("addopts") or any(
        ".py" in argument for argument in config.args
    )
    is_told = getattr(config.option, "numprocesses", 0) is not None or config.option.usepdb
    if is_chosen or is_told or "PYTEST_XDIST_WORKER" in os.environ:  # a worker starts no workers
        return
    config.option.numprocesses = _WORKERS
    config.option.dist = "worksteal"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each worker compiles every test again


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the folders in which the default run deselects every test. Their import takes seconds in each worker."""
    is_default = config.option.markexpr in config.getini("addopts")
    return True if is_default and collection_path.parent == _HERE and collection_path.name in _OTHER_TIERS else None


def _begin_elsewhere(config: pytest.Config) -> None:
    """Let each worker import another part of the tests first, so that each test is compiled only once."""
    folders = [Path(argument).resolve() for argument in config.args]
    if not hasattr(config, "workerinput") or not all(each.is_dir() and each.is_relative_to(_HERE) for each in folders):
        return
    files = [str(path) for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    first = len(files) * int(config.workerinput["workerid"].removeprefix("gw")) // config.workerinput["workercount"]
    config.args[:] = files[first:] + files[:first]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all workers the tests in the same order, as xdist requires."""
    items.sort(key=lambda item: item.path)  # stable: the tests of a file keep their order


@pytest.fixture
def agent_env() -> dict[str, str]:
    """Return the environment for agents: the current one, without variables that hide faults."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_FOR_AGENTS}


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaks a non-daemon thread. Such a thread would keep an agent from exiting."""
    before = set(threading.enumerate())
    yield
    leaked = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    deadline = time.monotonic() + _LAST_THREADS_SECONDS
    for thread in leaked:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [thread.name for thread in leaked if thread.is_alive()]
    if alive:
        pytest.fail(f"The test left {len(alive)} thread(s) running: {', '.join(alive)}. Stop and join them.")
